"""What a store is to hold: a DGLGraph or a data set as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import dgl
import numpy as np
import torch

from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.errors import InvalidInputError, nearest
from dgl_mgpu.store.edges import ends_of
from dgl_mgpu.store.embedding.tables import EmbeddingSpec, Specs, read_specs, with_embeddings
from dgl_mgpu.store.memory import FeatureSource, TopologySource
from dgl_mgpu.store.memory.tables import Source
from dgl_mgpu.store.table_names import (
    CanonicalEtype,
    Nodes,
    edge_table,
    ends_table,
    node_table,
    topology_table,
)

# DGL's names in a homogeneous graph.
_NTYPE = "_N"
_ETYPE = (_NTYPE, "_E", _NTYPE)
#: By name, or by node type and name.
Embeddings = Mapping[str, int | EmbeddingSpec | Mapping[str, int | EmbeddingSpec]]
# Edge ids looked at together.
_STRETCH = 1 << 24


@dataclass(frozen=True)
class StoreSchema:
    """What is stored, beside the data."""

    num_nodes: dict[str, int]
    canonical_etypes: list[CanonicalEtype]
    #: What trains each embedding, by node type and name.
    optimizers: dict[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Content:
    """A graph as tables."""

    schema: StoreSchema
    sources: dict[str, Source]
    #: Nodes that mini-batches start from; all of the first type where that is not known.
    seeds: Nodes
    embeddings: Specs = field(default_factory=dict)


def of_dataset(dataset: Dataset | HeteroDataset) -> Content:
    """A data set, of one type of nodes and edges or of several, or InvalidInputError."""
    if isinstance(dataset, HeteroDataset):
        return _of_heterogeneous(dataset)
    if isinstance(dataset, dgl.DGLGraph | str):
        raise InvalidInputError(
            "store a data set",
            f"it is of type {type(dataset).__name__}, not a data set",
            "pass what dgl_mgpu.load gives, or a graph to from_dgl",
        )
    return _of_homogeneous(dataset)


def _of_heterogeneous(dataset: HeteroDataset) -> Content:
    num_nodes = dict(sorted(dataset.num_nodes.items()))
    edges = dict(sorted(dataset.edges.items()))
    idtype = torch.int32 if dataset.id_dtype == np.int32 else torch.int64
    sources: dict[str, Source] = {
        topology_table(etype): TopologySource(
            csc.indptr, csc.indices, None, num_nodes[etype[0]], idtype, etype[2]
        )
        for etype, csc in edges.items()
    }
    for ntype, features in dataset.node_features.items():
        for name, rows in features.items():
            sources[node_table(ntype, name)] = FeatureSource(rows, ntype)
    sources[node_table(dataset.target, "label")] = FeatureSource(dataset.labels, dataset.target)
    seeds = {dataset.target: torch.tensor(dataset.train)}
    return Content(StoreSchema(num_nodes, list(edges)), sources, seeds)


def _of_homogeneous(dataset: Dataset) -> Content:
    idtype = torch.int32 if dataset.id_dtype == np.int32 else torch.int64
    sources: dict[str, Source] = {
        topology_table(_ETYPE): TopologySource(
            dataset.indptr, dataset.indices, dataset.eids, dataset.num_nodes, idtype, _NTYPE
        )
    }
    for name, rows in (*dataset.node_features.items(), ("label", dataset.labels)):
        sources[node_table(_NTYPE, name)] = FeatureSource(rows, _NTYPE)
    for name, rows in dataset.edge_features.items():
        sources[edge_table(_ETYPE, name)] = FeatureSource(rows)
    schema = StoreSchema({_NTYPE: dataset.num_nodes}, [_ETYPE])
    return Content(schema, sources, torch.tensor(dataset.train))


def _feature(name: str, rows: torch.Tensor, position: str) -> FeatureSource:
    if rows.layout != torch.strided:
        raise InvalidInputError(
            "store a DGLGraph",
            f"feature '{name}' has layout {rows.layout}, whose rows are not all of one size",
            f"store it as rows of numbers: data['{name}'].to_dense()",
        )
    if rows.numel() == 0 and len(rows):
        raise InvalidInputError(
            "store a DGLGraph",
            f"feature '{name}' has shape {tuple(rows.shape)}, so its rows are empty",
            f"leave it out: pop '{name}' from the graph's data",
        )
    return FeatureSource(rows, position)


def require_storable(g: dgl.DGLGraph) -> None:
    """Raise InvalidInputError unless it is a graph on the CPU."""
    if not isinstance(g, dgl.DGLGraph):
        raise InvalidInputError(
            "store a graph",
            f"it is of type {type(g).__name__}, not a DGLGraph",
            "pass a dgl.DGLGraph, or use from_dataset",
        )
    if g.device.type != "cpu":
        raise InvalidInputError(
            "store a DGLGraph",
            f"the graph is on {g.device}, and a store is built from a graph on the CPU",
            "pass g.to('cpu')",
        )
    if g.is_block:
        raise InvalidInputError(
            "store a DGLGraph",
            "it is a block of a mini-batch, not a whole graph",
            "pass the graph that blocks are sampled from",
        )


def of_dgl(g: dgl.DGLGraph, seeds: Nodes | None) -> Content:
    """A graph on the CPU with its node and edge features, or InvalidInputError."""
    require_storable(g)
    sources: dict[str, Source] = {}
    # A graph may be restricted to formats that have no in-edges, by node.
    formats = g.formats()
    known = {name for names in formats.values() for name in names}
    in_edges = g if "csc" in known else g.formats(["csc"])
    for etype in g.canonical_etypes:
        indptr, indices, eids = in_edges.adj_tensors("csc", etype=etype)
        sources[topology_table(etype)] = TopologySource(
            indptr.to(torch.int64).numpy(),
            indices.numpy(),
            None if _are_places(eids) else eids.numpy(),
            g.num_nodes(etype[0]),
            g.idtype,
            etype[2],
        )
        for name, rows in g.edges[etype].data.items():
            sources[edge_table(etype, name)] = _feature(name, rows, "")
    for ntype in g.ntypes:
        for name, rows in g.nodes[ntype].data.items():
            sources[node_table(ntype, name)] = _feature(name, rows, ntype)
    schema = StoreSchema({ntype: g.num_nodes(ntype) for ntype in g.ntypes}, g.canonical_etypes)
    if seeds is None:
        seeds = {ntype: g.nodes(ntype) for ntype in g.ntypes}
    return Content(schema, sources, seeds)


def _are_places(eids: torch.Tensor) -> bool:
    """Whether edges are numbered as they lie, so that a store need not keep their ids."""
    stretches = enumerate(eids.split(_STRETCH))
    return all(
        torch.equal(some, torch.arange(at * _STRETCH, at * _STRETCH + len(some), dtype=some.dtype))
        for at, some in stretches
    )


def with_ends(data: Content, edges: bool) -> Content:
    """The same with a table of ends for edges that are not numbered as they lie, if asked for."""
    sources = dict(data.sources)
    for etype in data.schema.canonical_etypes if edges else ():
        topology = sources[topology_table(etype)]
        if isinstance(topology, TopologySource) and topology.eids is not None:
            sources[ends_table(etype)] = FeatureSource(ends_of(topology))
    return replace(data, sources=sources)


def with_narrow_features(data: Content, dtypes: Mapping[str, torch.dtype]) -> Content:
    """The same with node features kept in these types, or InvalidInputError if they cannot be."""
    sources = dict(data.sources)
    for name, dtype in dtypes.items():
        called = f"node feature '{name}'"
        asked = f"keep {called} as {dtype}"
        there = [
            table
            for ntype in data.schema.num_nodes
            if (table := node_table(ntype, name)) in sources
        ]
        if not there:
            nodes = (table.split("/", 2) for table in sources)
            known = sorted({rest[-1] for kind, *rest in nodes if kind == "node"})
            fix = nearest(name, known) if known else "leave it out: the nodes have no features"
            raise InvalidInputError(asked, "the graph has no such feature", fix)
        for table in there:
            source = sources[table]
            assert isinstance(source, FeatureSource)
            given = source.given
            if not given.is_floating_point or given.itemsize <= dtype.itemsize:
                raise InvalidInputError(
                    asked,
                    f"its rows have dtype {given}, which cannot be narrowed to {dtype}",
                    "name features of a wider floating-point type alone",
                )
            sources[table] = replace(source, stored=dtype, name=called)
    return replace(data, sources=sources)


def with_learned_rows(data: Content, embeddings: Embeddings | None) -> Content:
    """The data and tables for embeddings, or InvalidInputError if there can be none."""
    num_nodes = data.schema.num_nodes
    specs = read_specs(embeddings, list(num_nodes))
    optimizers = {of: spec.optimizer for of, spec in specs.items()}
    return replace(
        data,
        schema=replace(data.schema, optimizers=optimizers),
        sources=with_embeddings(data.sources, specs, num_nodes),
        embeddings=specs,
    )

"""The content of a store: a DGLGraph or a data set as tables."""

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
from dgl_mgpu.store.graph_structure import Nodes, edge_table, ends_table, node_table, topology_table
from dgl_mgpu.store.memory import FeatureSource, TopologySource
from dgl_mgpu.store.memory.format import Source
from dgl_mgpu.store.part_exchange import PartExchange
from dgl_mgpu.utils.types import CanonicalEtype

# DGL's names in a homogeneous graph.
_NTYPE = "_N"
_ETYPE = (_NTYPE, "_E", _NTYPE)
#: By name, or by node type and name.
Embeddings = Mapping[str, int | EmbeddingSpec | Mapping[str, int | EmbeddingSpec]]
# Edge ids compared at a time.
_CHUNK_IDS = 1 << 24


@dataclass(frozen=True)
class StoreSchema:
    """Node and edge types of a store, and the optimizers of its embeddings."""

    num_nodes: dict[str, int]
    canonical_etypes: list[CanonicalEtype]
    #: The optimizer of each embedding, by node type and name.
    optimizers: dict[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Content:
    """A graph as tables."""

    schema: StoreSchema
    sources: dict[str, Source]
    #: Nodes that mini-batches start from; all of the first type where that is not known.
    seeds: Nodes
    embeddings: Specs = field(default_factory=dict)
    #: Of a graph in parts, by node type, the first node of each part, and how often each node is
    #: another's neighbour; and who asks other machines for rows.
    bounds: dict[str, list[int]] | None = None
    degrees: dict[str, np.ndarray] | None = None
    exchange: PartExchange | None = None


def read_dataset(dataset: Dataset | HeteroDataset) -> Content:
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


def read_graph(g: dgl.DGLGraph, seeds: Nodes | None) -> Content:
    """A graph on the CPU with its node and edge features, or InvalidInputError."""
    require_storable(g)
    sources: dict[str, Source] = {}
    # A graph may be restricted to formats without in-edges by node.
    formats = g.formats()
    known = {name for names in formats.values() for name in names}
    in_edges = g if "csc" in known else g.formats(["csc"])
    for etype in g.canonical_etypes:
        indptr, indices, eids = in_edges.adj_tensors("csc", etype=etype)
        sources[topology_table(etype)] = TopologySource(
            indptr.to(torch.int64).numpy(),
            indices.numpy(),
            None if _are_positions(eids) else eids.numpy(),
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


def _are_positions(eids: torch.Tensor) -> bool:
    """Whether edge ids are positions in the CSC, so that a store need not keep them."""
    starts = range(0, len(eids), _CHUNK_IDS)
    return all(
        torch.equal(ids, torch.arange(start, start + len(ids), dtype=ids.dtype))
        for start, ids in zip(starts, eids.split(_CHUNK_IDS), strict=False)
    )


def with_ends(data: Content, edges: bool, spans: bool) -> Content:
    """The same with tables of ends, if ``edges``, for edges whose ids are not their positions.

    Of a store that ``spans`` machines, none of which has all edges, for all.
    """
    sources = dict(data.sources)
    for etype in data.schema.canonical_etypes if edges else ():
        topology = sources[topology_table(etype)]
        if isinstance(topology, TopologySource) and (spans or topology.eids is not None):
            sources[ends_table(etype)] = FeatureSource(ends_of(topology))
    return replace(data, sources=sources)


def with_narrow_features(data: Content, dtypes: Mapping[str, torch.dtype]) -> Content:
    """The same with node features kept in these types, or InvalidInputError if they cannot be."""
    sources = dict(data.sources)
    for name, dtype in dtypes.items():
        label = f"node feature '{name}'"
        action = f"keep {label} as {dtype}"
        tables = [
            table
            for ntype in data.schema.num_nodes
            if (table := node_table(ntype, name)) in sources
        ]
        if not tables:
            nodes = (table.split("/", 2) for table in sources)
            known = sorted({rest[-1] for kind, *rest in nodes if kind == "node"})
            fix = nearest(name, known) if known else "leave it out: the nodes have no features"
            raise InvalidInputError(action, "the graph has no such feature", fix)
        for table in tables:
            source = sources[table]
            assert isinstance(source, FeatureSource)
            source_dtype = source.source_dtype
            if not source_dtype.is_floating_point or source_dtype.itemsize <= dtype.itemsize:
                raise InvalidInputError(
                    action,
                    f"its rows have dtype {source_dtype}, which cannot be narrowed to {dtype}",
                    "name features of a wider floating-point type alone",
                )
            sources[table] = replace(source, stored=dtype, name=label)
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

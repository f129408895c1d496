"""GraphBolt's graphs and features as the content of a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.stored_tensors import is_watched, remember_stored
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.store.content import Content, StoreSchema
from dgl_mgpu.store.feature_storage import TableStorage
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.store.graph_structure import Nodes, node_table, topology_table
from dgl_mgpu.store.memory import FeatureSource, TopologySource
from dgl_mgpu.store.memory.format import Source
from dgl_mgpu.utils.types import ETYPE, NTYPE, CanonicalEtype

#: Of nodes, by type and name.
NodeFeatures = Mapping[tuple[str, str], Tensor]

_ACTION = "store a graph of GraphBolt"


def node_features(features: Any) -> dict[tuple[str, str], Tensor]:
    """The tensors of a feature store that a store can keep: those of nodes, in the host's memory.

    Features are GraphBolt's own, in memory or mapped from a file, also behind a cache on a GPU;
    others keep being read where they are.  Raises InvalidInputError if there are no features.
    """
    known = getattr(features, "_features", features)
    if known is None:
        return {}
    if not isinstance(known, Mapping):
        raise InvalidInputError(
            _ACTION,
            f"its features are of type {type(features).__name__}",
            "pass a BasicFeatureStore, such as dataset.feature",
        )
    tensors = {}
    for (domain, ntype, name), feature in known.items():
        rows = tensor_of(feature)
        if domain == "node" and rows is not None and is_storable(rows):
            tensors[ntype or NTYPE, name] = rows
    return tensors


def tensor_of(feature: Any) -> Tensor | None:
    """The tensor that a feature of GraphBolt's reads; None for one of another kind."""
    from dgl import graphbolt
    from dgl.graphbolt import GPUCachedFeature, TorchBasedFeature

    if type(feature) is GPUCachedFeature:
        feature = feature._fallback_feature
    is_known = type(feature) in (TorchBasedFeature, graphbolt.DiskBasedFeature)
    return feature._tensor if is_known else None


def is_storable(rows: Tensor) -> bool:
    """Whether a store can keep a feature's rows."""
    has_rows = rows.numel() > 0 or len(rows) == 0
    return rows.device.type == "cpu" and is_watched(rows) and has_rows


def read_graphbolt(graph: Any, features: NodeFeatures, seeds: Nodes | None) -> Content:
    """A ``FusedCSCSamplingGraph`` on the CPU with features of its nodes, or InvalidInputError.

    Edge ids are places in the CSC, in that of a type where there are several.
    """
    from dgl.graphbolt import FusedCSCSamplingGraph

    if not isinstance(graph, FusedCSCSamplingGraph):
        raise InvalidInputError(
            _ACTION,
            f"it is of type {type(graph).__name__}",
            "pass a FusedCSCSamplingGraph, such as dataset.graph; of a DGLGraph use from_dgl",
        )
    if graph.indices.device.type != "cpu":
        raise InvalidInputError(
            _ACTION, f"the graph is on {graph.indices.device}", "pass one on the CPU"
        )
    num_nodes = _num_nodes(graph)
    sources: dict[str, Source] = {}
    etypes = []
    for etype, indptr, indices in _relations(graph):
        etypes.append(etype)
        sources[topology_table(etype)] = TopologySource(
            indptr.long().numpy(),
            indices.numpy(),
            None,
            num_nodes[etype[0]],
            indices.dtype,
            etype[2],
        )
    for (ntype, name), rows in features.items():
        if len(rows) != num_nodes.get(ntype):
            raise InvalidInputError(
                _ACTION,
                f"feature '{name}' of '{ntype}' has {len(rows)} rows, and the graph"
                f" {num_nodes.get(ntype, 'none')} of such nodes",
                "pass features of this graph; those of other sizes can be left out",
            )
        sources[node_table(ntype, name)] = FeatureSource(rows, ntype)
    if seeds is None:
        seeds = {ntype: torch.arange(count) for ntype, count in num_nodes.items()}
    return Content(StoreSchema(num_nodes, etypes), sources, seeds)


def _num_nodes(graph: Any) -> dict[str, int]:
    if graph.type_per_edge is None:
        return {NTYPE: graph.total_num_nodes}
    counts = graph.node_type_offset.diff().tolist()
    return {ntype: counts[number] for ntype, number in sorted(graph.node_type_to_id.items())}


def _relations(graph: Any) -> Iterator[tuple[CanonicalEtype, Tensor, Tensor]]:
    """The in-edges of each edge type by destination, with ids of their node types."""
    indptr, indices, types = graph.csc_indptr, graph.indices, graph.type_per_edge
    if types is None:
        yield (NTYPE, ETYPE, NTYPE), indptr, indices
        return
    offsets, ntypes = graph.node_type_offset.tolist(), graph.node_type_to_id
    targets = torch.arange(len(indptr) - 1).repeat_interleave(indptr.long().diff())
    for name, number in sorted(graph.edge_type_to_id.items()):
        source, etype, target = name.split(":")
        (places,) = (types == number).nonzero(as_tuple=True)
        first, last = offsets[ntypes[target]], offsets[ntypes[target] + 1]
        counts = torch.bincount(targets[places] - first, minlength=last - first)
        own = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        yield (source, etype, target), own, indices[places] - offsets[ntypes[source]]


@dataclass(frozen=True)
class StoredRows:
    """A feature in a store, which it keeps."""

    graph: StoreGraph
    storage: TableStorage

    @property
    def is_open(self) -> bool:
        """As :class:`~dgl_mgpu.graph.stored_tensors.StoredContents` says."""
        return not self.storage._table.is_closed

    def fetch(self, ids: Tensor) -> Tensor:
        """Rows by their ids, on the device of these."""
        return self.storage.fetch(ids, ids.device)


@dataclass(frozen=True)
class StoredTopology:
    """The edges of a graph in a store, which it keeps."""

    graph: StoreGraph

    @property
    def is_open(self) -> bool:
        """As :class:`~dgl_mgpu.graph.stored_tensors.StoredContents` says."""
        return self.graph._structure.is_open

    def view(self) -> GraphView:
        """The edges as operators read them."""
        return self.graph._structure.view()


def read_from_store(store_graph: StoreGraph, graph: Any, features: NodeFeatures) -> None:
    """Have GraphBolt read the store where it would read these tensors for its device.

    A graph of several edge types is sampled where it is, and one that torch does not watch.
    """
    device = store_graph.device
    for (ntype, name), rows in features.items():
        stored = StoredRows(store_graph, store_graph.get_node_storage(name, ntype))
        remember_stored(stored, device, rows)
    graph._c_csc_graph.was_stored = True
    topology = graph.indices, graph.csc_indptr
    if graph.type_per_edge is None and all(map(is_watched, topology)):
        remember_stored(StoredTopology(store_graph), device, *topology)

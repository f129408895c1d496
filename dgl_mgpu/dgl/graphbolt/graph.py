"""GraphBolt's graph and what is sampled from it, in place of the classes of its C++ library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import Tensor

from dgl_mgpu.dgl.graphbolt import shared_memory
from dgl_mgpu.dgl.graphbolt.edge_types import EdgesByType
from dgl_mgpu.dgl.graphbolt.keys import keys
from dgl_mgpu.dgl.graphbolt.picking import (
    Edges,
    check_rows,
    draws_of_32_bits,
    index_select,
    joined,
    pick_by_layer,
    rows_of,
    sample,
)
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.relation import Compressed
from dgl_mgpu.graph.stored_tensors import stored_on
from dgl_mgpu.ops import (
    GraphView,
    SampledBlock,
    SampledNeighbors,
    SampleKey,
    sample_blocks_async,
    sample_neighbors,
)
from dgl_mgpu.ops.sample_future import SampleFuture
from dgl_mgpu.sampling.views import compressed_view, scalars_view

#: What a graph consists of, in the order of the constructor's arguments.
_PARTS = (
    *("csc_indptr", "indices", "node_type_offset", "type_per_edge"),
    *("node_type_to_id", "edge_type_to_id", "node_attributes", "edge_attributes"),
)


@dataclass(eq=False)
class FusedSampledSubgraph:
    """Sampled in-edges of nodes, of all types together.

    Attributes
    ----------
    indptr : Tensor, shape (n + 1,)
        Node ``i`` has the edges ``indptr[i]`` to ``indptr[i + 1]``.
    indices : Tensor, shape (E,)
        Source of each edge.
    original_column_node_ids : Tensor, shape (n,)
    original_row_node_ids : None
    original_edge_ids : Tensor, shape (E,), or None
        Places of the edges in the graph.
    type_per_edge : Tensor, shape (E,), or None
    """

    indptr: Tensor
    indices: Tensor
    original_column_node_ids: Tensor
    original_row_node_ids: Tensor | None = None
    original_edge_ids: Tensor | None = None
    type_per_edge: Tensor | None = None


class FusedCSCSamplingGraph:
    """A graph in CSC format, with nodes and edges of all types together.

    Nodes of a type have consecutive ids, and the in-edges of a node are in the order of their
    types.  Parameters are those of ``dgl.graphbolt.fused_csc_sampling_graph``.
    """

    def __init__(self, *parts: Any) -> None:
        self._parts: dict[str, Any] = dict(zip(_PARTS, parts, strict=True))
        _check(self._parts)
        #: Whether a store was made of it; no loader makes another one.
        self.was_stored = False
        #: The name in shared memory, if it is there, and what gives it up.
        self._name: str | None = None
        self._owner: object = None
        self._forget()

    def _forget(self) -> None:
        """Forget what was made of the parts."""
        #: By device, and whether edges of a node are apart by type.
        self._views: dict[tuple[torch.device, bool], GraphView] = {}
        self._by_type: EdgesByType | None = None
        self._type_offsets: dict[torch.device, Tensor] = {}
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        """How often the structure was changed in place."""
        tensors = (self._parts[name] for name in _PARTS[:4])
        return [it._version for it in tensors if it is not None and not it.is_inference()]

    def __getstate__(self) -> dict[str, Any]:
        # In a process that is started, it is the same memory.
        is_shared = self._name is not None and get_spawning_popen() is not None
        return {"name": self._name} if is_shared else dict(self._parts)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._name, self._owner, self.was_stored = state.get("name"), None, False
        self._parts = state if self._name is None else shared_memory.load(self._name)
        self._forget()

    def copy_to_shared_memory(self, name: str) -> FusedCSCSamplingGraph:
        """A copy that other processes load by its name, as long as it lives."""
        parts, owner = shared_memory.share(self._parts, name)
        copy = FusedCSCSamplingGraph(*parts.values())
        copy._name, copy._owner = name, owner
        return copy

    def num_nodes(self) -> int:
        """Nodes of all types."""
        return len(self._parts["csc_indptr"]) - 1

    def num_edges(self) -> int:
        """Edges of all types."""
        return len(self._parts["indices"])

    # -- sampling -------------------------------------------------------------------------

    def in_subgraph(self, nodes: Tensor) -> FusedSampledSubgraph:
        """All in-edges of nodes."""
        sampled = sample_neighbors(self._view(nodes.device), nodes, -1, keys.next())
        return self._subgraph(nodes, sampled, with_eids=True)

    def sample_neighbors(
        self,
        nodes: Tensor | None,
        fanouts: Sequence[int],
        replace: bool,
        by_layer: bool,
        return_eids: bool,
        probs_name: str | None,
    ) -> FusedSampledSubgraph:
        """In-edges of nodes; arguments are those of ``dgl.graphbolt``'s methods.

        With ``by_layer`` nodes choose the same neighbors, as far as that is possible, as
        ``sample_layer_neighbors`` says.  Without ``nodes``, on a GPU, all are sampled.
        """
        indptr, indices = self._parts["csc_indptr"], self._parts["indices"]
        if nodes is None:
            if indptr.device.type == "cpu":
                raise InvalidInputError(
                    "sample neighbors", "nodes is None", "pass nodes; on a GPU None means all"
                )
            nodes = torch.arange(self.num_nodes(), dtype=indices.dtype, device=indptr.device)
        self._check_types(fanouts)
        weights = None if probs_name is None else self._weights_of(probs_name)
        if by_layer:
            edges = self._all_edges(nodes)
            return self._picked(nodes, edges, fanouts, replace, return_eids, weights, True)
        if len(fanouts) == 1:
            (fanout,) = fanouts
            if replace and fanout >= 0 and weights is None and nodes.device.type == "cpu":
                sampled = self._drawn(nodes, fanout)
            else:
                view = self._view(nodes.device)
                sampled = sample(view, nodes, fanout, keys.next(), replace, weights)
            return self._subgraph(nodes, self._sorted(sampled), return_eids)
        check_rows(nodes, self.num_nodes(), "sample neighbors")
        by_type = self._split_by_type()
        view, key = self._view(nodes.device, by_type=True), keys.next()
        samples = []
        for etype, fanout in enumerate(fanouts):
            places, rows = by_type.rows_of(nodes, etype)
            samples.append((places, sample(view, rows, fanout, key, replace, weights)))
        return self._subgraph(nodes, joined(len(nodes), samples), return_eids)

    def sample_layers_async(
        self, seeds: Tensor, fanouts: Sequence[int], replace: bool, probs_name: str | None
    ) -> SampleFuture[list[SampledBlock]]:
        """Start sampling the neighbors of nodes, and the neighbors of those, without edge types.

        Fanouts are those of the layers, the one nearest the input first.
        """
        weights = None
        if probs_name is not None:
            weights = scalars_view(self._weights_of(probs_name), seeds.device)
        view = self._view(seeds.device)
        return sample_blocks_async(
            view, seeds, fanouts, keys.next(), replace=replace, weights=weights
        )

    def temporal_sample_neighbors(
        self,
        nodes: Tensor,
        timestamps: Tensor,
        fanouts: Sequence[int],
        replace: bool,
        by_layer: bool,
        return_eids: bool,
        probs_name: str | None,
        node_timestamp_name: str | None,
        edge_timestamp_name: str | None,
    ) -> FusedSampledSubgraph:
        """As :meth:`sample_neighbors`, of edges and neighbors strictly earlier than the node."""
        if timestamps.shape != nodes.shape:
            raise InvalidInputError(
                "sample neighbors by time",
                f"there are {len(nodes)} nodes, and timestamps of shape {tuple(timestamps.shape)}",
                "pass one timestamp for each node",
            )
        self._check_types(fanouts)
        weights = None if probs_name is None else self._weights_of(probs_name)
        edges = self._all_edges(nodes)
        until = timestamps[edges.rows]
        is_earlier = torch.ones_like(edges.rows, dtype=torch.bool)
        if node_timestamp_name is not None:
            times = self._attribute("node_attributes", node_timestamp_name)
            is_earlier &= index_select(times, edges.neighbors) < until
        if edge_timestamp_name is not None:
            times = self._attribute("edge_attributes", edge_timestamp_name)
            is_earlier &= index_select(times, edges.eids) < until
        edges = edges.where(is_earlier)
        return self._picked(nodes, edges, fanouts, replace, return_eids, weights, by_layer)

    def _picked(
        self,
        nodes: Tensor,
        edges: Edges,
        fanouts: Sequence[int],
        replace: bool,
        return_eids: bool,
        weights: Tensor | None,
        by_layer: bool,
    ) -> FusedSampledSubgraph:
        """Some of the in-edges of nodes, which are there one by one."""
        own = None if weights is None else index_select(weights, edges.eids)
        if len(fanouts) > 1:
            types = index_select(self._parts["type_per_edge"], edges.eids).long()
            groups = edges.rows * len(fanouts) + types
        else:
            groups = edges.rows
        counts = torch.bincount(groups, minlength=len(nodes) * len(fanouts))
        key, samples = keys.next(), []
        if by_layer:
            places = pick_by_layer(edges, counts, groups, fanouts, key, replace, own)
            numbers = torch.arange(len(nodes) + 1, device=places.device)
            indptr = torch.searchsorted(edges.rows[places], numbers)
            sampled = SampledNeighbors(indptr, edges.neighbors[places], edges.eids[places])
            return self._subgraph(nodes, sampled, return_eids)
        # Edges are in the order of these groups: they are the rows of a graph, whose neighbors are
        # the edges' places.
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        places = torch.arange(len(edges.rows), device=groups.device)
        matrix = Compressed(indptr, places, None)
        view = compressed_view(matrix, len(counts), len(places), groups.device)
        numbers = torch.arange(len(nodes), device=groups.device)
        for etype, fanout in enumerate(fanouts):
            rows = numbers * len(fanouts) + etype
            samples.append((numbers, sample(view, rows, fanout, key, replace, own)))
        sampled = joined(len(nodes), samples)
        picked = sampled.neighbors
        sampled = SampledNeighbors(sampled.indptr, edges.neighbors[picked], edges.eids[picked])
        if len(fanouts) == 1:
            sampled = self._sorted(sampled)
        return self._subgraph(nodes, sampled, return_eids)

    def _sorted(self, sampled: SampledNeighbors) -> SampledNeighbors:
        """A sample in which the edges of a node are in the order of types, if there are types."""
        if self._parts["type_per_edge"] is None:
            return sampled
        order = (rows_of(sampled) * self.num_edges() + sampled.eids).argsort()
        return SampledNeighbors(sampled.indptr, sampled.neighbors[order], sampled.eids[order])

    def _check_types(self, fanouts: Sequence[int]) -> None:
        """Raise InvalidInputError unless each edge type has a fanout."""
        if len(fanouts) > 1 and self._split_by_type().num_types > len(fanouts):
            raise InvalidInputError(
                "sample neighbors of each edge type",
                f"there are {len(fanouts)} fanouts, but ids of edge types up to"
                f" {self._split_by_type().num_types - 1}",
                "pass a fanout for each edge type; ids are numbers from 0 on",
            )

    def _attribute(self, kind: str, name: str) -> Tensor:
        attributes = self._parts[kind] or {}
        if name not in attributes:
            raise InvalidInputError(
                f"read '{name}' of a graph's {kind}", f"there are {sorted(attributes)}", "name one"
            )
        return attributes[name]

    def _drawn(self, nodes: Tensor, fanout: int) -> SampledNeighbors:
        """Uniform draws with replacement, from torch's generator, which GraphBolt asks on CPUs."""
        check_rows(nodes, self.num_nodes(), "sample neighbors")
        indptr, indices = self._parts["csc_indptr"], self._parts["indices"]
        first = indptr[nodes]
        degrees = (indptr[nodes + 1] - first).long()
        counts = torch.where(degrees > 0, fanout, 0)
        rows = torch.arange(len(nodes)).repeat_interleave(counts)
        eids = draws_of_32_bits(len(rows)) % degrees[rows] + first[rows]
        bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return SampledNeighbors(bounds, indices[eids], eids)

    def _subgraph(
        self, nodes: Tensor, sampled: SampledNeighbors, with_eids: bool
    ) -> FusedSampledSubgraph:
        types, dtype = self._parts["type_per_edge"], self._parts["csc_indptr"].dtype
        return FusedSampledSubgraph(
            sampled.indptr.to(dtype),
            sampled.neighbors,
            nodes,
            original_edge_ids=sampled.eids.to(dtype) if with_eids else None,
            type_per_edge=None if types is None else index_select(types, sampled.eids),
        )

    # -- what operators read --------------------------------------------------------------

    def type_offsets(self, device: torch.device) -> Tensor:
        """Where the ids of each node type begin, and the number of nodes, on a device."""
        if self._versions_now() != self._versions:
            self._forget()
        offsets = self._type_offsets.get(device)
        if offsets is None:
            offsets = self._type_offsets[device] = self._parts["node_type_offset"].to(device)
        return offsets

    def parts(self) -> list[Any]:
        """What the graph consists of now."""
        return [*self._parts.values()]

    def views(self) -> list[GraphView]:
        """Those that samples have been drawn with."""
        return [*self._views.values()]

    def _all_edges(self, nodes: Tensor) -> Edges:
        sampled = sample_neighbors(self._view(nodes.device), nodes, -1, SampleKey(0))
        return Edges(rows_of(sampled), sampled.neighbors, sampled.eids)

    def _view(self, device: torch.device, *, by_type: bool = False) -> GraphView:
        if self._versions_now() != self._versions:
            self._forget()
        stored: Any = None
        if not by_type:
            stored = stored_on(device, self._parts["indices"], self._parts["csc_indptr"])
        if stored is not None:
            in_store: GraphView = stored.view()
            return in_store
        view = self._views.get((device, by_type))
        if view is None:
            indptr = self._split_by_type().indptr if by_type else self._parts["csc_indptr"]
            matrix = Compressed(indptr, self._parts["indices"], None)
            view = compressed_view(matrix, len(indptr) - 1, self.num_nodes(), device)
            self._views[device, by_type] = view
        return view

    def _weights_of(self, name: str) -> Tensor:
        """An edge attribute in a dtype that operators take."""
        values = self._attribute("edge_attributes", name)
        return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values

    def _split_by_type(self) -> EdgesByType:
        if self._versions_now() != self._versions:
            self._forget()
        if self._by_type is None:
            if any(self._parts[name] is None for name in ("node_type_offset", *_PARTS[3:6])):
                raise InvalidInputError(
                    "sample neighbors of each edge type",
                    "the graph does not say which types its nodes and edges have",
                    "pass one fanout, or make the graph with node_type_offset, type_per_edge,"
                    " node_type_to_id and edge_type_to_id",
                )
            self._by_type = EdgesByType(self._parts)
        return self._by_type


def load_from_shared_memory(name: str) -> FusedCSCSamplingGraph:
    """A graph that another process has put into shared memory."""
    graph = FusedCSCSamplingGraph(*shared_memory.load(name).values())
    graph._name = name
    return graph


def _check(parts: dict[str, Any]) -> None:
    """Raise InvalidInputError if parts of a graph do not fit each other."""
    indptr, indices, types = (parts[n] for n in ("csc_indptr", "indices", "type_per_edge"))
    wrong = None
    if indptr.dim() != 1 or indices.dim() != 1 or not len(indptr):
        wrong = "csc_indptr and indices are no vectors, or csc_indptr is empty"
    elif types is not None and len(types) != len(indices):
        wrong = f"there are {len(indices)} edges, and {len(types)} types of edges"
    counts = {"node_attributes": len(indptr) - 1, "edge_attributes": len(indices)}
    for kind, count in counts.items() if wrong is None else ():
        for name, values in (parts[kind] or {}).items():
            if len(values) != count:
                wrong = f"'{name}' of {kind} has {len(values)} rows, and there are {count}"
    if wrong is not None:
        raise InvalidInputError("make a graph", wrong, "pass one of each for each node or edge")


def _accessors(name: str) -> tuple[Any, Any]:
    def get(self: FusedCSCSamplingGraph) -> Any:
        return self._parts[name]

    def set_(self: FusedCSCSamplingGraph, value: Any) -> None:
        if value is self._parts[name]:
            return  # GraphBolt does so with every sample
        self._parts[name] = value
        self._name = None  # what is in shared memory is another graph now
        self._forget()

    return get, set_


for _name in _PARTS:
    _get, _set = _accessors(_name)
    setattr(FusedCSCSamplingGraph, _name, _get)
    setattr(FusedCSCSamplingGraph, f"set_{_name}", _set)

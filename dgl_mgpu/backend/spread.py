"""A graph index whose nodes lie on several ranks: message passing on it is its own affair."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from dgl import DGLGraph
from dgl.base import is_all
from dgl.udf import EdgeBatch

from dgl_mgpu.backend.index import TensorIndex

Features = torch.Tensor | None


class SpreadIndex(TensorIndex):
    """What DGL's message passing calls for a graph of which this process has a part.

    Operands have a row for each of this process's nodes or edges, as results do.  All methods are
    collective and differentiable.
    """

    @abstractmethod
    def gspmm(self, op: str, reduce: str, lhs: Any, rhs: Any) -> Any:
        """As ``dgl.ops.gspmm``, for one relation, or all with a list of operands a type."""

    @abstractmethod
    def gsddmm(self, op: str, lhs: Any, rhs: Any, lhs_target: str, rhs_target: str) -> Any:
        """As ``dgl.ops.gsddmm``."""

    @abstractmethod
    def edge_softmax(self, scores: torch.Tensor, norm_by: str) -> torch.Tensor:
        """As ``dgl.ops.edge_softmax`` over all edges of one relation."""

    @abstractmethod
    def of_sources(self, rows: torch.Tensor) -> torch.Tensor:
        """From a row for each node of the only relation's source type, one for each edge."""

    @abstractmethod
    def of_destinations(self, rows: torch.Tensor) -> torch.Tensor:
        """From a row for each node of the only relation's destination type, one for each edge."""


class _Columns(Mapping):
    """What nodes have, as the edges' ends: fetched when a user's function asks for it."""

    def __init__(self, of_nodes: Mapping, ends: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._of_nodes = of_nodes
        self._ends = ends

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._ends(self._of_nodes[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._of_nodes)

    def __len__(self) -> int:
        return len(self._of_nodes)


def edge_batch(graph: DGLGraph, eid: Any, etype: Any, orig_eid: Any) -> EdgeBatch:
    """What a user's function gets of edges, those of ``eid`` or all; see ``dgl.udf``."""
    number = graph.get_etype_id(etype)
    src, dst = graph._graph.metagraph.find_edge(number)
    index = graph._graph.get_relation_graph(number)
    edges = graph._edge_frames[number]
    whole = is_all(eid)
    if whole:
        ids = torch.arange(index.num_edges(0), dtype=index.idtype, device=index.device)
    else:
        ids, edges = eid, edges.subframe(eid)

    def of(ends: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return ends if whole else lambda rows: ends(rows)[ids.long()]

    return EdgeBatch(
        graph,
        ids if orig_eid is None else orig_eid,
        etype,
        _Columns(graph._node_frames[src], of(index.of_sources)),
        edges,
        _Columns(graph._node_frames[dst], of(index.of_destinations)),
    )

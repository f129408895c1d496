"""Graphs with as many edges as their ids can number, of which only what is read takes memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dgl_mgpu.ops.view import GraphView, RowView

NODES = 41


#: Edges of all nodes but the hub.
TAIL = sum(range(NODES - 1))


class LargeGraph:
    """A hub, node 0, and a few dozen nodes whose edges lie behind all of the hub's.

    Edge ``e`` comes from node ``1 + e % (NODES - 1)`` and has weight ``1 + e % 7``; node ``n``
    but the hub has ``n - 1`` in-edges.  It takes the place of a ``tests.ops.views.Graph`` in
    ``tests/ops/reference.py``, and remembers which edges that has read.

    Parameters
    ----------
    hub_degree : int
    """

    def __init__(self, hub_degree: int) -> None:
        degrees = np.concatenate([[hub_degree], np.arange(NODES - 1)])
        self.indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
        self.num_edges = int(self.indptr[-1])
        self.read: set[int] = set()

    def degree(self, node: int) -> int:
        return int(self.indptr[node + 1] - self.indptr[node])

    def edge_ids(self, node: int) -> range:
        return range(int(self.indptr[node]), int(self.indptr[node + 1]))

    def neighbors(self, node: int) -> _Sources:
        return _Sources(self, self.edge_ids(node))

    def view(self, indptr: torch.Tensor, indices: torch.Tensor) -> GraphView:
        """A view of arrays on any device."""
        addresses = [indptr.data_ptr(), indices.data_ptr(), 0]
        return GraphView(
            tiers=torch.tensor([[0, NODES, 1, 0]], device=indices.device),
            pointers=torch.tensor([addresses], device=indices.device),
            num_rows=NODES,
            num_cols=NODES,
            num_edges=self.num_edges,
            idtype=indices.dtype,
            owner=[[indptr, indices, indices]],
        )

    def weights_view(self, weights: torch.Tensor) -> RowView:
        return RowView(
            tiers=torch.tensor([[0, len(weights), 1, 0]], device=weights.device),
            pointers=torch.tensor([weights.data_ptr()], device=weights.device),
            num_rows=len(weights),
            row_shape=(),
            dtype=weights.dtype,
            owner=[weights],
        )


class Weights:
    """The weights of a large graph's edges, as ``tests/ops/reference.py`` reads them."""

    def __init__(self, graph: LargeGraph) -> None:
        self._graph = graph

    def __getitem__(self, edges: range) -> np.ndarray:
        self._graph.read.update(edges)
        return weights_of(np.array(edges))


class _Sources:
    """Where the in-edges of a node come from."""

    def __init__(self, graph: LargeGraph, edges: range) -> None:
        self._graph = graph
        self._edges = edges

    def __getitem__(self, place: int) -> int:
        edge = self._edges[place]
        self._graph.read.add(edge)
        return sources_of(edge)


def sources_of(edges):
    return 1 + edges % (NODES - 1)


def weights_of(edges):
    return 1 + edges % 7


def on_file(path: Path, graph: LargeGraph, dtype: torch.dtype, value_of) -> torch.Tensor:
    """One value an edge, in a file that has those of the edges read and holes elsewhere."""
    path.touch()
    values = torch.from_file(str(path), shared=True, size=graph.num_edges, dtype=dtype)
    edges = torch.tensor(sorted(graph.read))
    values[edges] = value_of(edges).to(dtype)
    return values


def filled(
    graph: LargeGraph, dtype: torch.dtype, value_of, device: torch.device, chunk: int = 1 << 26
) -> torch.Tensor:
    """One value an edge, for all edges, in a device's memory."""
    values = torch.empty(graph.num_edges, dtype=dtype, device=device)
    for begin in range(0, graph.num_edges, chunk):
        edges = torch.arange(begin, min(begin + chunk, graph.num_edges), device=device)
        values[begin : begin + chunk] = value_of(edges)
    return values

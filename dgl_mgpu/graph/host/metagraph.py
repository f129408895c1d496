"""DGL's index of graphs without types, which metagraphs are: C functions of its ``graph_index``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dgl._ffi.runtime_ctypes import DGLContext
from dgl.graph_index import GraphIndex

from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.relation import Coo, Relation

_CPU = DGLContext(1, 0)


class _Edges:
    """Nodes and edges, to which others may be added."""

    def __init__(
        self, num_nodes: int, row: torch.Tensor, col: torch.Tensor, is_readonly: bool
    ) -> None:
        self.num_nodes = num_nodes
        self.row, self.col = row, col
        self.is_readonly = is_readonly
        self.pairs = list(zip(row.tolist(), col.tolist(), strict=True))
        self._index: TensorIndex | None = None

    def change(self, num_nodes: int, row: torch.Tensor, col: torch.Tensor) -> None:
        """Have other nodes and edges from now on."""
        if self.is_readonly:
            raise InvalidCallError(
                "change a graph index", "it is read-only", "make another one of all edges"
            )
        self.__init__(num_nodes, row, col, False)  # type: ignore[misc]

    @property
    def index(self) -> TensorIndex:
        """The same as a graph of tensors, which answers queries."""
        if self._index is None:
            relation = Relation(self.num_nodes, self.num_nodes, coo=Coo(self.row, self.col))
            self._index = TensorIndex.single(relation, 1)
        return self._index


def _made(edges: _Edges) -> GraphIndex:
    graph = GraphIndex.__new__(GraphIndex)
    graph.handle = edges
    return graph


def _ids(ids: Any) -> torch.Tensor:
    return torch.as_tensor(ids, dtype=torch.int64).reshape(-1)


def create(src: torch.Tensor, dst: torch.Tensor, num_nodes: int, readonly: bool) -> GraphIndex:
    """A graph of edges; of as many nodes as these need, if there are more."""
    src, dst = _ids(src), _ids(dst)
    needed = 1 + max(int(end.max()) for end in (src, dst)) if src.numel() else 0
    if needed > num_nodes:
        raise InvalidCallError(
            "make a graph of edges",
            f"node {needed - 1} is not among the graph's {num_nodes} nodes",
            f"pass ids in [0, {num_nodes})",
        )
    return _made(_Edges(num_nodes, src, dst, bool(readonly)))


def create_mutable() -> GraphIndex:
    return _made(_Edges(0, _ids([]), _ids([]), False))


def add_nodes(graph: GraphIndex, count: int) -> None:
    edges = graph.handle
    edges.change(edges.num_nodes + count, edges.row, edges.col)


def add_edges(graph: GraphIndex, src: Any, dst: Any) -> None:
    """Add edges between nodes that there are; one node goes with many."""
    edges = graph.handle
    src, dst = torch.broadcast_tensors(_ids(src), _ids(dst))
    edges.change(edges.num_nodes, torch.cat([edges.row, src]), torch.cat([edges.col, dst]))


def clear(graph: GraphIndex) -> None:
    graph.handle.change(0, _ids([]), _ids([]))


def num_nodes(graph: GraphIndex) -> int:
    return graph.handle.num_nodes


def num_edges(graph: GraphIndex) -> int:
    return len(graph.handle.pairs)


def is_readonly(graph: GraphIndex) -> bool:
    return graph.handle.is_readonly


def is_multigraph(graph: GraphIndex) -> bool:
    return graph.handle.index.is_multigraph()


def has_node(graph: GraphIndex, node: int) -> bool:
    return 0 <= node < graph.handle.num_nodes


def has_nodes(graph: GraphIndex, nodes: torch.Tensor) -> torch.Tensor:
    return graph.handle.index.has_nodes(0, nodes)


def has_edge_between(graph: GraphIndex, src: int, dst: int) -> bool:
    return (src, dst) in graph.handle.pairs


def has_edges_between(graph: GraphIndex, src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    return graph.handle.index.has_edges_between(0, src, dst)


def predecessors(graph: GraphIndex, node: int, radius: int) -> torch.Tensor:
    """Nodes with an edge to one; of a radius of 1 alone."""
    _check_radius(radius)
    return graph.handle.index.predecessors(0, node).unique()


def successors(graph: GraphIndex, node: int, radius: int) -> torch.Tensor:
    """Nodes with an edge from one; of a radius of 1 alone."""
    _check_radius(radius)
    return graph.handle.index.successors(0, node).unique()


def _check_radius(radius: int) -> None:
    if radius != 1:
        raise InvalidCallError(
            "find neighbors of a node",
            f"the radius is {radius}",
            "pass a radius of 1, or use dgl.khop_in_subgraph",
        )


def edge_ids_between(graph: GraphIndex, src: int, dst: int) -> torch.Tensor:
    return graph.handle.index.edge_ids_all(0, _ids(src), _ids(dst))[2]


def _by_number(*arrays: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """Several results, as C functions give them."""
    return arrays.__getitem__


def edge_ids_all(graph: GraphIndex, src: torch.Tensor, dst: torch.Tensor) -> Any:
    return _by_number(*graph.handle.index.edge_ids_all(0, src, dst))


def find_edges(graph: GraphIndex, eid: Any) -> Any:
    """Ends and ids of edges; of one edge its ends as numbers."""
    if isinstance(eid, int):
        return graph.handle.pairs[eid].__getitem__
    return _by_number(*graph.handle.index.find_edges(0, _ids(eid)))


def edges(graph: GraphIndex, order: str) -> Any:
    return _by_number(*graph.handle.index.edges(0, order or None))


def in_edges(graph: GraphIndex, nodes: Any) -> Any:
    return _by_number(*graph.handle.index.in_edges(0, _ids(nodes)))


def out_edges(graph: GraphIndex, nodes: Any) -> Any:
    return _by_number(*graph.handle.index.out_edges(0, _ids(nodes)))


def in_degree(graph: GraphIndex, node: int) -> int:
    return sum(dst == node for _, dst in graph.handle.pairs)


def in_degrees(graph: GraphIndex, nodes: torch.Tensor) -> torch.Tensor:
    return graph.handle.index.in_degrees(0, nodes)


def out_degree(graph: GraphIndex, node: int) -> int:
    return sum(src == node for src, _ in graph.handle.pairs)


def out_degrees(graph: GraphIndex, nodes: torch.Tensor) -> torch.Tensor:
    return graph.handle.index.out_degrees(0, nodes)


def adjacency(graph: GraphIndex, transpose: bool, fmt: str) -> Any:
    """The arrays of the matrix whose rows are destinations, or with ``transpose`` sources."""
    # An index of relations has it the other way about.
    arrays = graph.handle.index.adjacency_matrix_tensors(0, not transpose, fmt)[2:]
    return _by_number(*((torch.cat(arrays),) if fmt == "coo" else arrays))


def to_immutable(graph: GraphIndex) -> GraphIndex:
    held = graph.handle
    return _made(_Edges(held.num_nodes, held.row, held.col, True))


def context(graph: GraphIndex) -> DGLContext:
    return _CPU


def num_bits(graph: GraphIndex) -> int:
    return 64

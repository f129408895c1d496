"""A graph index whose nodes lie on several ranks: message passing on it is its own affair."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from dgl import DGLGraph
from dgl.base import EID, is_all
from dgl.frame import Frame
from dgl.udf import EdgeBatch, NodeBatch
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from dgl_mgpu.errors import UnsupportedByPartitionError
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.relation import TypedSources
from dgl_mgpu.ops.attention import NO_TERMS, AttentionScore, EdgeTerms

Features = torch.Tensor | None


class DistributedGraphIndex(TensorIndex):
    """What DGL's message passing calls for a graph of which this process has a part.

    Operands have a row for each of this process's nodes or edges, as results do.  All methods are
    collective and differentiable.
    """

    @abstractmethod
    def refuse_to_copy(self) -> NoReturn:
        """Raise for whoever copies it, or writes it to a file."""

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
    def edge_softmax_over_relations(
        self, scores: Sequence[torch.Tensor], norm_by: str
    ) -> tuple[torch.Tensor, ...]:
        """As ``dgl.ops.edge_softmax`` over all edges of all relations."""

    @abstractmethod
    def attention_ends(self) -> tuple[int, int] | None:
        """How many sources and destinations this process has of the only relation.

        None where :meth:`attend` cannot go along it.
        """

    @abstractmethod
    def attend(
        self,
        values: torch.Tensor,
        left: Features,
        right: Features,
        vector: Features,
        bias: Features,
        score: AttentionScore,
        terms: EdgeTerms = NO_TERMS,
    ) -> torch.Tensor:
        """As :func:`dgl_mgpu.distributed.attention.attend`."""

    @abstractmethod
    def edge_sums(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As :func:`dgl_mgpu.graph.message_passing.edge_sums.edge_sums`, where attention goes along
        the only relation."""

    @abstractmethod
    def typed_sources(self, etype: torch.Tensor) -> TypedSources | None:
        """As :meth:`dgl_mgpu.graph.relation.Relation.typed_sources`, for this process's edges.

        None where rows of sources are not had for each type.
        """

    @abstractmethod
    def edge_ids(self, etype: int) -> torch.Tensor:
        """Of a relation's edges, in the whole graph."""

    @abstractmethod
    def remove_self_loops(self, etype: int) -> tuple[DistributedGraphIndex, torch.Tensor]:
        """The graph without a relation's loops, and what each of its edges was."""

    @abstractmethod
    def add_self_loops(self, etype: int) -> tuple[DistributedGraphIndex, torch.Tensor]:
        """The graph with a loop more at each node, and what each of a relation's edges was.

        Loops are numbered behind all others of this process's edges.
        """

    @abstractmethod
    def drop_edges(
        self, etype: int, probability: float, seed: int
    ) -> tuple[DistributedGraphIndex, torch.Tensor]:
        """The graph without some of a relation's edges, and what each of those left was.

        Whether one is dropped depends on the seed and on its id in the whole graph; those that are
        left keep theirs.
        """

    @abstractmethod
    def gather_src(self, rows: torch.Tensor) -> torch.Tensor:
        """From a row for each node of the only relation's source type, one for each edge."""

    @abstractmethod
    def gather_dst(self, rows: torch.Tensor) -> torch.Tensor:
        """From a row for each node of the only relation's destination type, one for each edge."""

    @abstractmethod
    def mailbox(self, messages: torch.Tensor, nodes: torch.Tensor, degree: int) -> torch.Tensor:
        """Messages of the only relation's edges to nodes of in-degree ``degree``.

        Shape (len(nodes), degree, \\*shape).
        """

    def fill(self, frame: Frame, nodes: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> None:
        """Write rows of some of the only relation's destinations to a frame of all of them."""
        frame.update_row(nodes, rows)

    @abstractmethod
    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """What every process passed, of one shape, stacked: shape (processes, \\*shape).

        The gradient is the sum of all processes' gradients.
        """

    @abstractmethod
    def rows_of_all(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that all processes have of the only node type, process after process.

        The gradient is the sum of all processes' gradients.
        """

    @abstractmethod
    def node_ids(self, ntype: int) -> torch.Tensor:
        """Of a type's nodes, in the whole graph."""

    def readout(self, rows: torch.Tensor, op: str) -> torch.Tensor:
        """The sum, mean, max or min of all processes' rows; shape (1, \\*shape), 0 of no rows."""
        if op not in ("sum", "mean", "max", "min"):
            raise UnsupportedByPartitionError(
                f"read out rows of a partitioned graph by {op!r}",
                "ranks read out rows by 'sum', 'mean', 'max' or 'min'",
                "gather the rows on every rank",
            )
        _check_floating(rows)
        if op in ("max", "min"):
            # Of no rows, too, it is made of them, that gradients go the same way everywhere.
            if not len(rows):
                mine = rows.sum(0) + (-torch.inf if op == "max" else torch.inf)
            else:
                mine = getattr(rows, op)(0).values
            extreme = getattr(self.all_gather(mine), op)(0, keepdim=True).values
            return extreme.masked_fill(extreme.isinf(), 0)
        total = self.all_gather(rows.sum(0)).sum(0, keepdim=True)
        if op == "sum":
            return total
        count = torch.full((), len(rows), dtype=torch.float64, device=rows.device)
        return (total / self.all_gather(count).sum().clamp(min=1)).to(total.dtype)

    def softmax(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows' softmax over all processes' rows."""
        raised = torch.exp(rows - self.readout(rows.detach(), "max"))
        return raised / self.readout(raised, "sum")

    def topk(
        self, rows: torch.Tensor, ids: torch.Tensor, k: int, descending: bool, sortby: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``k`` of all processes' rows by one column, or by each column for itself.

        Their ``ids`` come with them.  The shapes are (1, k, width), and (1, k) or (1, k, width).
        Where there are fewer rows, zeros follow.
        """
        _check_floating(rows)
        missing = max(k - len(rows), 0)
        rows = pad(rows, (0, 0, 0, missing), value=-torch.inf if descending else torch.inf)
        ids = pad(ids, (0, missing))
        if sortby is None:
            ids = ids.unsqueeze(1).expand(-1, rows.shape[1])
        # The first of all are among the first of each process.
        for step in (lambda own: own, lambda own: self.all_gather(own).flatten(0, 1)):
            rows, ids = step(rows), step(ids)
            keys = rows if sortby is None else rows[:, sortby]
            places = keys.topk(k, 0, largest=descending).indices
            if sortby is None:
                rows, ids = rows.gather(0, places), ids.gather(0, places)
            else:
                rows, ids = rows[places], ids[places]
        return rows.masked_fill(rows.isinf(), 0).unsqueeze(0), ids.unsqueeze(0)


def _check_floating(rows: torch.Tensor) -> None:
    if not rows.is_floating_point():
        raise UnsupportedByPartitionError(
            f"read out rows of {rows.dtype} of a partitioned graph",
            "ranks read out floating-point rows only",
            "convert the rows, or gather them on every rank",
        )


class _EmptyViews(TorchFunctionMode):
    """Views of no rows, of which one size is left to be found (-1), have rows of the same width.

    Of no elements torch finds no size, and refuses on one rank what it does on the others.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.view, torch.Tensor.reshape, torch.reshape) and not kwargs:
            rows, *sizes = args
            sizes = sizes[0] if isinstance(sizes[0], Sequence) else sizes
            if -1 in sizes[1:] and sizes[0] == 0 and rows.dim() and not len(rows):
                known = math.prod(size for size in sizes[1:] if size != -1)
                inferred = math.prod(rows.shape[1:]) // max(known, 1)
                args = rows, [inferred if size == -1 else size for size in sizes]
        return func(*args, **(kwargs or {}))


def allow_empty_views(counts: Iterable[int]) -> contextlib.AbstractContextManager:
    """A context in which, where there are no rows of some kind, views of them are as elsewhere."""
    return contextlib.nullcontext() if all(counts) else _EmptyViews()


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


class _PartitionedEdges(EdgeBatch):
    """Edges whose sources may be other processes' nodes."""

    def edges(self) -> NoReturn:
        raise UnsupportedByPartitionError(
            "name the ends of a partitioned graph's edges",
            "sources on other ranks have no number here",
            "read edges.src[dgl.NID] and edges.dst[dgl.NID], their ids in the whole graph",
        )


def apply_edge_udf(
    graph: DGLGraph, function: Callable[[EdgeBatch], Any], eid: Any, etype: Any, orig_eid: Any
) -> Any:
    """What a user's function makes of edges, those of ``eid`` or all."""
    batch = _edge_batch(graph, eid, etype, orig_eid)
    with allow_empty_views([len(batch)]):
        return function(batch)


def _edge_batch(graph: DGLGraph, eid: Any, etype: Any, orig_eid: Any) -> EdgeBatch:
    """What a user's function gets of edges; see ``dgl.udf``."""
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

    return _PartitionedEdges(
        graph,
        ids if orig_eid is None else orig_eid,
        etype,
        _Columns(graph._node_frames[src], of(index.gather_src)),
        edges,
        _Columns(graph._node_frames[dst], of(index.gather_dst)),
    )


def remove_self_loops(graph: DGLGraph, etype: Any) -> DGLGraph:
    """``dgl.remove_self_loop``."""
    number = graph.get_etype_id(etype)
    index, remaining = graph._graph.remove_self_loops(number)
    return _with_edges(graph, index, number, graph._edge_frames[number].subframe(remaining))


def add_self_loops(graph: DGLGraph, data: Mapping[str, torch.Tensor], etype: Any) -> DGLGraph:
    """The graph with a loop more at each node, and features of these."""
    number = graph.get_etype_id(etype)
    index, order = graph._graph.add_self_loops(number)
    frame = graph._edge_frames[number].clone()
    if data:
        frame.append(data)
    else:
        frame.add_rows(len(order) - frame.num_rows)
    return _with_edges(graph, index, number, frame.subframe(order))


def drop_edges(graph: DGLGraph, probability: float) -> DGLGraph:
    """The graph without edges of each relation that were chosen with a probability."""
    graph = graph.local_var()
    for number in range(len(graph.canonical_etypes)) if probability else ():
        # Torch's seed, as in DGL; ranks need not draw the same, each edge is on one.
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        index, remaining = graph._graph.drop_edges(number, probability, seed)
        edges = graph._edge_frames[number].subframe(remaining)
        graph = _with_edges(graph, index, number, edges)
    return graph


def _with_edges(
    graph: DGLGraph, index: DistributedGraphIndex, number: int, edges: Frame
) -> DGLGraph:
    """A graph of which one relation has other edges."""
    changed = graph.local_var()
    edges.update_column(EID, index.edge_ids(number))
    changed._graph = index
    changed._edge_frames[number] = edges
    return changed


def apply_reduce_udf(
    graph: DGLGraph,
    function: Callable[[NodeBatch], Mapping[str, torch.Tensor]],
    messages: Mapping[str, torch.Tensor],
    node_ids: torch.Tensor | None,
) -> Frame:
    """The result of a user's function for nodes' messages, nodes of one degree at a time.

    Where no node has any, the function gets no nodes with one message each: so its results have
    their columns, and come from its messages, on every process.
    """
    index = graph._graph
    ntype = graph.dsttypes[0]
    of_nodes = graph._node_frames[graph.get_ntype_id_from_dst(ntype)]
    degrees = index.in_degrees(0, None)
    if node_ids is None:
        node_ids = torch.arange(len(degrees), dtype=index.idtype, device=index.device)
    groups, results = [], []
    for degree in [degree for degree in degrees.unique().tolist() if degree] or [1]:
        nodes = (degrees == degree).nonzero().squeeze(1)
        mailbox = {key: index.mailbox(rows, nodes, degree) for key, rows in messages.items()}
        batch = NodeBatch(graph, node_ids[nodes], ntype, of_nodes.subframe(nodes), msgs=mailbox)
        groups.append(nodes)
        with allow_empty_views([len(nodes)]):
            results.append(function(batch))
    results_frame = Frame(num_rows=len(degrees))
    results_frame._initializers = of_nodes._initializers
    results_frame._default_initializer = of_nodes._default_initializer
    rows = {key: torch.cat([result[key] for result in results]) for key in results[0]}
    index.fill(results_frame, torch.cat(groups), rows)
    return results_frame

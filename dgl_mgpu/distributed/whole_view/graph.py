"""A graph's parts behind the face of the whole graph: what ``--partition`` makes of a DGLGraph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
from dgl import DGLGraph
from dgl.base import EID, NID, DGLError
from dgl.frame import Column, Frame
from dgl.heterograph_index import HeteroGraphIndex
from dgl.ops import gather_mm

from dgl_mgpu.distributed.graph import By, partition_graph
from dgl_mgpu.distributed.index import PartitionedIndex
from dgl_mgpu.distributed.whole_view import reductions, rows  # noqa: F401  of torch's functions
from dgl_mgpu.distributed.whole_view.layout import RowLayout
from dgl_mgpu.distributed.whole_view.tensor import (
    PartitionedTensor,
    align,
    select,
    spread,
    whole,
)
from dgl_mgpu.errors import UnsupportedByPartitionError
from dgl_mgpu.graph.distributed import DistributedGraphIndex, Features
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.relation import Relation
from dgl_mgpu.ops.attention import NO_TERMS, AttentionScore, EdgeTerms


class WholeViewIndex(DistributedGraphIndex):
    """The index of a graph that is partitioned and looks whole.

    Counts and ids are the whole graph's, features are partitioned tensors, and so is what message
    passing makes.  Queries of the structure are answered by the whole graph's, which is copied to
    the device when the first one asks.

    Parameters
    ----------
    source : HeteroGraphIndex
        The whole graph's.
    part : PartitionedIndex
        This rank's.
    nodes, edges : list of RowLayout
        Of features, by node type and by edge type.
    by : str or Tensor
        How it was partitioned.
    """

    def __init__(
        self,
        source: HeteroGraphIndex,
        part: PartitionedIndex,
        nodes: Sequence[RowLayout],
        edges: Sequence[RowLayout],
        by: By,
    ) -> None:
        self.source, self.part, self.by = source, part, by
        self.nodes, self.edge_rows = list(nodes), list(edges)
        self.schema = part.schema
        self._num_nodes = [layout.length for layout in self.nodes]

    @cached_property
    def relations(self) -> list[Relation]:  # type: ignore[override]
        source = self.source
        if not isinstance(source, TensorIndex):
            source = TensorIndex.from_dgl(source, self.device)
        return [relation.to(self.device) for relation in source.relations]

    def number_of_etypes(self) -> int:
        return len(self.edge_rows)

    @property
    def idtype(self) -> torch.dtype:
        return self.part.idtype

    @property
    def device(self) -> torch.device:
        return self.part.device

    def num_edges(self, etype: int) -> int:
        return self.edge_rows[etype].length

    number_of_edges = num_edges

    def __copy__(self) -> WholeViewIndex:
        return WholeViewIndex(self.source, self.part, self.nodes, self.edge_rows, self.by)

    def get_relation_graph(self, etype: int) -> WholeViewIndex:
        src, dst = self.schema.ends[int(etype)]
        return WholeViewIndex(
            self.source.get_relation_graph(int(etype)),
            self.part.get_relation_graph(etype),
            [self.nodes[end] for end in ([src] if src == dst else [src, dst])],
            [self.edge_rows[int(etype)]],
            self.by,
        )

    def reverse(self) -> WholeViewIndex:
        return WholeViewIndex(
            self.source.reverse(), self.part.reverse(), self.nodes, self.edge_rows, self.by
        )

    def formats(self, formats: str | Sequence[str] | None = None) -> Any:
        return self.part.formats() if formats is None else self

    def create_formats_(self) -> None:
        self.part.create_formats_()

    def record_stream(self, stream: torch.cuda.Stream) -> WholeViewIndex:
        self.part.record_stream(stream)
        return self

    def pin_memory_(self) -> NoReturn:
        self.part.refuse_to_move()

    def __reduce__(self) -> NoReturn:
        self.refuse_to_copy()

    def refuse_to_copy(self) -> NoReturn:
        raise UnsupportedByPartitionError(
            "copy, pickle or save a graph under --partition",
            "each rank has a part of its features",
            "save it before it is moved to its device",
        )

    # -- queries ------------------------------------------------------------------------------

    def in_degrees(self, etype: int, v: torch.Tensor | None) -> torch.Tensor:
        rows = self.nodes[self.schema.ends[etype][1]]
        return self._degrees(self.part.in_degrees(etype, None), rows, v)

    def out_degrees(self, etype: int, v: torch.Tensor | None) -> torch.Tensor:
        rows = self.nodes[self.schema.ends[etype][0]]
        return self._degrees(self.part.out_degrees(etype, None), rows, v)

    def _degrees(
        self, mine: torch.Tensor, rows: RowLayout, nodes: torch.Tensor | None
    ) -> torch.Tensor:
        degrees = PartitionedTensor(mine, rows)
        return degrees if nodes is None else degrees.full_tensor()[whole(nodes).long()]

    # -- message passing --------------------------------------------------------------------------

    def _rows(self, rows: Any, layouts: RowLayout | Sequence[RowLayout]) -> Any:
        """Operands as the part has them."""
        if rows is None:
            return None
        if not isinstance(layouts, RowLayout):
            return [self._rows(of, layout) for of, layout in zip(rows, layouts, strict=True)]
        if rows.dim() == 0 or len(rows) != layouts.length:
            found = len(rows) if rows.dim() else "a number"
            raise DGLError(f"Expect a row of features for each of {layouts.length}, got {found}")
        return align(rows, layouts)

    def _layouts(self, target: str) -> Any:
        """Of operands by source, edge or destination: one, or a list by type."""
        is_one = len(self.edge_rows) == 1
        if target == "e":
            return self.edge_rows[0] if is_one else self.edge_rows
        if not is_one:
            return self.nodes
        return self.nodes[self.schema.ends[0]["uv".index(target)]]

    def gspmm(self, op: str, reduce: str, lhs: Any, rhs: Any) -> Any:
        lhs = None if op == "copy_rhs" else self._rows(lhs, self._layouts("u"))
        rhs = None if op == "copy_lhs" else self._rows(rhs, self._layouts("e"))
        return self._wrapped(self.part.gspmm(op, reduce, lhs, rhs), self._layouts("v"))

    def gsddmm(self, op: str, lhs: Any, rhs: Any, lhs_target: str, rhs_target: str) -> Any:
        lhs = None if op == "copy_rhs" else self._rows(lhs, self._layouts(lhs_target))
        rhs = None if op == "copy_lhs" else self._rows(rhs, self._layouts(rhs_target))
        out = self.part.gsddmm(op, lhs, rhs, lhs_target, rhs_target)
        return self._wrapped(out, self._layouts("e"))

    def _wrapped(self, rows: Any, layouts: Any) -> Any:
        if isinstance(layouts, RowLayout):
            return None if rows is None else PartitionedTensor(rows, layouts)
        return tuple(map(self._wrapped, rows, layouts))

    def edge_softmax(self, scores: torch.Tensor, norm_by: str) -> torch.Tensor:
        rows = self.edge_rows[0]
        return PartitionedTensor(self.part.edge_softmax(self._rows(scores, rows), norm_by), rows)

    def edge_softmax_over_relations(
        self, scores: Sequence[torch.Tensor], norm_by: str
    ) -> tuple[torch.Tensor, ...]:
        mine = self._rows(scores, self.edge_rows)
        out = self.part.edge_softmax_over_relations(mine, norm_by)
        return self._wrapped(out, self.edge_rows)

    def attention_ends(self) -> tuple[int, int] | None:
        if self.part.attention_ends() is None:
            return None
        return self._layouts("u").length, self._layouts("v").length

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
        sources, destinations = self._layouts("u"), self._layouts("v")
        out = self.part.attend(
            self._rows(values, sources),
            self._rows(left, sources),
            self._rows(right, destinations),
            None if vector is None else spread(vector),
            None if bias is None else spread(bias),
            score,
            EdgeTerms(*(self._rows(it, self._layouts("e")) for it in terms)),
        )
        return self._wrapped(out, destinations)

    def typed_sources(self, etype: torch.Tensor) -> None:
        return None  # their rows would be in no layout: layers are composed

    def edge_sums(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        edges = self._layouts("e")
        out = self.part.edge_sums(self._rows(rows, edges), self._rows(weights, edges))
        return self._wrapped(out, self._layouts("v"))

    def gather_src(self, rows: torch.Tensor) -> torch.Tensor:
        mine = self.part.gather_src(self._rows(rows, self._layouts("u")))
        return PartitionedTensor(mine, self.edge_rows[0])

    def gather_dst(self, rows: torch.Tensor) -> torch.Tensor:
        mine = self.part.gather_dst(self._rows(rows, self._layouts("v")))
        return PartitionedTensor(mine, self.edge_rows[0])

    # -- as one process ---------------------------------------------------------------------------

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unsqueeze(0)  # the same on every rank, as of one

    def edge_ids(self, etype: int) -> torch.Tensor:
        return torch.arange(self.num_edges(etype), dtype=self.idtype, device=self.device)

    def node_ids(self, ntype: int) -> torch.Tensor:
        length = self.nodes[ntype].length
        return torch.arange(length, dtype=self.idtype, device=self.device)

    def rows_of_all(self, rows: torch.Tensor) -> torch.Tensor:
        return whole(rows)

    def mailbox(self, messages: torch.Tensor, nodes: torch.Tensor, degree: int) -> torch.Tensor:
        chosen, layout = select(self._layouts("v"), nodes)
        edges = self.part.edges_to(chosen, degree)
        return PartitionedTensor(self._rows(messages, self.edge_rows[0])[edges], layout)

    def fill(self, frame: Frame, nodes: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> None:
        chosen, layout = select(self._layouts("v"), nodes)
        for name, some in rows.items():
            mine = align(some, layout)
            blank = mine.new_zeros(self._layouts("v").count, *mine.shape[1:])
            filled = blank.index_copy(0, chosen, mine)
            frame.update_column(name, PartitionedTensor(filled, self._layouts("v")))

    # These change the whole graph, which is partitioned again (`partition_anew`).
    def remove_self_loops(self, etype: int) -> NoReturn:
        self.refuse_to_copy()

    add_self_loops = remove_self_loops

    def drop_edges(self, etype: int, probability: float, seed: int) -> NoReturn:
        self.refuse_to_copy()


# Rows of which each has a matrix of its type.
rows.handles([gather_mm])(rows.rows_first(1, "idx_b"))


def is_whole_view(graph: Any) -> bool:
    """Whether a graph is partitioned and looks whole."""
    return isinstance(getattr(graph, "_graph", None), WholeViewIndex)


def partition(graph: DGLGraph, device: torch.device, by: By) -> DGLGraph:
    """The same graph on a device, of which this rank has its part; collective.

    Raises
    ------
    UnsupportedByPartitionError
        If it is a batch of several graphs.
    InvalidInputError
        If ranks have different graphs.
    """
    # To ask for the size would write the graph's own number of nodes to it.
    if graph._batch_num_nodes is not None and graph.batch_size > 1:
        raise UnsupportedByPartitionError(
            f"partition a batch of {graph.batch_size} graphs",
            "ranks share one graph, and results of each graph of a batch would be on several ranks",
            "run the script without --partition, with DistributedDataParallel if it can",
        )
    part = partition_graph(graph, by=by, device=device)
    index = part._graph
    ranks = index.parts[0].part.rank
    nodes = [RowLayout(owned.num_nodes, owned.nodes(ranks, index.device)) for owned in index.owned]
    edges = [
        RowLayout(relation.part.num_whole_edges, relation.part.edges) for relation in index.parts
    ]
    view = copy.copy(graph)
    view._graph = WholeViewIndex(graph._graph, index, nodes, edges, by)
    view._node_frames = list(map(_view, graph._node_frames, part._node_frames, nodes))
    view._edge_frames = list(map(_view, graph._edge_frames, part._edge_frames, edges))
    return view


def _view(frame: Frame, mine: Frame, layout: RowLayout) -> Frame:
    """A frame's columns, of which this rank has its rows."""
    view = frame.clone()
    view._columns = {}
    for name in frame:
        rows = mine[name]
        # Of these ids the part has its own; and of others' gradients none.
        if name in (NID, EID) or frame[name].requires_grad:
            rows = align(frame[name], layout).to(layout.device)
        view._columns[name] = Column(PartitionedTensor(rows, layout))
    return view


def unpartitioned(graph: DGLGraph) -> DGLGraph:
    """The whole graph, with all of its features, in the host's memory; collective."""
    index = graph._graph
    plain = copy.copy(graph)
    plain._graph = index.source
    plain._node_frames = list(map(_gathered, graph._node_frames))
    plain._edge_frames = list(map(_gathered, graph._edge_frames))
    plain._batch_num_nodes = plain._batch_num_edges = None  # it is no batch
    return plain.to("cpu")


def _gathered(frame: Frame) -> Frame:
    plain = frame.clone()
    plain._columns = {name: Column(whole(frame[name]).cpu()) for name in frame}
    return plain


def partition_anew(function: Callable[..., Any], graph: DGLGraph, *args: Any, **kwargs: Any) -> Any:
    """What a function makes of the whole graph, partitioned again; collective."""

    def on_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return whole(value).cpu()
        if isinstance(value, Mapping):
            return {key: on_host(item) for key, item in value.items()}
        return type(value)(map(on_host, value)) if isinstance(value, list | tuple) else value

    result = function(unpartitioned(graph), *on_host(args), **on_host(kwargs))
    device = graph.device

    def on_device(value: Any) -> Any:
        if isinstance(value, DGLGraph):
            return partition(value, device, graph._graph.by)
        if isinstance(value, Mapping):
            return {key: on_device(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(on_device, value))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return on_device(result)

"""A part of a graph as DGL's graph index: message passing on it fetches what other ranks have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from dgl import DGLGraph
from dgl import backend as F
from dgl.base import DGLError
from dgl.heterograph_index import HeteroGraphIndex
from dgl.ops import edge_softmax, gsddmm, gspmm

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.attention import attend
from dgl_mgpu.distributed.edge_operations import edge_operation
from dgl_mgpu.distributed.exchange.halo import Halo
from dgl_mgpu.distributed.exchange.schedule import (
    CommSchedule,
    Gather,
    Message,
    Scatter,
    Sum,
)
from dgl_mgpu.distributed.extremes import extreme
from dgl_mgpu.distributed.local_part import (
    Part,
    add_self_loops,
    loops,
    remove_edges,
    remove_self_loops,
)
from dgl_mgpu.distributed.partition import Ownership, are_chosen
from dgl_mgpu.distributed.typed_sources import typed_part
from dgl_mgpu.errors import UnsupportedByPartitionError
from dgl_mgpu.graph.distributed import DistributedGraphIndex, Features
from dgl_mgpu.graph.index import GraphSchema, TensorIndex, single_schema
from dgl_mgpu.graph.message_passing.edge_sums import edge_sums
from dgl_mgpu.graph.relation import Relation, TypedSources
from dgl_mgpu.ops.attention import NO_TERMS, AttentionScore, EdgeTerms
from dgl_mgpu.ops.spmm import message_shape, row_type


class PartitionedRelation:
    """A rank's part of one relation, and how its rows meet those of other ranks."""

    def __init__(
        self, halo: Halo, rounds: CommSchedule, of: Callable[[Part], PartitionedRelation]
    ) -> None:
        self.part = halo.part
        self.halo = halo
        self.rounds = rounds
        self.of = of  # makes the same of another part; collective
        #: From the part's own and halo rows to its own: a graph like any other.
        self.graph = _graph_of(self.part.relation)
        self.reversed_graph = _graph_of(self.part.relation.reverse())
        #: `PartitionedIndex.typed_sources` of the last types, with these and what they were.
        self.typed: tuple[torch.Tensor, Any, TypedSources | None] | None = None

    def gather_src(self, rows: torch.Tensor) -> torch.Tensor:
        """From a row for each own source, one for each edge."""
        _check_rows(rows, self.part.num_own_src, "source node")
        return Gather.apply(self.rounds, rows)

    def highest(self, scores: torch.Tensor) -> torch.Tensor:
        """For each own source, the highest of its edges' scores, on all ranks; no gradients."""
        highest = gspmm(self.reversed_graph, "copy_rhs", "max", None, scores)
        if not self.part.relation.num_edges:  # of no edges at all DGL's highest is 0
            highest = highest - torch.inf
        own = self.part.num_own_src
        return torch.maximum(highest[:own], self.halo.give_back(highest[own:], "max"))


def _graph_of(relation: Relation) -> DGLGraph:
    index = TensorIndex.single(relation, 2)
    return DGLGraph(index, (["_SRC"], ["_DST"]), ["_E"])


def _check_rows(rows: torch.Tensor, count: int, owner: str) -> None:
    if len(rows) != count:
        raise DGLError(f"Expect a row of features for each of {count} {owner}s, got {len(rows)}")


class PartitionedIndex(DistributedGraphIndex):
    """A rank's part of a graph: its own nodes, and the in-edges of these.

    Both ends of edges cannot be asked for: what DGL makes of them would be a graph in which other
    ranks' nodes are not nodes.  Reversed, edges are out-edges of the rank's own nodes, in a graph
    whose edges are not grouped by them.
    """

    def __init__(
        self,
        schema: GraphSchema,
        owned: Sequence[Ownership],
        parts: Sequence[PartitionedRelation],
        is_reversed: bool = False,
    ) -> None:
        self.schema = schema
        self.owned = list(owned)
        self.parts = list(parts)
        self.is_reversed = is_reversed
        #: The results of changes, and its reverse: models may ask for them in every pass.
        self._changed: dict[tuple[str, int], tuple[PartitionedIndex, torch.Tensor]] = {}
        self._reversed: PartitionedIndex | None = None
        rank = self.parts[0].part.rank
        self._num_nodes = [ownership.count(rank) for ownership in self.owned]

    @property
    def relations(self) -> NoReturn:  # type: ignore[override]
        raise UnsupportedByPartitionError(
            "change or sample a partitioned graph, or look up its structure",
            "each rank has only the in-edges of its own nodes",
            "do it with the whole graph, before dgl_mgpu.partition_graph",
        )

    # -- what it is ---------------------------------------------------------------------------

    def number_of_etypes(self) -> int:
        return len(self.parts)

    @property
    def idtype(self) -> torch.dtype:
        return self.parts[0].part.relation.idtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].part.relation.device

    def num_edges(self, etype: int) -> int:
        return self.parts[etype].part.relation.num_edges

    number_of_edges = num_edges

    def __copy__(self) -> PartitionedIndex:
        return PartitionedIndex(self.schema, self.owned, self.parts, self.is_reversed)

    def get_relation_graph(self, etype: int) -> PartitionedIndex:
        src, dst = self.schema.ends[int(etype)]
        ends = [src] if src == dst else [src, dst]
        return PartitionedIndex(
            single_schema(len(ends)),
            [self.owned[end] for end in ends],
            [self.parts[int(etype)]],
            self.is_reversed,
        )

    def reverse(self) -> PartitionedIndex:
        if self._reversed is None:
            reverse = self.schema.reverse
            self._reversed = PartitionedIndex(reverse, self.owned, self.parts, not self.is_reversed)
        return self._reversed

    def copy_to(self, ctx: Any) -> HeteroGraphIndex:
        if F.to_backend_ctx(ctx) == self.device:
            return self
        return self.refuse_to_move()

    def refuse_to_move(self) -> NoReturn:
        raise UnsupportedByPartitionError(
            "move a partitioned graph",
            f"it is on '{self.device}', where it exchanges rows with other ranks",
            "pass device= to dgl_mgpu.partition_graph",
        )

    def pin_memory_(self) -> NoReturn:
        self.refuse_to_move()

    def __reduce__(self) -> NoReturn:
        self.refuse_to_copy()

    def refuse_to_copy(self) -> NoReturn:
        raise UnsupportedByPartitionError(
            "copy, pickle or save a partitioned graph",
            "it is one rank's part, and works only together with the other ranks' parts",
            "keep the whole graph, and partition it again",
        )

    def record_stream(self, stream: torch.cuda.Stream) -> PartitionedIndex:
        for relation in self.parts:
            for tensor in relation.part.relation.tensors():
                tensor.record_stream(stream)
        return self

    def formats(self, formats: str | Sequence[str] | None = None) -> Any:
        if formats is None:
            return self.parts[0].graph._graph.formats()
        return self.relations

    def create_formats_(self) -> None:
        for relation in self.parts:
            relation.part.relation.create_formats()

    def adjacency_matrix_scipy(self, *args: Any, **kwargs: Any) -> Any:
        return self.relations  # DGL would refuse the format first

    # -- queries ------------------------------------------------------------------------------

    def in_degrees(self, etype: int, v: torch.Tensor | None) -> torch.Tensor:
        return self._degrees(etype, v, self.is_reversed)

    def out_degrees(self, etype: int, v: torch.Tensor | None) -> torch.Tensor:
        return self._degrees(etype, v, not self.is_reversed)

    def _degrees(self, etype: int, nodes: torch.Tensor | None, outgoing: bool) -> torch.Tensor:
        part = self.parts[etype].part
        if not outgoing:
            return part.relation.in_degrees(nodes)
        return part.out_degrees if nodes is None else part.out_degrees[nodes.long()]

    # -- loops ------------------------------------------------------------------------------------

    def node_ids(self, ntype: int) -> torch.Tensor:
        return self.owned[ntype].nodes(self.parts[0].part.rank, self.device).to(self.idtype)

    def edge_ids(self, etype: int) -> torch.Tensor:
        return self.parts[etype].part.edges.to(self.idtype)

    def remove_self_loops(self, etype: int) -> tuple[PartitionedIndex, torch.Tensor]:
        def change(part: Part) -> tuple[Part, torch.Tensor]:
            own = part.edges[loops(part)]
            everyones = Communicator.of_all_machines().all_gather(own.cpu())
            return remove_self_loops(part, torch.cat(everyones).sort().values.to(own.device))

        return self._change_relation("remove_self_loops", etype, change)

    def add_self_loops(self, etype: int) -> tuple[PartitionedIndex, torch.Tensor]:
        return self._change_relation("add_self_loops", etype, add_self_loops)

    def drop_edges(
        self, etype: int, probability: float, seed: int
    ) -> tuple[PartitionedIndex, torch.Tensor]:
        relation = self.parts[etype]

        def count(numbers: torch.Tensor) -> torch.Tensor:
            own, others = numbers.double().tensor_split([relation.part.num_own_src])
            return own + relation.halo.give_back(others)

        gone = are_chosen(relation.part.edges, probability, seed)
        return self._with_part(etype, *remove_edges(relation.part, gone, count))

    def _change_relation(
        self, name: str, etype: int, change: Callable[[Part], tuple[Part, torch.Tensor]]
    ) -> tuple[PartitionedIndex, torch.Tensor]:
        if (name, etype) not in self._changed:
            self._changed[name, etype] = self._with_part(etype, *change(self.parts[etype].part))
        return self._changed[name, etype]

    def _with_part(
        self, etype: int, part: Part, edges: torch.Tensor
    ) -> tuple[PartitionedIndex, torch.Tensor]:
        parts = list(self.parts)
        parts[etype] = parts[etype].of(part)
        return PartitionedIndex(self.schema, self.owned, parts, self.is_reversed), edges

    # -- message passing --------------------------------------------------------------------------

    def gspmm(self, op: str, reduce: str, lhs: Any, rhs: Any) -> Any:
        if len(self.parts) > 1:
            return self._gspmm_over_relations(op, reduce, lhs, rhs)
        part = self.parts[0].part
        if op == "div":  # as DGL divides
            op, rhs = "mul", 1.0 / rhs
        if reduce in ("sum", "mean"):
            total = self._sum(op, lhs, rhs)
            return total if reduce == "sum" else self._shares(total)
        if self.is_reversed:
            raise UnsupportedByPartitionError(
                f"reduce messages by {reduce!r} on a reversed partitioned graph",
                "messages to one node are on several ranks, and only sums can be combined across "
                "ranks",
                "partition the reversed graph: dgl_mgpu.partition_graph(dgl.reverse(g))",
            )
        if not part.num_whole_edges:  # of no edges at all DGL's highest is 0
            return self._sum(op, lhs, rhs)
        if op != "copy_rhs":
            _check_rows(lhs, part.num_own_src, "source node")
        if op != "copy_lhs":
            _check_rows(rhs, part.relation.num_edges, "edge")
        if op != "copy_rhs" and part.num_ranks > 1:
            return extreme(self.parts[0].rounds, op, reduce, lhs, None if op == "copy_lhs" else rhs)
        if not part.relation.num_edges:  # DGL's of this part's edges would be 0
            return self._sum(op, lhs, rhs) + (-torch.inf if reduce == "max" else torch.inf)
        return gspmm(self.parts[0].graph, op, reduce, lhs, rhs)

    def _sum(self, op: str, lhs: Features, rhs: Features) -> torch.Tensor:
        """Messages added up at their destinations."""
        relation = self.parts[0]
        part = relation.part
        if op != "copy_rhs":
            assert lhs is not None
            sources = part.num_own_dst if self.is_reversed else part.num_own_src
            _check_rows(lhs, sources, "source node")
        if op != "copy_lhs":
            assert rhs is not None
            _check_rows(rhs, part.relation.num_edges, "edge")
        if op == "copy_lhs":
            return Sum.apply(relation.rounds, self.is_reversed, None, lhs)
        if op == "copy_rhs":
            if self.is_reversed:
                return Scatter.apply(relation.rounds, rhs)
            return gspmm(relation.graph, op, "sum", None, rhs)
        assert lhs is not None and rhs is not None
        shape = message_shape(op, "sum", row_type(lhs), row_type(rhs))
        lhs, rhs = (
            x.reshape(len(x), *[1] * (len(shape) + 1 - x.dim()), *x.shape[1:]) for x in (lhs, rhs)
        )
        if op == "mul":
            rows = lhs.expand(-1, *shape).contiguous()
            return Sum.apply(relation.rounds, self.is_reversed, rhs, rows)
        of_edges = self._sum("copy_rhs", None, rhs)
        return self._sum("copy_lhs", lhs, None) + (of_edges if op == "add" else -of_edges)

    def _shares(self, total: torch.Tensor) -> torch.Tensor:
        """Sums divided by the numbers of messages."""
        counts = self.in_degrees(0, None).clamp(min=1).view(-1, *[1] * (total.dim() - 1))
        # A half type could not hold the counts.
        wide = total.float() if total.dtype.itemsize < 4 else total
        return (wide / counts).to(total.dtype)

    def _gspmm_over_relations(
        self, op: str, reduce: str, lhs: Sequence[Features] | None, rhs: Sequence[Features] | None
    ) -> tuple[Features, ...]:
        joins: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
        joins = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
        if reduce not in joins:
            raise UnsupportedByPartitionError(
                f"reduce messages of several relations at once by {reduce!r}",
                f"there are {', '.join(joins)}",
                "reduce each relation's: multi_update_all",
            )
        reduced = []
        for etype, (src, _) in enumerate(self.schema.ends):
            operands = None if lhs is None else lhs[src], None if rhs is None else rhs[etype]
            reduced.append(self.get_relation_graph(etype).gspmm(op, reduce, *operands))
        out = self._join(reduced, joins[reduce])
        return tuple(out.get(ntype) for ntype in range(self.schema.num_ntypes))

    def _join(
        self,
        reduced: Sequence[torch.Tensor],
        join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """By node type, the results of all relations at their destinations."""
        out: dict[int, torch.Tensor] = {}
        for rows, (_, dst) in zip(reduced, self.schema.ends, strict=True):
            out[dst] = join(out[dst], rows) if dst in out else rows
        return out

    def gsddmm(self, op: str, lhs: Any, rhs: Any, lhs_target: str, rhs_target: str) -> Any:
        if len(self.parts) > 1:
            return self._gsddmm_over_relations(op, lhs, rhs, lhs_target, rhs_target)
        relation = self.parts[0]
        far = "v" if self.is_reversed else "u"
        of_sources = lhs_target == far and op != "copy_rhs", rhs_target == far and op != "copy_lhs"
        if relation.part.num_ranks == 1 or not any(of_sources):
            graph = relation.reversed_graph if self.is_reversed else relation.graph
            return gsddmm(graph, op, lhs, rhs, lhs_target, rhs_target)
        if op in ("copy_lhs", "copy_rhs"):
            return relation.gather_src(lhs if op == "copy_lhs" else rhs)
        part = relation.part
        for rows, target in ((lhs, lhs_target), (rhs, rhs_target)):
            if target == "e":
                _check_rows(rows, part.relation.num_edges, "edge")
            elif target == far:
                _check_rows(rows, part.num_own_src, "source node")
            else:
                _check_rows(rows, part.num_own_dst, "destination node")
        target = "e" if "e" in (lhs_target, rhs_target) else "v"
        return edge_operation(relation.rounds, relation.graph, op, lhs, rhs, of_sources, target)

    def _gsddmm_over_relations(
        self, op: str, lhs: Any, rhs: Any, lhs_target: str, rhs_target: str
    ) -> tuple[torch.Tensor, ...]:
        out = []
        for etype, (src, dst) in enumerate(self.schema.ends):
            place = {"u": src, "e": etype, "v": dst}
            out.append(
                self.get_relation_graph(etype).gsddmm(
                    op,
                    None if op == "copy_rhs" else lhs[place[lhs_target]],
                    None if op == "copy_lhs" else rhs[place[rhs_target]],
                    lhs_target,
                    rhs_target,
                )
            )
        return tuple(out)

    def edge_softmax(self, scores: torch.Tensor, norm_by: str) -> torch.Tensor:
        relation = self.parts[0]
        # By the part's own rows, which have all of theirs.
        if (norm_by == "src") == self.is_reversed:
            return edge_softmax(relation.graph, scores)
        outgoing = self if self.is_reversed else self.reverse()
        highest = relation.highest(scores.detach())
        raised = torch.exp(scores - relation.gather_src(highest))
        total = outgoing.gspmm("copy_rhs", "sum", None, raised)
        return raised / relation.gather_src(total)

    def edge_softmax_over_relations(
        self, scores: Sequence[torch.Tensor], norm_by: str
    ) -> tuple[torch.Tensor, ...]:
        index = self.reverse() if norm_by == "src" else self
        relations = [index.get_relation_graph(etype) for etype in range(len(self.parts))]
        maxima = [
            relation._highest(edge_scores.detach())
            for relation, edge_scores in zip(relations, scores, strict=True)
        ]
        highest = index._join(maxima, torch.maximum)
        ends = index.schema.ends
        raised = [
            torch.exp(edge_scores - relation.gather_dst(highest[dst]))
            for relation, edge_scores, (_, dst) in zip(relations, scores, ends, strict=True)
        ]
        totals = index.gspmm("copy_rhs", "sum", None, raised)
        return tuple(
            exponentials / relation.gather_dst(totals[dst])
            for relation, exponentials, (_, dst) in zip(relations, raised, ends, strict=True)
        )

    def attention_ends(self) -> tuple[int, int] | None:
        # Edges of a reversed part are not grouped by their destinations.
        if len(self.parts) != 1 or self.is_reversed:
            return None
        part = self.parts[0].part
        return part.num_own_src, part.num_own_dst

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
        return attend(self.parts[0].rounds, values, left, right, vector, bias, score, terms)

    def typed_sources(self, etype: torch.Tensor) -> TypedSources | None:
        relation = self.parts[0]
        if etype.is_inference():  # which do not say when they are written to
            return self._typed_sources(etype)
        # Not the address, which all tensors without elements have: ranks look together.
        storage, place = etype.untyped_storage()._cdata, (etype.storage_offset(), etype.stride())
        state = storage, place, etype.dtype, etype._version
        if relation.typed is None or relation.typed[1] != state:
            with torch.inference_mode(False):
                # With the types: no other tensor comes to be where they are.
                relation.typed = etype, state, self._typed_sources(etype)
        return relation.typed[2]

    def _typed_sources(self, etype: torch.Tensor) -> TypedSources | None:
        relation = self.parts[0]
        typed = typed_part(relation.part, etype)
        if typed is None:
            return None
        part, counts, pairs = typed
        ends = [part.src, part.dst]
        edges = PartitionedIndex(single_schema(2), ends, [relation.of(part)])
        return TypedSources(counts, pairs, edges, part.src.num_nodes < part.num_whole_edges)

    def edge_sums(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # A rank has all edges of its destinations.
        return edge_sums(self.parts[0].part.relation, rows, weights)

    def _highest(self, scores: torch.Tensor) -> torch.Tensor:
        """For each destination of the only relation, the highest of its edges' scores, or -inf."""
        if self.is_reversed:
            return self.parts[0].highest(scores)
        highest = self.gspmm("copy_rhs", "max", None, scores)
        return highest if self.parts[0].part.num_whole_edges else highest - torch.inf

    def gather_src(self, rows: torch.Tensor) -> torch.Tensor:
        relation = self.parts[0]
        if self.is_reversed:
            return rows[relation.part.relation.coo().col.long()]
        return relation.gather_src(rows)

    def gather_dst(self, rows: torch.Tensor) -> torch.Tensor:
        return self.reverse().gather_src(rows)

    def mailbox(self, messages: torch.Tensor, nodes: torch.Tensor, degree: int) -> torch.Tensor:
        return messages[self.edges_to(nodes, degree)]

    def edges_to(self, nodes: torch.Tensor, degree: int) -> torch.Tensor:
        """Edges to nodes of in-degree ``degree``, int64, shape (len(nodes), degree)."""
        if self.is_reversed:
            raise UnsupportedByPartitionError(
                "reduce messages by a function on a reversed partitioned graph",
                "messages to one node are on several ranks",
                "partition the reversed graph: dgl_mgpu.partition_graph(dgl.reverse(g))",
            )
        first = self.parts[0].part.relation.csc()[0][nodes].long()
        return first.unsqueeze(1) + torch.arange(degree, device=nodes.device)

    # -- what all ranks have -----------------------------------------------------------------------

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        part, group = self.parts[0].part, self.parts[0].rounds.group
        if group is None:
            return rows.unsqueeze(0)
        zeros = torch.zeros_like(rows)
        return Total.apply(
            group,
            torch.stack([rows if r == part.rank else zeros for r in range(part.num_ranks)]),
        )

    def rows_of_all(self, rows: torch.Tensor) -> torch.Tensor:
        owned = self.owned[0]
        _check_rows(rows, owned.count(self.parts[0].part.rank), "node")
        counts = [owned.count(rank) for rank in range(owned.num_ranks)]
        padding = rows.new_zeros(max(counts) - len(rows), *rows.shape[1:])
        by_rank = self.all_gather(torch.cat([rows, padding]))
        return torch.cat([own[:count] for own, count in zip(by_rank, counts, strict=True)])


class Total(torch.autograd.Function):
    """All ranks' sum, differentiable any number of times: gradients of all ranks add up."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, rows: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        # Not every backend can add up half types.
        total = rows.float() if rows.dtype.itemsize < 4 else rows.clone()
        Message(dist.all_reduce(total, group=group, async_op=True), total).wait()
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, Total.apply(ctx.group, gradient)

"""Sums over in-edges in rounds: while one round's rows are added up, the next one's arrive.

MG-GCN, section 4.3.  A round has some of the source rows, and a *tile* of the rank's part: the
edges that come from these.  Each strategy to exchange rows has rounds of its own.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.graph.relation import Compressed, Relation
from dgl_mgpu.ops import add_spmm, sddmm, spmm
from dgl_mgpu.ops.view import as_words
from dgl_mgpu.utils.stages import somebody_listens, stage


def sendable(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous rows as integers, which gloo and NCCL both send; without a copy."""
    if not math.prod(rows.shape[1:]):
        return rows.new_empty(len(rows), 0, dtype=torch.uint8)
    words = as_words(rows)
    return words.view(torch.uint8) if words.dtype == torch.int16 else words


class Message:
    """A collective call that is under way; ``work`` was started just now with ``async_op=True``.

    Waiting for it is the stage "waiting".  As long as it takes a GPU, that is the stage "exchange":
    a stream of its own waits for it as well, and does nothing else, where somebody listens.  When
    gloo is done is seen only by who waits.  The tensors that it sends and writes to are held until
    it is waited for.
    """

    def __init__(self, work: dist.Work, *used: torch.Tensor) -> None:
        self._work: dist.Work | None = work
        self._used = used
        device = used[0].device
        # Else it would only cost each message some calls, and fork the capture of a CUDA graph,
        # which nothing joins again.
        if device.type == "cuda" and somebody_listens():
            observer = _observer_stream(device)
            observer.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(observer), stage("exchange"):
                work.wait()

    def wait(self) -> None:
        """Wait until it has come: the host, or for a GPU torch's current stream."""
        if self._work is not None:
            with stage("waiting"):
                self._work.wait()
        # The work, too, holds its tensors.
        self._work, self._used = None, ()


@functools.cache
def _observer_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all messages, which take turns as those of a process group do."""
    return torch.cuda.Stream(device)


Arriving = Callable[[], torch.Tensor]


class Returning(NamedTuple):
    """Rows that go back to their owners.

    ``wait`` waits until they have come; what was sent may then be freed.  ``add`` adds them to this
    rank's own rows.
    """

    wait: Callable[[], object]
    add: Callable[[torch.Tensor], object]

    def finish(self, own: torch.Tensor) -> None:
        """Wait, and add."""
        self.wait()
        self.add(own)


def nothing(*_: torch.Tensor) -> None:
    """Neither waits nor adds."""


class Tile:
    """The edges from one round's rows to own rows.

    ``find_entries`` finds their numbers in the part, on first use; none where they are all of the
    part's edges, in order.
    """

    def __init__(
        self, relation: Relation, find_entries: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self.relation = relation
        self._find_entries = find_entries

    @cached_property
    def entries(self) -> torch.Tensor | None:
        """Their numbers in the part, for weights."""
        return None if self._find_entries is None else self._find_entries()

    def of(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        """The edges' weights, from those of all of the part's."""
        if weights is None or self.entries is None:
            return weights
        return weights.index_select(0, self.entries)

    def put(self, of_all: torch.Tensor, found: torch.Tensor) -> None:
        """Copy what was found for the edges to where it is among all of the part's."""
        if self.entries is None:
            of_all.copy_(found)
        else:
            of_all.index_copy_(0, self.entries.long(), found)


class CommSchedule(ABC):
    """One strategy to exchange rows for sums over in-edges.

    All methods are collective: every rank of ``group``, which is None for a single rank, calls them
    in the same order.
    """

    #: The round of the rank's own rows.
    own_round = 0

    def __init__(self, part: Part, group: dist.ProcessGroup | None) -> None:
        self.part = part
        self.group = group

    @abstractmethod
    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The round of each of the part's source rows, its place there, and the sizes of rounds."""

    @abstractmethod
    def start(self, number: int, rows: torch.Tensor) -> Arriving:
        """Begin to exchange a round's rows, given own ``rows``; the result waits for them."""

    @abstractmethod
    def start_return(
        self, number: int, rows: torch.Tensor, *, own: torch.Tensor | None = None
    ) -> Returning:
        """Begin to take a round's rows back; those of the own round stay where they are.

        What comes may be added to ``own`` rows meanwhile, which nobody else uses until it is waited
        for.
        """

    def sums(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """For each own destination, the sum of its in-edges' sources, multiplied with their
        weights.

        ``rows`` are those of own sources; weights have shape (num_edges, \\*weight_shape).
        """
        out: torch.Tensor | None = None

        def add(_: int, tile: Tile, arrived: torch.Tensor) -> None:
            nonlocal out
            out = _summed(tile.relation, arrived, tile.of(weights), out)

        self.visit(rows, add)
        assert out is not None  # there is a round
        return out

    def transposed_sums(
        self, rows: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The transpose of `sums`: from rows of own destinations to rows of own sources."""

        def of_round(number: int, tile: Tile, out: torch.Tensor | None) -> torch.Tensor:
            return _summed(tile.relation.reverse(), rows, tile.of(weights), out)

        return self.collect(of_round, rows)

    def products(
        self, rows: torch.Tensor, own_rows: torch.Tensor, weight_shape: torch.Size
    ) -> torch.Tensor:
        """For each edge the product of its ends' rows: the gradient of its weight in `sums`.

        ``rows`` are those of own sources, ``own_rows`` of own destinations, of one shape.  Each
        dimension of weights, of which there are as many, is that of the rows or 1: over the latter
        products are added up.
        """
        shape = rows.shape[1:]
        out = rows.new_empty(self.part.relation.num_edges, *weight_shape)
        kept = len(weight_shape)
        while kept and weight_shape[kept - 1] == 1:
            kept -= 1
        op = "mul" if kept == len(shape) else "dot"
        columns = (*shape[:kept], math.prod(shape[kept:]))

        def multiply(_: int, tile: Tile, arrived: torch.Tensor) -> None:
            far, near = (each.reshape(len(each), *columns) for each in (arrived, own_rows))
            found = sddmm(*tile.relation.coo(), far, near, op)
            shared = [dim for dim in range(1, 1 + kept) if weight_shape[dim - 1] == 1]
            if shared:
                found = found.sum(shared, keepdim=True)
            tile.put(out, found.view(len(found), *weight_shape))

        self.visit(rows, multiply)
        return out

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """For each edge its source's row, given those of own sources."""
        out = rows.new_empty(self.part.relation.num_edges, *rows.shape[1:])

        def pick(_: int, tile: Tile, arrived: torch.Tensor) -> None:
            tile.put(out, arrived.index_select(0, tile.relation.csc().indices))

        self.visit(rows, pick)
        return out

    def scatter(self, edge_rows: torch.Tensor) -> torch.Tensor:
        """The transpose of `gather`: for each own source, the sum of its edges' rows."""

        def of_round(_: int, tile: Tile, out: torch.Tensor | None) -> torch.Tensor:
            return _summed(tile.relation.reverse(), None, tile.of(edge_rows), out)

        return self.collect(of_round, edge_rows)

    def visit(
        self, rows: torch.Tensor, function: Callable[[int, Tile, torch.Tensor], object]
    ) -> None:
        """Call a function with each round, its tile and rows, while the next round's rows arrive.

        ``rows`` are those of own sources.  A round begins when the last one's rows are there: what
        is sent and what comes is one round's at a time.
        """
        tiles = self.tiles
        arriving = self.start(0, rows)
        for number, tile in enumerate(tiles):
            arrived = arriving()
            if number + 1 < len(tiles):
                arriving = self.start(number + 1, rows)
            function(number, tile, arrived)
            del arrived

    def collect(
        self,
        of_round: Callable[[int, Tile, torch.Tensor | None], torch.Tensor],
        like: torch.Tensor,
    ) -> torch.Tensor:
        """For each own source, the sum of what all ranks have for it in their rounds.

        ``of_round`` makes rows for a round's sources, added to the given ones if there are any;
        they have the type and shape of ``like``'s.  While one round's are made, the last one's
        travel, and are added before the next ones go: the order of additions is that of rounds.
        """
        own: torch.Tensor | None = None
        returning = Returning(nothing, nothing)

        def finish() -> None:
            nonlocal own, returning
            returning.wait()
            if returning.add is not nothing:
                if own is None:
                    own = like.new_zeros(self.part.num_own_src, *like.shape[1:])
                returning.add(own)
            returning = Returning(nothing, nothing)  # that the rows which came are free

        for number, tile in reversed(list(enumerate(self.tiles))):
            if number == self.own_round:
                back = own = of_round(number, tile, own)
            else:
                back = of_round(number, tile, None)
            finish()
            returning = self.start_return(number, back)
            del back
        finish()
        assert own is not None  # there is a round of own rows
        return own

    def round_trips(
        self, rows: torch.Tensor, of_round: Callable[[Tile, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`visit` and `collect` in the same rounds: each round's rows come, and others go back.

        ``of_round`` makes rows for a round's sources of those that came, of one shape.
        """
        own: torch.Tensor | None = None
        returning = Returning(nothing, nothing)

        def go_back(number: int, tile: Tile, arrived: torch.Tensor) -> None:
            nonlocal own, returning
            back = of_round(tile, arrived)
            if number == self.own_round:
                count = self.part.num_own_src
                own = back if len(back) == count else back[:count].clone()  # no view: it keeps all
            finish()
            returning = self.start_return(number, back, own=own)

        def finish() -> None:
            returning.wait()
            if own is not None:  # else nothing comes back to be added
                returning.add(own)

        self.visit(rows, go_back)
        finish()
        assert own is not None  # there is a round of own rows
        return own

    @cached_property
    def tiles(self) -> list[Tile]:
        """The edges of each round."""
        indices = self.part.relation.csc().indices
        rounds, places, sizes = self.columns()
        of_entries = rounds[indices.long()]
        tiles = []
        for number, size in enumerate(sizes):
            chosen = of_entries == number
            relation = edges_from(self.part, chosen, places[indices[chosen].long()], size)
            has_all = relation.num_edges == len(indices)
            find_entries = None if has_all else partial(_entries_of, self.part, rounds, number)
            tiles.append(Tile(relation, find_entries))
        return tiles


def edges_from(part: Part, chosen: torch.Tensor, sources: torch.Tensor, num_src: int) -> Relation:
    """Some edges of a part, for which ``chosen`` is true, from sources with other numbers."""
    indptr = part.relation.csc().indptr
    before = torch.cat([chosen.new_zeros(1, dtype=torch.int64), chosen.cumsum(0)])
    grouped = Compressed(before[indptr.long()].to(indptr.dtype), sources.to(indptr.dtype), None)
    return Relation(num_src, part.num_own_dst, csc=grouped, formats=("csr", "csc"))


def _entries_of(part: Part, rounds: torch.Tensor, number: int) -> torch.Tensor:
    """Edges whose source has its row in a round, given that of each source."""
    indices = part.relation.csc().indices
    chosen = rounds[indices.long()] == number
    return chosen.nonzero().squeeze(1).to(indices.dtype)


def _summed(
    tile: Relation,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """A tile's sums, added to ``out`` where there is one; without rows those of weights alone."""
    indptr, indices, eids = tile.csc()
    op = "copy_rhs" if rows is None else "copy_lhs" if weights is None else "mul"
    messages = weights if rows is None else rows
    assert messages is not None
    shape = messages.shape[1:]
    if not shape:
        rows, weights = (x if x is None else x.view(-1, 1) for x in (rows, weights))
    if out is None:
        total = spmm(indptr, indices, eids, rows, weights, op, "sum")[0]
        return total if shape else total.squeeze(1)
    add_spmm(out if shape else out.unsqueeze(1), indptr, indices, eids, rows, weights, op)
    return out


class Sum(torch.autograd.Function):
    """`CommSchedule.sums`, or its transpose, differentiable any number of times.

    Weights have as many dimensions as rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rounds: CommSchedule,
        transposed: bool,
        weights: torch.Tensor | None,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        ctx.rounds, ctx.transposed = rounds, transposed
        # Saved so that a change in place until then is noticed.
        ctx.save_for_backward(weights, rows if ctx.needs_input_grad[2] else None)
        total = (rounds.transposed_sums if transposed else rounds.sums)(rows, weights)
        # Of a view that is made here autograd allows no change in place.
        return total.detach()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[None, None, torch.Tensor | None, torch.Tensor | None]:
        weights, rows = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_weights = of_rows = None
        if ctx.needs_input_grad[2]:
            ends = (gradient, rows) if ctx.transposed else (rows, gradient)
            of_weights = EdgeProducts.apply(ctx.rounds, weights.shape[1:], *ends)
        if ctx.needs_input_grad[3]:
            of_rows = Sum.apply(ctx.rounds, not ctx.transposed, weights, gradient)
        return None, None, of_weights, of_rows


class EdgeProducts(torch.autograd.Function):
    """`CommSchedule.products`, differentiable any number of times."""

    @staticmethod
    def forward(
        ctx: Any,
        rounds: CommSchedule,
        weight_shape: torch.Size,
        rows: torch.Tensor,
        own_rows: torch.Tensor,
    ) -> torch.Tensor:
        ctx.rounds = rounds
        ctx.save_for_backward(rows, own_rows)
        return rounds.products(rows, own_rows, weight_shape)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[None, None, torch.Tensor | None, torch.Tensor | None]:
        rows, own_rows = ctx.saved_tensors
        of_rows = of_own_rows = None
        if ctx.needs_input_grad[2]:
            of_rows = Sum.apply(ctx.rounds, True, gradient, own_rows)
        if ctx.needs_input_grad[3]:
            of_own_rows = Sum.apply(ctx.rounds, False, gradient, rows)
        return None, None, of_rows, of_own_rows


class Gather(torch.autograd.Function):
    """`CommSchedule.gather`, differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, rounds: CommSchedule, rows: torch.Tensor) -> torch.Tensor:
        ctx.rounds = rounds
        return rounds.gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, Scatter.apply(ctx.rounds, gradient.contiguous())


class Scatter(torch.autograd.Function):
    """`CommSchedule.scatter`, differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, rounds: CommSchedule, edge_rows: torch.Tensor) -> torch.Tensor:
        ctx.rounds = rounds
        return rounds.scatter(edge_rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, Gather.apply(ctx.rounds, gradient.contiguous())

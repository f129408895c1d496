"""Maxima and minima over in-edges, in the rounds of an exchange.

Of each element the message that won is kept, as the round and the place of its source's row: so
gradients go back to the sources that won, and nothing is fetched for them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dgl_mgpu.distributed.exchange.schedule import CommSchedule, Tile
from dgl_mgpu.graph.distributed import Features
from dgl_mgpu.ops import spmm
from dgl_mgpu.ops.spmm import message_shape, row_type

_OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
}


class Winners(NamedTuple):
    """The messages that were chosen; all have shape (num_own_dst, \\*shape)."""

    values: torch.Tensor  # -inf or inf where there is none
    entries: torch.Tensor  # dtype of ids: their edges in the part, -1 for none
    rounds: torch.Tensor  # int16: the rounds of their sources, -1 for none
    places: torch.Tensor  # dtype of ids: the places of their sources there


def extreme(
    rounds: CommSchedule, op: str, reduce: str, rows: torch.Tensor, edge_rows: Features
) -> torch.Tensor:
    """The highest or lowest of what an operation makes of each own destination's in-edges.

    Of equal messages the one of the first edge wins, whatever round it comes in.  Collective.

    Parameters
    ----------
    rounds : CommSchedule
    op : {'copy_lhs', 'add', 'sub', 'mul'}
    reduce : {'max', 'min'}
    rows : Tensor, shape (num_own_src, \\*shape)
    edge_rows : Tensor, shape (num_edges, \\*edge_shape), or None
        None for 'copy_lhs'; their shapes broadcast.

    Returns
    -------
    Tensor, shape (num_own_dst, \\*shape)
        Differentiable any number of times; -inf or inf where there is no message.
    """
    edge_type = None if edge_rows is None else row_type(edge_rows)
    shape = message_shape(op, reduce, row_type(rows), edge_type)
    if edge_rows is not None:
        edge_rows = _with_dimensions(edge_rows, max(len(shape), 1))
    rows = _with_dimensions(rows, max(len(shape), 1))
    won = _winners(rounds, op, reduce, rows.detach(), edge_rows)
    if edge_rows is None:
        return Chosen.apply(rounds, won.rounds, won.places, won.values, rows).view(-1, *shape)
    is_none, entries = won.rounds < 0, won.entries
    of_sources = Chosen.apply(rounds, won.rounds, won.places, None, rows)
    if not len(edge_rows):  # that gradients go the same way everywhere
        return (of_sources + won.values + edge_rows.sum()).view(-1, *shape)
    of_edges = edge_rows.expand(-1, *entries.shape[1:]).gather(0, entries.clamp(min=0).long())
    messages = _OPERATIONS[op](of_sources, of_edges)
    return torch.where(is_none, won.values, messages).view(-1, *shape)


def _with_dimensions(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Rows with so many dimensions each; a row of none is a column."""
    return rows.reshape(len(rows), *[1] * (count + 1 - rows.dim()), *rows.shape[1:])


def _winners(
    rounds: CommSchedule, op: str, reduce: str, rows: torch.Tensor, edge_rows: Features
) -> Winners:
    part = rounds.part
    edge_shape = torch.Size() if edge_rows is None else edge_rows.shape[1:]
    size = part.num_own_dst, *torch.broadcast_shapes(rows.shape[1:], edge_shape)
    highest = reduce == "max"
    values = rows.new_full(size, -torch.inf if highest else torch.inf)
    entries = torch.full(size, -1, dtype=part.relation.idtype, device=rows.device)
    numbers = torch.full(size, -1, dtype=torch.int16, device=rows.device)
    places = torch.zeros_like(entries)

    def compare(number: int, tile: Tile, arrived: torch.Tensor) -> None:
        indptr, indices, _ = tile.relation.csc()
        if not len(indices):
            return
        if edge_rows is None:  # with an operand of edges, the operator says which edge won
            operation = "mul"
            operand: Features = arrived.new_ones(len(indices), *[1] * (len(size) - 1))
        else:
            operation, operand = op, tile.of(edge_rows.detach())
        found, chosen = spmm(indptr, indices, None, arrived, operand, operation, reduce)[::2]
        assert chosen is not None  # as there is an operand of edges
        edges = chosen if tile.entries is None else tile.entries[chosen]
        better = found > values if highest else found < values
        better |= (found == values) & (edges < entries)
        for of_all, of_round in (
            (values, found),
            (entries, edges),
            (places, indices[chosen]),
        ):
            torch.where(better, of_round, of_all, out=of_all)
        numbers.masked_fill_(better, number)

    rounds.visit(rows, compare)
    return Winners(values, entries, numbers, places)


class Chosen(torch.autograd.Function):
    """Of each element of own destinations, the element of the source that was chosen for it.

    ``numbers`` and ``places`` are as `Winners` has them; what is chosen may be ``known``.  It is 0
    where there is none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rounds: CommSchedule,
        numbers: torch.Tensor,
        places: torch.Tensor,
        known: torch.Tensor | None,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        ctx.rounds, ctx.row_shape = rounds, rows.shape[1:]
        ctx.save_for_backward(numbers, places)
        if known is not None:
            return known.detach()
        out = rows.new_zeros(places.shape)

        def choose(number: int, tile: Tile, arrived: torch.Tensor) -> None:
            if len(arrived):
                of_round = arrived.expand(-1, *places.shape[1:])
                found = of_round.gather(0, _within(places, len(arrived)))
                torch.where(numbers == number, found, out, out=out)

        rounds.visit(rows, choose)
        return out

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[None, None, None, None, torch.Tensor]:
        returned = Returned.apply(ctx.rounds, *ctx.saved_tensors, ctx.row_shape, gradient)
        return None, None, None, None, returned


class Returned(torch.autograd.Function):
    """The transpose of `Chosen`: elements added up at the sources that were chosen for them."""

    @staticmethod
    def forward(
        ctx: Any,
        rounds: CommSchedule,
        numbers: torch.Tensor,
        places: torch.Tensor,
        row_shape: torch.Size,
        elements: torch.Tensor,
    ) -> torch.Tensor:
        ctx.rounds = rounds
        ctx.save_for_backward(numbers, places)
        zero, shape = elements.new_zeros(()), elements.shape[1:]
        shared = [dim + 1 for dim, width in enumerate(row_shape) if width != shape[dim]]

        def of_round(number: int, tile: Tile, own: torch.Tensor | None) -> torch.Tensor:
            count = tile.relation.num_src
            is_sum = own is not None and not shared
            back = own if is_sum else elements.new_zeros(count, *shape)
            assert back is not None
            if count:
                given = torch.where(numbers == number, elements, zero)
                back.scatter_add_(0, _within(places, count), given)
            if shared:
                back = back.sum(shared, keepdim=True)
            return back if own is None or is_sum else own + back

        return rounds.collect(of_round, elements.new_empty(0, *row_shape))

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[None, None, None, None, torch.Tensor]:
        chosen = Chosen.apply(ctx.rounds, *ctx.saved_tensors, None, gradient.contiguous())
        return None, None, None, None, chosen


def _within(places: torch.Tensor, count: int) -> torch.Tensor:
    """Places as indices of a round's rows; those of other rounds are anywhere."""
    return places.clamp(max=count - 1).long()

"""Maxima and minima over in-edges, in the rounds of an exchange.

Of each element the message that won is kept, as the place of its source's row among those of all
rounds: so gradients go back to the sources that won, and nothing is fetched for them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dgl_mgpu.distributed.exchange.schedule import CommSchedule, Tile
from dgl_mgpu.graph.distributed import Features
from dgl_mgpu.ops import spmm
from dgl_mgpu.ops.extremes import keep_extremes, scatter_to_winners
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
    places: torch.Tensor  # dtype of ids: their sources' places in the rounds, -1 for none


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
        return Chosen.apply(rounds, won.places, won.values, rows).view(-1, *shape)
    is_none, entries = won.places < 0, won.entries
    of_sources = Chosen.apply(rounds, won.places, None, rows)
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
    places = torch.full_like(entries, -1)
    begins = _begins(rounds)

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
        keep_extremes(
            values, entries, places, found, chosen, tile.entries, indices, begins[number], highest
        )

    rounds.visit(rows, compare)
    return Winners(values, entries, places)


def _begins(rounds: CommSchedule) -> list[int]:
    """Where places of each round begin."""
    sizes = (tile.relation.num_src for tile in rounds.tiles)
    return list(itertools.accumulate(sizes, initial=0))


class Chosen(torch.autograd.Function):
    """Of each element of own destinations, the element of the source that was chosen for it.

    ``places`` are as `Winners` has them; what is chosen may be ``known``.  It is 0 where there is
    none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rounds: CommSchedule,
        places: torch.Tensor,
        known: torch.Tensor | None,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        ctx.rounds, ctx.row_shape = rounds, rows.shape[1:]
        ctx.save_for_backward(places)
        if known is not None:
            return known.detach()
        out = rows.new_zeros(places.shape)
        begins = _begins(rounds)

        def choose(number: int, tile: Tile, arrived: torch.Tensor) -> None:
            if not len(arrived):
                return
            there = places.long() - begins[number]
            is_there = (there >= 0) & (there < len(arrived))
            of_round = arrived.expand(-1, *places.shape[1:])
            found = of_round.gather(0, there.clamp_(0, len(arrived) - 1))
            torch.where(is_there, found, out, out=out)

        rounds.visit(rows, choose)
        return out

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[None, None, None, torch.Tensor]:
        (places,) = ctx.saved_tensors
        return None, None, None, Returned.apply(ctx.rounds, places, ctx.row_shape, gradient)


class Returned(torch.autograd.Function):
    """The transpose of `Chosen`: elements added up at the sources that were chosen for them."""

    @staticmethod
    def forward(
        ctx: Any,
        rounds: CommSchedule,
        places: torch.Tensor,
        row_shape: torch.Size,
        elements: torch.Tensor,
    ) -> torch.Tensor:
        ctx.rounds = rounds
        ctx.save_for_backward(places)
        shape, dtype = elements.shape[1:], elements.dtype
        shared = [dim + 1 for dim, width in enumerate(row_shape) if width != shape[dim]]
        begins, elements = _begins(rounds), elements.contiguous()
        # Half types are added up in float32.
        wide = dtype if dtype.itemsize >= 4 else torch.float32

        def of_round(number: int, tile: Tile, own: torch.Tensor | None) -> torch.Tensor:
            is_sum = own is not None and not shared and wide == dtype
            back = own if is_sum else elements.new_zeros(tile.relation.num_src, *shape, dtype=wide)
            assert back is not None
            scatter_to_winners(back, elements, places, begins[number])
            if shared:
                back = back.sum(shared, keepdim=True)
            return back.to(dtype) if own is None or is_sum else own + back.to(dtype)

        return rounds.collect(of_round, elements.new_empty(0, *row_shape))

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[None, None, None, torch.Tensor]:
        (places,) = ctx.saved_tensors
        return None, None, None, Chosen.apply(ctx.rounds, places, None, gradient.contiguous())

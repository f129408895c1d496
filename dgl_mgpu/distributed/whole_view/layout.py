"""Which rank has which rows of a tensor, and the collectives that move them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.exchange.schedule import Message, sendable
from dgl_mgpu.graph.relation import check_ids


class Selection(NamedTuple):
    """Some rows of a layout, which stay on the ranks that have them."""

    rows: torch.Tensor  # int64: this rank's, by their place among its own
    layout: RowLayout  # of the result


class RowLayout:
    """How the rows of tensors are dealt out over ranks; each row is on one rank.

    Parameters
    ----------
    length : int
        Rows of all ranks.
    positions : Tensor, int64, shape (rows of this rank,)
        Which of these this rank has, in the order of its own.
    """

    def __init__(self, length: int, positions: torch.Tensor) -> None:
        self.length = length
        self.positions = positions
        #: By the identity of a tensor of ids or of a mask: it, its version, and what it selects.
        self._selections: dict[int, tuple[Any, int, Selection]] = {}
        self._same: weakref.WeakKeyDictionary[RowLayout, bool] = weakref.WeakKeyDictionary()
        self._blocks: dict[int, RowLayout] = {}
        self._elsewhere: dict[torch.device, RowLayout] = {}
        #: Of a layout that `in_blocks` made: of what, and of how many rows each.
        self.made_of: tuple[RowLayout, int] | None = None

    @property
    def count(self) -> int:
        """Rows of this rank."""
        return len(self.positions)

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def on(self, device: torch.device) -> RowLayout:
        """The same of tensors on another device."""
        if device == self.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = RowLayout(self.length, self.positions.to(device))
        return self._elsewhere[device]

    def same_as(self, other: RowLayout) -> bool:
        """Whether every rank has the same rows in the same order; collective at first."""
        if other is self:
            return True
        if other not in self._same:
            same = self.length == other.length and torch.equal(self.positions, other.positions)
            self._same[other] = all(Communicator.of_all_machines().all_gather(same))
        return self._same[other]

    def in_blocks(self, size: int) -> RowLayout:
        """Of tensors with ``size`` rows for each of these, one after the other."""
        if size not in self._blocks:
            within = torch.arange(size, device=self.device)
            positions = (self.positions.unsqueeze(1) * size + within).flatten()
            blocks = RowLayout(self.length * size, positions)
            blocks.made_of = self, size
            self._blocks[size] = blocks
        return self._blocks[size]

    @cached_property
    def _places(self) -> torch.Tensor:
        """For each row, its place among this rank's, or -1."""
        places = torch.full((self.length,), -1, device=self.device)
        places[self.positions] = torch.arange(self.count, device=self.device)
        return places

    def select(self, index: torch.Tensor, ids: Callable[[], torch.Tensor]) -> Selection:
        """The rows that ``index`` selects: ``ids()``, their numbers on every rank.

        That is kept as long as the index is: masks of training nodes do not change.
        """
        known = self._selections.get(id(index))
        if known is not None and known[0]() is index and known[1] == index._version:
            return known[2]
        selection = self.select_ids(ids())
        key, selections = id(index), self._selections
        watch = weakref.ref(index, lambda _: selections.pop(key, None))
        selections[key] = watch, index._version, selection
        return selection

    def select_ids(self, ids: torch.Tensor) -> Selection:
        """The rows with some numbers, which count from the end where they are negative."""
        ids = ids.to(self.device, torch.int64)
        ids = torch.where(ids < 0, ids + self.length, ids)
        check_ids(ids, self.length, "rows")
        places = self._places[ids]
        here = places >= 0
        return Selection(places[here], RowLayout(len(ids), here.nonzero().squeeze(1)))

    # -- collectives --------------------------------------------------------------------------

    @cached_property
    def _everyones(self) -> tuple[list[int], torch.Tensor]:
        """How many rows each rank has, and which, rank after rank."""
        counts = Communicator.of_all_machines().all_gather(self.count)
        return counts, torch.cat(_all_gather(self.positions, counts))

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks' rows in their order, given this rank's."""
        counts, order = self._everyones
        everyone = torch.cat(_all_gather(rows, counts))
        return torch.empty_like(everyone).index_copy_(0, order, everyone)


def _all_gather(rows: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    longest = rows.new_zeros(max(counts), *rows.shape[1:])
    longest[: len(rows)] = rows.detach()
    by_rank = [torch.empty_like(longest) for _ in counts]
    dist.all_gather([sendable(padded) for padded in by_rank], sendable(longest))
    return [padded[:count] for padded, count in zip(by_rank, counts, strict=True)]


def all_reduce(numbers: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """All ranks' numbers in one; without gradients."""
    # Not every backend takes half types and bool.
    wide = numbers.detach()
    if wide.dtype == torch.bool:
        wide = wide.int()
    wide = wide.float() if wide.dtype.itemsize < 4 and wide.is_floating_point() else wide.clone()
    wide = wide.contiguous()
    Message(dist.all_reduce(wide, op, async_op=True), wide).wait()
    return wide.to(numbers.dtype)


class Sum(torch.autograd.Function):
    """All ranks' sum, of which every rank makes the same: each has all of its gradient."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor) -> torch.Tensor:
        return all_reduce(numbers)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Spread.apply(gradient)


class Spread(torch.autograd.Function):
    """What every rank has, for its own rows: the gradients of all ranks' rows add up."""

    @staticmethod
    def forward(ctx: Any, everywhere: torch.Tensor) -> torch.Tensor:
        return everywhere.view_as(everywhere)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Sum.apply(gradient)


class Gather(torch.autograd.Function):
    """All ranks' rows, of which every rank makes the same."""

    @staticmethod
    def forward(ctx: Any, layout: RowLayout, rows: torch.Tensor) -> torch.Tensor:
        ctx.layout = layout
        return layout.gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, Spread.apply(gradient)[ctx.layout.positions]

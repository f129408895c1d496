"""Rows of other ranks' nodes, each fetched once, however many edges come from it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dgl_mgpu.distributed.exchange.peer_memory import halo_in_chunks
from dgl_mgpu.distributed.exchange.window import Window
from dgl_mgpu.distributed.local_part import Part


class Halo:
    """Brings a rank the rows of its halo, and takes back what was added to them.

    Both are collective: every rank of ``group`` calls them, in the same order.
    """

    def __init__(
        self, part: Part, group: dist.ProcessGroup | None, window: Window | None = None
    ) -> None:
        self.part = part
        self._whole = halo_in_chunks(part, group, window, 1, read_all=False)

    def fetch(self, rows: torch.Tensor) -> torch.Tensor:
        """The halo's rows, shape (num_halo, \\*shape), given the rank's own."""
        if self.part.num_ranks == 1:
            return rows.new_empty(0, *rows.shape[1:])
        return self._whole.start(1, rows)()

    def give_back(self, rows: torch.Tensor, reduce: str = "sum") -> torch.Tensor:
        """For each own row, the sum of what other ranks have for it; the transpose of `fetch`.

        With 'max' the highest instead, -inf where no other rank has any.
        """
        highest = reduce == "max"
        start = -torch.inf if highest else 0
        own = rows.new_full((self.part.num_own_src, *rows.shape[1:]), start)
        if self.part.num_ranks > 1:
            returning = self._whole.start_return(1, rows.contiguous(), highest)
            returning.wait()
            returning.add(own)
        return own


class Fetch(torch.autograd.Function):
    """`Halo.fetch`, differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, halo: Halo, rows: torch.Tensor) -> torch.Tensor:
        ctx.halo = halo
        return halo.fetch(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, GiveBack.apply(ctx.halo, gradient)


class GiveBack(torch.autograd.Function):
    """`Halo.give_back`, differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, halo: Halo, rows: torch.Tensor) -> torch.Tensor:
        ctx.halo = halo
        return halo.give_back(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, Fetch.apply(ctx.halo, gradient)

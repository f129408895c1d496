"""Rows of other ranks' nodes: each fetched once, however many edges come from it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from dgl_mgpu.fullgraph.part import Part
from dgl_mgpu.ops import spmm
from dgl_mgpu.ops.view import as_words


class Halo:
    """Brings a rank the rows of its halo, and takes back what was added to them.

    Both are collective: every rank of ``group`` calls them, in the same order.

    Parameters
    ----------
    part : Part
    group : torch.distributed.ProcessGroup or None
        None for a single rank.
    """

    def __init__(self, part: Part, group: dist.ProcessGroup | None) -> None:
        self.part = part
        self._group = group
        # What comes back is added by row, in the order of ranks: the same bits on every run.
        rows, order = torch.sort(part.sent, stable=True)
        starts = torch.arange(part.num_own_src + 1, device=rows.device)
        self._returns = torch.searchsorted(rows, starts), order

    def fetch(self, rows: torch.Tensor) -> torch.Tensor:
        """The halo's rows.

        Parameters
        ----------
        rows : Tensor, shape (num_own_src, \\*shape)
            The rank's own.

        Returns
        -------
        Tensor, shape (num_halo, \\*shape)
        """
        part = self.part
        out = rows.new_empty(len(part.halo), *rows.shape[1:])
        self._exchange(out, rows.index_select(0, part.sent), part.wanted, part.sending)
        return out

    def give_back(self, rows: torch.Tensor, reduce: str = "sum") -> torch.Tensor:
        """The sum of what other ranks have for each of this rank's rows; the transpose of `fetch`.

        Parameters
        ----------
        rows : Tensor, shape (num_halo, \\*shape)
        reduce : {'sum', 'max'}
            The highest instead, -inf where no other rank has any.

        Returns
        -------
        Tensor, shape (num_own_src, \\*shape)
        """
        part = self.part
        come = rows.new_empty(len(part.sent), *rows.shape[1:])
        self._exchange(come, rows.contiguous(), part.sending, part.wanted)
        indptr, order = self._returns
        flat = come.view(len(come), math.prod(rows.shape[1:]))
        total = spmm(indptr, None, order, None, flat, "copy_rhs", reduce)[0]
        return total.view(part.num_own_src, *rows.shape[1:])

    def _exchange(
        self, out: torch.Tensor, rows: torch.Tensor, coming: list[int], going: list[int]
    ) -> None:
        if self._group is None or math.prod(rows.shape[1:]) == 0:
            return
        dist.all_to_all_single(sendable(out), sendable(rows), coming, going, group=self._group)


def sendable(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous rows as integers that gloo and NCCL both know, without a copy."""
    words = as_words(rows)
    return words.view(torch.uint8) if words.dtype == torch.int16 else words


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

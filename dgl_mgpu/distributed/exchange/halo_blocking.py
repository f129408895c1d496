"""The whole halo before the sums: one product over own and other rows, with nothing to overlap."""

from __future__ import annotations

import torch

from dgl_mgpu.distributed.exchange.chunks import Chunks
from dgl_mgpu.distributed.exchange.schedule import Arriving, CommSchedule, Returning, Tile


class WholeHalo(CommSchedule):
    """One round, with own rows and the halo's behind them.

    Its tile is the part itself.  Where rows are narrow their way is short, and a product over all
    edges takes less than one for each round: each destination is begun and ended once.

    Parameters
    ----------
    halo : Chunks
        In one chunk, without more rows than the halo has.
    """

    def __init__(self, halo: Chunks) -> None:
        super().__init__(halo.part, halo.group)
        self._halo = halo

    @property
    def tiles(self) -> list[Tile]:
        return [Tile(self.part.relation)]

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        count = self.part.relation.num_src
        places = torch.arange(count, device=self.part.halo.device)
        return torch.zeros_like(places), places, [count]

    def start(self, number: int, rows: torch.Tensor) -> Arriving:
        if self.part.num_ranks == 1:
            return self._halo.start(0, rows)
        own = self.part.num_own_src
        every = rows.new_empty(self.part.relation.num_src, *rows.shape[1:])
        arriving = self._halo.start(1, rows, every[own:])
        every[:own].copy_(rows)

        def arrived() -> torch.Tensor:
            arriving()
            return every

        return arrived

    def start_return(self, number: int, rows: torch.Tensor) -> Returning:
        if self.part.num_ranks == 1:
            return self._halo.start_return(0, rows)
        return self._halo.start_return(1, rows[self.part.num_own_src :])

"""Rows of other ranks' nodes, each fetched once, however many edges come from it."""

from __future__ import annotations

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
        # A round for each other rank: what is sent or lent at a time is one rank's.
        self._rounds = halo_in_chunks(part, group, window, part.num_ranks - 1, read_all=False)

    def _of_rounds(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Of the halo's rows those of each round; none in the first."""
        part = self.part
        owners = rows.split_with_sizes(part.wanted)
        rounds = range(1, part.num_ranks)
        return [rows[:0], *(owners[(part.rank + number) % part.num_ranks] for number in rounds)]

    def fetch(self, rows: torch.Tensor) -> torch.Tensor:
        """The halo's rows, shape (num_halo, \\*shape), given the rank's own."""
        halo = rows.new_empty(len(self.part.halo), *rows.shape[1:])
        for number, room in enumerate(self._of_rounds(halo)):
            self._rounds.start(number, rows, room)()
        return halo

    def give_back(self, rows: torch.Tensor, reduce: str = "sum") -> torch.Tensor:
        """For each own row, the sum of what other ranks have for it; the transpose of `fetch`.

        With 'max' the highest instead, -inf where no other rank has any.
        """
        highest = reduce == "max"
        start = -torch.inf if highest else 0
        own = rows.new_full((self.part.num_own_src, *rows.shape[1:]), start)
        for number, of_round in enumerate(self._of_rounds(rows.contiguous())):
            self._rounds.start_return(number, of_round, highest).finish(own)
        return own

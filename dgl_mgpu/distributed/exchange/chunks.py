"""The halo in chunks: each row that a rank needs comes once, some owners' rows a round."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist

from dgl_mgpu.distributed.exchange.messages import Message
from dgl_mgpu.distributed.exchange.schedule import Arriving, CommSchedule, Returning, nothing
from dgl_mgpu.distributed.exchange.wire_format import sendable
from dgl_mgpu.distributed.local_part import Part


class Chunks(CommSchedule):
    """First the rank's own rows, then those of the ranks behind it, some ranks a round.

    Parameters
    ----------
    part : Part
    group : torch.distributed.ProcessGroup or None
    num_chunks : int
        Rounds for the halo: more overlap better, fewer cost less.
    """

    def __init__(self, part: Part, group: dist.ProcessGroup | None, num_chunks: int = 2) -> None:
        super().__init__(part, group)
        steps = part.num_ranks - 1
        num_chunks = min(num_chunks, steps)
        wanted, sending = list(enumerate(part.wanted)), list(enumerate(part.sending))
        #: In which round rows come over which distance from one rank to the next ones.
        self._round_of_step = [0, *(1 + step * num_chunks // steps for step in range(steps))]
        self.num_chunks = num_chunks
        self._sent = part.sent.split_with_sizes(part.sending)
        #: By round, how many rows each rank sends this one.
        self._comes = [
            [count if self._round(part.rank, rank) == number else 0 for rank, count in wanted]
            for number in range(1 + num_chunks)
        ]
        #: By round, how many rows this rank sends each one.
        self._goes = [
            [count if self._round(rank, part.rank) == number else 0 for rank, count in sending]
            for number in range(1 + num_chunks)
        ]

    def _round(self, reader: int, owner: int) -> int:
        """When a rank gets the rows of another one."""
        return self._round_of_step[(owner - reader) % self.part.num_ranks]

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        part, device = self.part, self.part.halo.device
        of_owner = torch.tensor(
            [self._round(part.rank, owner) for owner in range(part.num_ranks)], device=device
        )
        of_halo = of_owner.repeat_interleave(torch.tensor(part.wanted, device=device))
        own = part.num_own_src
        rounds = torch.cat([of_halo.new_zeros(own), of_halo])
        places = torch.arange(len(rounds), device=device)
        sizes = [own]
        for number in range(1, 1 + self.num_chunks):
            chosen = of_halo == number
            places[own:] = torch.where(chosen, chosen.cumsum(0) - 1, places[own:])
            sizes.append(sum(self._comes[number]))
        return rounds, places, sizes

    def start(self, number: int, rows: torch.Tensor, room: torch.Tensor | None = None) -> Arriving:
        """As `CommSchedule.start`; a round's rows may be put into some ``room``."""
        if number == 0:
            own = rows.contiguous()
            return lambda: own
        comes, goes = self._comes[number], self._goes[number]
        if room is None:
            room = rows.new_empty(sum(comes), *rows.shape[1:])
        message = self._exchange(room, rows.index_select(0, self._going(goes)), comes, goes)
        return partial(_arrived, message, room)

    def start_return(self, number: int, rows: torch.Tensor, highest: bool = False) -> Returning:
        if number == 0:
            return Returning(nothing, nothing)
        comes, goes = self._comes[number], self._goes[number]
        room = rows.new_empty(sum(goes), *rows.shape[1:])
        message = self._exchange(room, rows, goes, comes)

        def add(own: torch.Tensor) -> None:
            for rank, found in enumerate(room.split_with_sizes(goes)):
                if len(found):
                    self._join(own, found, rank, highest)

        return Returning(nothing if message is None else message.wait, add)

    def _join(self, own: torch.Tensor, found: torch.Tensor, rank: int, highest: bool) -> None:
        # Of one rank no row comes twice: the order of additions is that of ranks.
        places = self._sent[rank]
        if highest:
            own[places] = torch.maximum(own[places], found)
        else:
            own.index_add_(0, places, found)

    def _going(self, goes: list[int]) -> torch.Tensor:
        return torch.cat([self._sent[rank][:count] for rank, count in enumerate(goes)])

    def _exchange(
        self, out: torch.Tensor, rows: torch.Tensor, coming: list[int], going: list[int]
    ) -> Message | None:
        if self.group is None or math.prod(rows.shape[1:]) == 0:
            return None
        work = dist.all_to_all_single(
            sendable(out), sendable(rows), coming, going, group=self.group, async_op=True
        )
        return Message(work, out, rows)


def _arrived(message: Message | None, room: torch.Tensor) -> torch.Tensor:
    if message is not None:
        message.wait()
    return room

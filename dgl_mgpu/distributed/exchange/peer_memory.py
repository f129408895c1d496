"""The halo in chunks, copied from the other GPUs' memory by copy engines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.exchange.collectives import Chunks
from dgl_mgpu.distributed.exchange.schedule import Arriving, Returning
from dgl_mgpu.distributed.exchange.window import Window
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.ops import pick_rows

#: Share of a rank's rows from which on all of them are read.
MOST_WANTED = 0.75


class PeerChunks(Chunks):
    """As `Chunks`, between GPUs that read each other's memory.

    Messages of NCCL take multiprocessors from the sums that they overlap with, and carry small
    chunks slowly; copy engines do neither.  A rank lends all of its rows, once for all others: each
    half of the window holds as many as it has.  Of a rank's rows of which a halo has most, all are
    copied, unless ``read_all`` is off: picking them out would take longer than copying a few more.
    """

    def __init__(
        self, part: Part, window: Window, num_chunks: int = 2, read_all: bool = True
    ) -> None:
        super().__init__(part, window.group, num_chunks)
        self._window = window
        self._counts = [part.src.count(rank) for rank in range(part.num_ranks)]
        # Of each rank, how many rows it reads of each one, and later gives back.
        most = MOST_WANTED if read_all else math.inf
        reads = [
            rows_read(wanted, self._counts, most)
            for wanted in Communicator.of_all_machines().all_gather(part.wanted)
        ]
        rounds = range(1 + self.num_chunks)
        by_round = [
            [
                [count * (self._round(reader, owner) == number) for owner, count in enumerate(read)]
                for reader, read in enumerate(reads)
            ]
            for number in rounds
        ]
        self._rooms = [of_round[part.rank] for of_round in by_round]
        #: By round, how many rows each rank gives back to this one, and where they begin.
        self._returned = [[of_rank[part.rank] for of_rank in of_round] for of_round in by_round]
        self._returned_at = [
            [sum(of_rank[: part.rank]) for of_rank in of_round] for of_round in by_round
        ]
        self._most_returned = max(sum(of_rank) for of_round in by_round for of_rank in of_round)
        #: Ranks all of whose rows are read, and that read all of this one's.
        own = part.num_own_src
        self._wholly_read = {
            rank for rank, count in enumerate(reads[part.rank]) if count == self._counts[rank] > 0
        }
        self._wholly_lent = {rank for rank, read in enumerate(reads) if read[part.rank] == own > 0}
        self._halo_bounds = list(itertools.accumulate(part.wanted, initial=0))
        self._memory: Sequence[torch.Tensor] = []
        #: Which exchange of the window these rows are.
        self._lent_at = 0

    def _wanted_rows(self, rank: int) -> torch.Tensor:
        """Which of another rank's rows are in the halo."""
        halo = self.part.halo[self._halo_bounds[rank] : self._halo_bounds[rank + 1]]
        return halo - self.part.src.bounds[rank]

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        rounds, places, sizes = super().columns()
        own = self.part.num_own_src
        for number in range(1, 1 + self.num_chunks):
            begin = 0
            for rank, count in enumerate(self._rooms[number]):
                if not count:
                    continue
                if rank in self._wholly_read:
                    at = self._wanted_rows(rank)
                else:
                    at = torch.arange(count, device=places.device)
                first, last = self._halo_bounds[rank], self._halo_bounds[rank + 1]
                places[own + first : own + last] = begin + at
                begin += count
            sizes[number] = begin
        return rounds, places, sizes

    def start(self, number: int, rows: torch.Tensor, room: torch.Tensor | None = None) -> Arriving:
        if number == 0:
            return super().start(0, rows)
        counts = self._rooms[number]
        if room is None:
            room = rows.new_empty(sum(counts), *rows.shape[1:])
        rows = rows.contiguous()
        with self._window.aside():
            # Once for all rounds, unless rows have gone back meanwhile.
            if number == 1 or self._window.turns > self._lent_at:
                self._memory = self._window.turn(max(self._counts) * _row_bytes(rows))
                self._lent_at = self._window.turns
                _rows_at(self._memory[self.part.rank], 0, len(rows), rows).copy_(rows)
                self._window.wait_for_all()
            for rank, place in enumerate(room.split_with_sizes(counts)):
                if not len(place):
                    continue
                lent = _rows_at(self._memory[rank], 0, self._counts[rank], room)
                if rank in self._wholly_read:
                    place.copy_(lent)
                else:
                    pick_rows(lent, self._wanted_rows(rank), place)
        wait = self._window.done(room, rows)

        def arrived() -> torch.Tensor:
            wait()
            return room

        return arrived

    def start_return(self, number: int, rows: torch.Tensor, highest: bool = False) -> Returning:
        if number == 0:
            return super().start_return(0, rows)
        counts = self._returned[number]
        room = rows.new_empty(sum(counts), *rows.shape[1:])
        with self._window.aside():
            memory = self._window.turn(self._most_returned * _row_bytes(rows))
            _rows_at(memory[self.part.rank], 0, len(rows), rows).copy_(rows)
        # The window has them now: their memory is for the next round's.
        self._window.done(rows)()
        with self._window.aside():
            self._window.wait_for_all()
            starts = self._returned_at[number]
            for rank, place in enumerate(room.split_with_sizes(counts)):
                if len(place):
                    place.copy_(_rows_at(memory[rank], starts[rank], len(place), room))
        wait = self._window.done(room)

        def add(own: torch.Tensor) -> None:
            for rank, found in enumerate(room.split_with_sizes(counts)):
                if not len(found):
                    continue
                if rank in self._wholly_lent and not highest:
                    own += found
                else:
                    self._add(own, found, rank, highest)

        return Returning(wait, add)


def rows_read(wanted: Sequence[int], counts: Sequence[int], most: float) -> list[int]:
    """How many rows are read of each rank: all, of which at least the share ``most`` is wanted."""
    return [
        count if wants and wants >= most * count else wants
        for wants, count in zip(wanted, counts, strict=True)
    ]


def halo_in_chunks(
    part: Part,
    group: dist.ProcessGroup | None,
    window: Window | None,
    num_chunks: int,
    read_all: bool = True,
) -> Chunks:
    """The halo in chunks, from GPU to GPU where there is a window; see `PeerChunks`."""
    if window is None or group is None:
        return Chunks(part, group, num_chunks)
    return PeerChunks(part, window, num_chunks, read_all)


def _row_bytes(rows: torch.Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()


def _rows_at(memory: torch.Tensor, start: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """Rows of ``like``'s type and shape in a rank's memory."""
    row_bytes = _row_bytes(like)
    raw = memory[start * row_bytes : (start + count) * row_bytes].view(like.dtype)
    return raw.view(count, *like.shape[1:])

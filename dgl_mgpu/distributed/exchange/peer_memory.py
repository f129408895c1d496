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

#: Share of a rank's rows from which on all of them are lent.
_MAX = 0.75


class PeerChunks(Chunks):
    """As `Chunks`, between GPUs that read each other's memory.

    Messages of NCCL take multiprocessors from the sums that they overlap with, and carry small
    chunks slowly; copy engines do neither.  A rank whose halo has most of another's rows is lent
    all of them, unless ``read_all`` is off: picking them out would take longer than copying a few
    more.
    """

    def __init__(
        self, part: Part, window: Window, num_chunks: int = 2, read_all: bool = True
    ) -> None:
        super().__init__(part, window.group, num_chunks)
        self._window = window
        everyone = Communicator.of_all_machines().all_gather(
            (part.sending, part.wanted, part.num_own_src)
        )
        most = _MAX if read_all else math.inf
        shared_rows = [_SharedRows(sending, own, most) for sending, _, own in everyone]
        self._shared_rows = shared_rows[part.rank]
        #: Of each other rank, where its rows for this one begin, and whether they are all it has.
        self._shared_with_me = [
            (lent.starts[part.rank], part.rank in lent.wholly) for lent in shared_rows
        ]
        # Of each rank, by round, how many rows it gets of each one, and later gives back.
        passed = [
            [
                [
                    (everyone[owner][2] if reader in shared_rows[owner].wholly else count)
                    if self._round(reader, owner) == number
                    else 0
                    for owner, count in enumerate(wanted)
                ]
                for number in range(1 + self.num_chunks)
            ]
            for reader, (_, wanted, _) in enumerate(everyone)
        ]
        self._rooms = passed[part.rank]
        #: By round, how many rows each rank gives back to this one, and where they begin.
        rounds = list(zip(*passed, strict=True))
        self._returned = [[of_rank[part.rank] for of_rank in of_round] for of_round in rounds]
        self._returned_at = [
            [sum(of_rank[: part.rank]) for of_rank in of_round] for of_round in rounds
        ]
        self._most_shared_rows = max(lent.num_rows for lent in shared_rows)
        self._most_returned = max(sum(of_rank) for of_round in rounds for of_rank in of_round)
        #: Own rows that are picked out for others.
        self._picked = part.sent
        if self._shared_rows.wholly:
            picked = [
                rows for rank, rows in enumerate(self._sent) if rank not in self._shared_rows.wholly
            ]
            self._picked = torch.cat(picked)
        self._memory: Sequence[torch.Tensor] = []

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        rounds, places, sizes = super().columns()
        starts = list(itertools.accumulate(self.part.wanted, initial=self.part.num_own_src))
        halo_bounds = list(itertools.accumulate(self.part.wanted, initial=0))
        for number in range(1, 1 + self.num_chunks):
            begin = 0
            for rank, count in enumerate(self._rooms[number]):
                if not count:
                    continue
                halo = self.part.halo[halo_bounds[rank] : halo_bounds[rank + 1]]
                if self._shared_with_me[rank][1]:
                    at = halo - self.part.src.bounds[rank]
                else:
                    at = torch.arange(count, device=halo.device)
                places[starts[rank] : starts[rank + 1]] = begin + at
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
            if number == 1:
                self._lend(rows)
                self._window.wait_for_all()
            for rank, place in enumerate(room.split_with_sizes(counts)):
                if len(place):
                    start, _ = self._shared_with_me[rank]
                    place.copy_(_rows_at(self._memory[rank], start, len(place), room))
        wait = self._window.done(room, rows)

        def arrived() -> torch.Tensor:
            wait()
            return room

        return arrived

    def _lend(self, rows: torch.Tensor) -> None:
        self._memory = self._window.turn(self._most_shared_rows * _row_bytes(rows))
        mine, picked = self._memory[self.part.rank], self._picked
        if self._shared_rows.wholly:
            _rows_at(mine, 0, len(rows), rows).copy_(rows)
        if len(picked):
            begin = self._shared_rows.num_rows - len(picked)
            pick_rows(rows, picked, _rows_at(mine, begin, len(picked), rows))

    def start_return(self, number: int, rows: torch.Tensor, highest: bool = False) -> Returning:
        if number == 0:
            return super().start_return(0, rows)
        counts = self._returned[number]
        room = rows.new_empty(sum(counts), *rows.shape[1:])
        with self._window.aside():
            memory = self._window.turn(self._most_returned * _row_bytes(rows))
            _rows_at(memory[self.part.rank], 0, len(rows), rows).copy_(rows)
            self._window.wait_for_all()
            starts = self._returned_at[number]
            for rank, place in enumerate(room.split_with_sizes(counts)):
                if len(place):
                    place.copy_(_rows_at(memory[rank], starts[rank], len(place), room))
        wait = self._window.done(room, rows)

        def add(own: torch.Tensor) -> None:
            for rank, found in enumerate(room.split_with_sizes(counts)):
                if not len(found):
                    continue
                if rank in self._shared_rows.wholly:
                    own += found
                else:
                    self._add(own, found, rank, highest)

        return Returning(wait, add)


class _SharedRows:
    """The rows that a rank lends, given how many each rank wants.

    From the share ``most`` of its rows on, a rank is lent all of them.
    """

    def __init__(self, sending: list[int], num_own: int, most: float) -> None:
        #: Ranks that are lent all of the rows.
        self.wholly = {
            rank for rank, count in enumerate(sending) if count and count >= most * num_own
        }
        self.starts = []  # where each rank's rows begin
        end = num_own if self.wholly else 0
        for rank, count in enumerate(sending):
            self.starts.append(0 if rank in self.wholly else end)
            end += 0 if rank in self.wholly else count
        self.num_rows = end


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

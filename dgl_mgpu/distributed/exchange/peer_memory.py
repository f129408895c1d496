"""The halo in chunks, copied from the other GPUs' memory by copy engines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.exchange.collectives import Chunks, Portion, size_of
from dgl_mgpu.distributed.exchange.schedule import Arriving, Returning
from dgl_mgpu.distributed.exchange.window import Window
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.ops import pick_rows

#: Share of a rank's rows from which on all of them are read.
MOST_WANTED = 0.75


class PeerChunks(Chunks):
    """As `Chunks`, between GPUs that read each other's memory.

    Messages of NCCL take multiprocessors from the sums that they overlap with, and carry small
    chunks slowly; copy engines do neither.  A rank puts what others read in a round into its half
    of the window.  Of a rank's rows of which a halo has most, all come, unless ``read_all`` is off:
    picking them out would take longer than copying a few more.
    """

    def __init__(
        self, part: Part, window: Window, num_chunks: int = 2, read_all: bool = True
    ) -> None:
        super().__init__(part, window.group, num_chunks)
        self._window = window
        counts = [part.src.count(rank) for rank in range(part.num_ranks)]
        most = MOST_WANTED if read_all else math.inf
        # Of each rank, how many rows it reads of each one.
        reads = [
            rows_read(wanted, counts, most)
            for wanted in Communicator.of_all_machines().all_gather(part.wanted)
        ]
        lends = [read[part.rank] for read in reads]
        self._set_rows(reads[part.rank], lends)
        self._set_places(reads)
        #: Ranks all of whose rows are read, and that read all of this one's.
        self._wholly_read = {
            rank for rank, count in enumerate(reads[part.rank]) if count == counts[rank] > 0
        }
        self._wholly_lent = {
            rank for rank, count in enumerate(lends) if count == counts[part.rank] > 0
        }
        self._starts = list(itertools.accumulate(part.wanted, initial=0))

    def _set_places(self, reads: Sequence[Sequence[int]]) -> None:
        """Where this rank's rows begin in others' memory, given what each rank reads of each one.

        By round, `_lent_at` is of the rows that each rank lends it, `_returned_at` of those that
        each rank gives back to it; `_most_rows` is of any rank's memory.
        """
        me, size = self.part.rank, self.part.num_ranks
        rounds = range(1 + self.num_chunks)
        lent, returned = ([[0] * size for _ in rounds] for _ in range(2))
        self._lent_at, self._returned_at = ([[0] * size for _ in rounds] for _ in range(2))
        for reader in range(size):
            for owner in range(size):
                if reader == owner:
                    continue
                distance = (owner - reader) % size
                for number, begin, end in self._portions(distance, reads[reader][owner]):
                    if reader == me:
                        self._lent_at[number][owner] = lent[number][owner]
                    if owner == me:
                        self._returned_at[number][reader] = returned[number][reader]
                    lent[number][owner] += end - begin
                    returned[number][reader] += end - begin
        self._most_rows = max(map(max, (*lent, *returned)))

    def _places_of(self, rank: int) -> torch.Tensor:
        if rank not in self._wholly_read:
            return super()._places_of(rank)
        halo = self.part.halo[self._starts[rank] : self._starts[rank + 1]]
        return halo - self.part.src.bounds[rank]

    def start(self, number: int, rows: torch.Tensor, room: torch.Tensor | None = None) -> Arriving:
        if number == 0:
            return super().start(0, rows)
        receive = self._receive[number]
        if room is None:
            room = rows.new_empty(size_of(receive), *rows.shape[1:])
        rows = rows.contiguous()
        with self._window.aside():
            memory = self._turn(rows)
            begin = 0
            for rank, portion in self._send[number]:
                lent = _rows_at(memory[self.part.rank], begin, portion.size, rows)
                if rank in self._wholly_lent:
                    lent.copy_(rows[portion.begin : portion.end])
                elif portion.size:
                    pick_rows(rows, self._sent[rank][portion.begin : portion.end], lent)
                begin += portion.size
            self._window.wait_for_all()
            begin = 0
            for rank, portion in receive:
                start = self._lent_at[number][rank]
                place = room[begin : begin + portion.size]
                place.copy_(_rows_at(memory[rank], start, portion.size, room))
                begin += portion.size
        wait = self._window.done(room, rows)

        def arrived() -> torch.Tensor:
            wait()
            return room

        return arrived

    def start_return(
        self,
        number: int,
        rows: torch.Tensor,
        highest: bool = False,
        *,
        own: torch.Tensor | None = None,
    ) -> Returning:
        if number == 0:
            return super().start_return(0, rows)
        with self._window.aside():
            memory = self._turn(rows)
            _rows_at(memory[self.part.rank], 0, len(rows), rows).copy_(rows)
        # The window has them now: their memory is for the next round's.
        self._window.done(rows)()
        send = self._send[number]
        sizes = [portion.size for _, portion in send]
        found: Sequence[torch.Tensor] = ()
        if own is None:
            found = rows.new_empty(sum(sizes), *rows.shape[1:]).split_with_sizes(sizes)
        with self._window.aside():
            self._window.wait_for_all()
            for place, (rank, portion) in enumerate(send):
                start = self._returned_at[number][rank]
                there = _rows_at(memory[rank], start, portion.size, rows)
                if own is None:
                    found[place].copy_(there)
                else:
                    self._add(own, there, rank, portion, highest)
        wait = self._window.done(*found if own is None else (own,))

        def add(own: torch.Tensor) -> None:
            for returned, (rank, portion) in zip(found, send, strict=False):
                self._add(own, returned, rank, portion, highest)

        return Returning(wait, add)  # which has nothing to add if own rows were given

    def _turn(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._window.turn(self._most_rows * _row_bytes(rows))

    def _add(
        self, own: torch.Tensor, found: torch.Tensor, rank: int, portion: Portion, highest: bool
    ) -> None:
        if rank not in self._wholly_lent:
            super()._add(own, found, rank, portion, highest)
            return
        mine = own[portion.begin : portion.end]
        if highest:
            torch.maximum(mine, found, out=mine)
        else:
            mine += found


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

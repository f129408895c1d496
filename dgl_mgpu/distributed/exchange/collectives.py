"""Strategies that exchange rows by messages: broadcast, and the halo in chunks or at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from dgl_mgpu.distributed.exchange.schedule import (
    Arriving,
    CommSchedule,
    Message,
    Returning,
    Tile,
    nothing,
    sendable,
)
from dgl_mgpu.distributed.local_part import Part


class Broadcast(CommSchedule):
    """A round for each rank, in which it sends its rows to all others (MG-GCN, section 4.3)."""

    def __init__(self, part: Part, group: dist.ProcessGroup | None) -> None:
        super().__init__(part, group)
        self.own_round = part.rank

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        part, src = self.part, self.part.src
        own = torch.arange(part.num_own_src, device=part.halo.device) + src.bounds[part.rank]
        positions = torch.cat([own, part.halo])
        owners = src.owners(positions)
        bounds = torch.tensor(src.bounds, device=positions.device)
        sizes = [src.count(rank) for rank in range(src.num_ranks)]
        return owners, positions - bounds[owners], sizes

    def start(self, number: int, rows: torch.Tensor) -> Arriving:
        if number == self.part.rank:
            room = rows.contiguous()
        else:
            room = rows.new_empty(self.part.src.count(number), *rows.shape[1:])
        message = None
        if self.group is not None and room.numel():
            work = dist.broadcast(sendable(room), group=self.group, group_src=number, async_op=True)
            message = Message(work, room)
        # Own rows are waited for, too: they may be overwritten as soon as sums are there.
        return partial(_wait_for_rows, message, room)

    def start_return(self, number: int, rows: torch.Tensor) -> Returning:
        if self.group is None or not rows.numel():
            return Returning(nothing, nothing)
        work = dist.reduce(rows, group=self.group, group_dst=number, async_op=True)
        return Returning(Message(work, rows).wait, nothing)


def rounds_of_distances(num_ranks: int, num_chunks: int) -> list[int]:
    """In which round rows come over which distance from one rank to the next ones.

    Own rows in the first; there is a chunk for each other rank at most.
    """
    steps = num_ranks - 1
    num_chunks = min(num_chunks, steps)
    return [0, *(1 + step * num_chunks // steps for step in range(steps))]


class Chunks(CommSchedule):
    """First the rank's own rows, then those of the ranks behind it, each once, some ranks a round.

    More rounds for the halo overlap better and have fewer rows on their way, fewer cost less.
    """

    def __init__(self, part: Part, group: dist.ProcessGroup | None, num_chunks: int = 2) -> None:
        super().__init__(part, group)
        self._round_at = rounds_of_distances(part.num_ranks, num_chunks)
        self.num_chunks = self._round_at[-1]
        self._sent = part.sent.split_with_sizes(part.sending)
        #: By round, how many rows each rank sends this one, and this rank sends each one.
        self._receive_counts, self._send_counts = [], []
        for number in range(1 + self.num_chunks):
            of_wanted, of_sending = enumerate(part.wanted), enumerate(part.sending)
            self._receive_counts.append(
                [count * (self._round(part.rank, rank) == number) for rank, count in of_wanted]
            )
            self._send_counts.append(
                [count * (self._round(rank, part.rank) == number) for rank, count in of_sending]
            )

    def _round(self, reader: int, owner: int) -> int:
        """The round in which a rank gets the rows of another one."""
        return self._round_at[(owner - reader) % self.part.num_ranks]

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
            sizes.append(sum(self._receive_counts[number]))
        return rounds, places, sizes

    def start(self, number: int, rows: torch.Tensor, room: torch.Tensor | None = None) -> Arriving:
        """As `CommSchedule.start`; a round's rows may be put into ``room``."""
        if number == 0:
            own = rows.contiguous()
            return lambda: own
        receive, send = self._receive_counts[number], self._send_counts[number]
        if room is None:
            room = rows.new_empty(sum(receive), *rows.shape[1:])
        sent = [places for places, count in zip(self._sent, send, strict=True) if count]
        places = sent[0] if len(sent) == 1 else torch.cat([*sent, self._sent[0][:0]])
        message = self._exchange(room, rows.index_select(0, places), receive, send)
        return partial(_wait_for_rows, message, room)

    def start_return(self, number: int, rows: torch.Tensor, highest: bool = False) -> Returning:
        if number == 0:
            return Returning(nothing, nothing)
        receive, send = self._receive_counts[number], self._send_counts[number]
        room = rows.new_empty(sum(send), *rows.shape[1:])
        message = self._exchange(room, rows, send, receive)

        def add(own: torch.Tensor) -> None:
            for rank, returned in enumerate(room.split_with_sizes(send)):
                if len(returned):
                    self._add(own, returned, rank, highest)

        return Returning(nothing if message is None else message.wait, add)

    def _add(self, own: torch.Tensor, returned: torch.Tensor, rank: int, highest: bool) -> None:
        # Of one rank no row comes twice: the order of additions is that of ranks.
        places = self._sent[rank]
        if highest:
            own[places] = torch.maximum(own[places], returned)
        else:
            own.index_add_(0, places, returned)

    def _exchange(
        self, out: torch.Tensor, rows: torch.Tensor, receive: list[int], send: list[int]
    ) -> Message | None:
        if self.group is None or math.prod(rows.shape[1:]) == 0:
            return None
        work = dist.all_to_all_single(
            sendable(out), sendable(rows), receive, send, group=self.group, async_op=True
        )
        return Message(work, out, rows)


def _wait_for_rows(message: Message | None, room: torch.Tensor) -> torch.Tensor:
    if message is not None:
        message.wait()
    return room


class WholeHalo(CommSchedule):
    """One round of own rows and the halo's behind them, without overlap; its tile is the part.

    Where rows are narrow they take little time to arrive, and a product over all edges takes less
    than one for each round: each destination is begun and ended once.  ``halo`` is in one chunk,
    without more rows than the halo has.
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

    def collect(
        self,
        of_round: Callable[[int, Tile, torch.Tensor | None], torch.Tensor],
        like: torch.Tensor,
    ) -> torch.Tensor:
        every = of_round(0, self.tiles[0], None)
        count = self.part.num_own_src
        own = every if len(every) == count else every[:count].clone()  # a view would keep all of it
        returning = self.start_return(0, every)
        del every
        returning.finish(own)
        return own

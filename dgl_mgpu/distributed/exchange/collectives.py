"""Strategies that exchange rows by messages: broadcast, and the halo in chunks or at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

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
            source = dist.get_global_rank(self.group, number)
            work = dist.broadcast(sendable(room), source, group=self.group, async_op=True)
            message = Message(work, room)
        # Own rows are waited for, too: they may be overwritten as soon as sums are there.
        return partial(_wait_for_rows, message, room)

    def start_return(
        self, number: int, rows: torch.Tensor, *, own: torch.Tensor | None = None
    ) -> Returning:
        if self.group is None or not rows.numel():
            return Returning(nothing, nothing)
        owner = dist.get_global_rank(self.group, number)
        work = dist.reduce(rows, owner, group=self.group, async_op=True)
        return Returning(Message(work, rows).wait, nothing)


class Portion(NamedTuple):
    """Consecutive rows of those that one rank has for another, and the round in which they come."""

    number: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def portions_of(distance: int, count: int, num_ranks: int, num_chunks: int) -> list[Portion]:
    """The rounds in which so many rows come over a distance from one rank to the next ones.

    The first round has own rows.  In few chunks several ranks' rows come in one; in more than there
    are other ranks, each one's come in several: as many for all.
    """
    steps = num_ranks - 1
    if num_chunks < steps:
        return [Portion(1 + (distance - 1) * num_chunks // steps, 0, count)]
    each = num_chunks // steps
    return [
        Portion(
            1 + (distance - 1) * each + place, count * place // each, count * (place + 1) // each
        )
        for place in range(each)
    ]


def num_rounds(num_ranks: int, num_chunks: int) -> int:
    """How many rounds there are then, that of own rows among them."""
    steps = num_ranks - 1
    return 1 + (num_chunks if num_chunks < steps else num_chunks // max(steps, 1) * steps)


class Chunks(CommSchedule):
    """First the rank's own rows, then those of the ranks behind it, each once, some in each round.

    More rounds for the halo overlap better and have fewer rows on their way, fewer cost less.
    """

    def __init__(self, part: Part, group: dist.ProcessGroup | None, num_chunks: int = 2) -> None:
        super().__init__(part, group)
        self.num_chunks = num_rounds(part.num_ranks, num_chunks) - 1
        self._sent = part.sent.split_with_sizes(part.sending)
        self._set_rows(part.wanted, part.sending)

    def _set_rows(self, reading: Sequence[int], lending: Sequence[int]) -> None:
        """How many rows this rank gets of each other one, and has for each one.

        By round, `_receive` and `_send` have the ranks and portions of these, in order of ranks.
        """
        rank, size = self.part.rank, self.part.num_ranks
        rounds = range(1 + self.num_chunks)
        self._receive: list[list[tuple[int, Portion]]] = [[] for _ in rounds]
        self._send: list[list[tuple[int, Portion]]] = [[] for _ in rounds]
        for other in range(size):
            if other == rank:
                continue
            for portion in self._portions((other - rank) % size, reading[other]):
                self._receive[portion.number].append((other, portion))
            for portion in self._portions((rank - other) % size, lending[other]):
                self._send[portion.number].append((other, portion))

    def _portions(self, distance: int, count: int) -> list[Portion]:
        return portions_of(distance, count, self.part.num_ranks, self.num_chunks)

    def _places_of(self, rank: int) -> torch.Tensor:
        """The place of each of the halo's rows of a rank among the rows that come from it."""
        return torch.arange(self.part.wanted[rank], device=self.part.halo.device)

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        own, device = self.part.num_own_src, self.part.halo.device
        rounds = torch.zeros(own + len(self.part.halo), dtype=torch.int64, device=device)
        places = torch.arange(len(rounds), device=device)
        of_halo = list(
            zip(
                rounds[own:].split_with_sizes(self.part.wanted),
                places[own:].split_with_sizes(self.part.wanted),
                strict=True,
            )
        )
        sizes = [own]
        for number, receive in enumerate(self._receive[1:], 1):
            begin = 0
            for rank, portion in receive:
                round_of, place_of = of_halo[rank]
                places_there = self._places_of(rank)
                chosen = (places_there >= portion.begin) & (places_there < portion.end)
                round_of[chosen] = number
                place_of[chosen] = places_there[chosen] + (begin - portion.begin)
                begin += portion.size
            sizes.append(begin)
        return rounds, places, sizes

    def start(self, number: int, rows: torch.Tensor, room: torch.Tensor | None = None) -> Arriving:
        """As `CommSchedule.start`; a round's rows may be put into ``room``."""
        if number == 0:
            own = rows.contiguous()
            return lambda: own
        receive, send = self._receive[number], self._send[number]
        if room is None:
            room = rows.new_empty(size_of(receive), *rows.shape[1:])
        sent = [self._sent[rank][portion.begin : portion.end] for rank, portion in send]
        places = sent[0] if len(sent) == 1 else torch.cat(sent)
        message = self._exchange(room, rows.index_select(0, places), receive, send)
        return partial(_wait_for_rows, message, room)

    def start_return(
        self,
        number: int,
        rows: torch.Tensor,
        highest: bool = False,
        *,
        own: torch.Tensor | None = None,
    ) -> Returning:
        if number == 0:
            return Returning(nothing, nothing)
        receive, send = self._receive[number], self._send[number]
        room = rows.new_empty(size_of(send), *rows.shape[1:])
        message = self._exchange(room, rows, send, receive)

        def add(own: torch.Tensor) -> None:
            sizes = [portion.size for _, portion in send]
            for (rank, portion), found in zip(send, room.split_with_sizes(sizes), strict=True):
                self._add(own, found, rank, portion, highest)

        return Returning(nothing if message is None else message.wait, add)

    def _add(
        self, own: torch.Tensor, found: torch.Tensor, rank: int, portion: Portion, highest: bool
    ) -> None:
        # Of one rank no row comes twice: the order of additions is that of ranks.
        places = self._sent[rank][portion.begin : portion.end]
        if highest:
            own[places] = torch.maximum(own[places], found)
        else:
            own.index_add_(0, places, found)

    def _exchange(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        receive: list[tuple[int, Portion]],
        send: list[tuple[int, Portion]],
    ) -> Message | None:
        if self.group is None or math.prod(rows.shape[1:]) == 0:
            return None
        comes, goes = ([0] * self.part.num_ranks for _ in range(2))
        for counts, parts in ((comes, receive), (goes, send)):
            for rank, portion in parts:
                counts[rank] = portion.size
        work = dist.all_to_all_single(
            sendable(out), sendable(rows), comes, goes, group=self.group, async_op=True
        )
        return Message(work, out, rows)


def size_of(parts: list[tuple[int, Portion]]) -> int:
    """Rows of all ranks' portions."""
    return sum(portion.size for _, portion in parts)


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

    def start_return(
        self, number: int, rows: torch.Tensor, *, own: torch.Tensor | None = None
    ) -> Returning:
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

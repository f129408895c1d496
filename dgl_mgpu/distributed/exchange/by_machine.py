"""The halo over several machines: a row goes to a machine once, however many of its ranks read it.

Two levels: between machines, the rank that owns rows sends those that any rank of another machine
reads to the rank at its own place there, in one message a round; within that machine they are
passed on.  Gradients go the same way back, and are added up within a machine first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.exchange.schedule import (
    Arriving,
    CommSchedule,
    Message,
    Returning,
    nothing,
    sendable,
)
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.errors import ConfigError

#: Rounds of the rows of one of a machine's ranks.
_ROUNDS_OF_RANK = 2


@dataclass(frozen=True)
class Machines:
    """The machines of a job of several, with as many ranks each, as one rank sees them.

    Attributes
    ----------
    ranks : list of list of int
        By machine, its ranks in the job.
    number, place : int
        Of this rank's machine, and of this rank in it.
    here, across : Communicator
        The ranks of this machine, and those at this rank's place of each machine.
    """

    ranks: list[list[int]]
    number: int
    place: int
    here: Communicator
    across: Communicator

    @classmethod
    def of_job(cls) -> Machines | None:
        """Collective; None where there are no two levels.

        That is, unless there are two machines or more, of two ranks or more each and as many,
        which are numbered in the same order on all.
        """
        ranks = ranks_by_machine()
        if len(ranks) == 1 or {len(here) for here in ranks} != {len(ranks[0])} or not ranks[0][1:]:
            return None
        try:
            across = Communicator.across_machines()
        except ConfigError:  # on all ranks
            return None
        here = Communicator.of_this_machine()
        return cls(ranks, across.rank, here.rank, here, across)

    @property
    def count(self) -> int:
        return len(self.ranks)

    @property
    def size(self) -> int:
        """Ranks of each machine."""
        return len(self.ranks[0])


@dataclass(frozen=True)
class _Route:
    """Rows that another machine sends this one, and those that it is sent, by round of a few each.

    From the rank at this one's place there come ``arriving`` rows, of which each rank here gets
    those at its ``passed_on``; ``coming`` are how many this rank gets in the end of each one's.
    ``leaving`` are own rows for the rank at this one's place there.
    """

    arriving: list[int]
    passed_on: list[list[torch.Tensor]]
    coming: list[list[int]]
    leaving: list[torch.Tensor]


def rounds_of_machine(size: int) -> int:
    """In how many rounds another machine's rows come, which has so many ranks."""
    return _ROUNDS_OF_RANK * size


def ranks_by_machine() -> list[list[int]]:
    """The ranks of each machine of the job, by the first of them; collective."""
    everyone, here = Communicator.of_all_machines(), Communicator.of_this_machine()
    first = here.broadcast_from_rank0("find the ranks of each machine", lambda: everyone.rank)
    ranks: dict[int, list[int]] = {}
    for rank, machine in enumerate(everyone.all_gather(first)):
        ranks.setdefault(machine, []).append(rank)
    return list(ranks.values())


class HaloByMachine(CommSchedule):
    """First own rows, then those of this machine's other ranks, then machine after machine.

    Ranks here have a round each, and each other machine has twice as many as it has ranks, so that
    rows in flight take a number of buffers that does not grow.
    """

    def __init__(self, part: Part, group: dist.ProcessGroup, machines: Machines) -> None:
        super().__init__(part, group)
        self._machines = machines
        device = part.halo.device
        self._here_group = machines.here.process_group(device)
        self._across_group = machines.across.process_group(device)
        self._sent = part.sent.split_with_sizes(part.sending)
        #: Rounds of another machine's rows.
        self._turns = rounds_of_machine(machines.size)
        #: By machine; nothing takes the one to this machine.
        self._routes = self._find_routes()

    def _find_routes(self) -> list[_Route]:
        machines = self._machines
        arriving, passed_on, distinct = [], [], []
        for wanted in self._wanted_of_places():
            rows, inverse = torch.unique(torch.cat(wanted), return_inverse=True)
            ends = [len(rows) * (turn + 1) // self._turns for turn in range(self._turns)]
            starts = [0, *ends[:-1]]
            # Places are in ascending order, as a halo is: in each round come a rank's next ones.
            inner = torch.tensor(ends[:-1], device=rows.device)
            of_ranks = [
                places.tensor_split(torch.searchsorted(places, inner).cpu())
                for places in inverse.split([len(ids) for ids in wanted])
            ]
            distinct.append(rows)
            arriving.append([end - start for start, end in zip(starts, ends, strict=True)])
            passed_on.append(
                [
                    [of_rank[turn] - start for of_rank in of_ranks]
                    for turn, start in enumerate(starts)
                ]
            )
        counts = [[[len(ids) for ids in turn] for turn in of_machine] for of_machine in passed_on]
        of_places = machines.here.all_gather(counts)
        leaving = self._leaving(distinct, arriving)
        return [
            _Route(
                arriving[number],
                passed_on[number],
                [
                    [of_place[number][turn][machines.place] for of_place in of_places]
                    for turn in range(self._turns)
                ],
                leaving[number],
            )
            for number in range(machines.count)
        ]

    def _wanted_of_places(self) -> list[list[torch.Tensor]]:
        """By machine, which rows of the rank at this one's place there each rank here wants."""
        machines, part = self._machines, self.part
        bounds = part.src.bounds[:-1]
        of_owners = [
            halo - start
            for start, halo in zip(bounds, part.halo.split_with_sizes(part.wanted), strict=True)
        ]
        asking = [
            torch.cat([of_owners[ranks[place]] for ranks in machines.ranks])
            for place in range(machines.size)
        ]
        counts = [
            [wanted[ranks[machines.place]] for ranks in machines.ranks]
            for wanted in machines.here.all_gather(part.wanted)
        ]
        asked = machines.here.all_to_all(
            torch.cat(asking), [len(rows) for rows in asking], [sum(some) for some in counts]
        ).split([sum(some) for some in counts])
        by_rank = [rows.split(some) for rows, some in zip(asked, counts, strict=True)]
        return [[of_rank[number] for of_rank in by_rank] for number in range(machines.count)]

    def _leaving(
        self, distinct: Sequence[torch.Tensor], arriving: Sequence[list[int]]
    ) -> list[list[torch.Tensor]]:
        """Own rows for each machine, by round, given those that are wanted here of each one."""
        machines = self._machines
        counts = [of[machines.number] for of in machines.across.all_gather([*arriving])]
        totals = [sum(of_machine) for of_machine in counts]
        lent = machines.across.all_to_all(
            torch.cat(list(distinct)), [len(rows) for rows in distinct], totals
        ).split(totals)
        return [list(rows.split(of_machine)) for rows, of_machine in zip(lent, counts, strict=True)]

    def _places(self, number: int) -> tuple[int, int]:
        """At which place here the rank is whose rows come in a round, and the one that reads."""
        size, place = self._machines.size, self._machines.place
        return (place + number) % size, (place - number) % size

    def _round(self, number: int) -> tuple[int, int, int]:
        """Whose rows come in a round, to which machine this one's go, and which turn it is."""
        distance, turn = divmod(number - self._machines.size, self._turns)
        count, here = self._machines.count, self._machines.number
        return (here + distance + 1) % count, (here - distance - 1) % count, turn

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        machines, part = self._machines, self.part
        own = part.num_own_src
        rounds = torch.zeros(own + len(part.halo), dtype=torch.int64, device=part.halo.device)
        places = torch.arange(len(rounds), device=rounds.device)
        of_rounds = rounds[own:].split_with_sizes(part.wanted)
        of_places = places[own:].split_with_sizes(part.wanted)
        coming: list[tuple[list[int], list[int]]] = []
        for number in range(1, machines.size):
            rank = machines.ranks[machines.number][self._places(number)[0]]
            coming.append(([rank], [part.wanted[rank]]))
        for number in range(machines.size, machines.size + (machines.count - 1) * self._turns):
            source, _, turn = self._round(number)
            coming.append((machines.ranks[source], self._routes[source].coming[turn]))
        done = [0] * part.num_ranks
        sizes = [own]
        for number, (ranks, counts) in enumerate(coming, 1):
            begin = 0
            for rank, count in zip(ranks, counts, strict=True):
                next_ones = slice(done[rank], done[rank] + count)
                of_rounds[rank][next_ones] = number
                of_places[rank][next_ones] = torch.arange(
                    begin, begin + count, device=rounds.device
                )
                done[rank] += count
                begin += count
            sizes.append(begin)
        return rounds, places, sizes

    def start(self, number: int, rows: torch.Tensor) -> Arriving:
        if number == self.own_round:
            own = rows.contiguous()
            return lambda: own
        if number < self._machines.size:
            return self._between_ranks_here(rows, *self._of_round_here(number))
        source, reader, turn = self._round(number)
        route = self._routes[source]
        arriving = self._across(
            rows.index_select(0, self._routes[reader].leaving[turn]),
            (reader, len(self._routes[reader].leaving[turn])),
            (source, route.arriving[turn]),
        )
        return lambda: self._between_ranks_here(
            arriving(), route.passed_on[turn], route.coming[turn]
        )()

    def start_return(
        self, number: int, rows: torch.Tensor, *, own: torch.Tensor | None = None
    ) -> Returning:
        if number == self.own_round:
            return Returning(nothing, nothing)
        if number < self._machines.size:
            places, came = self._of_round_here(number)
            return _returning(self._back_here(rows, places, came), places)
        source, reader, turn = self._round(number)
        route, leaving = self._routes[source], self._routes[reader].leaving[turn]
        total = rows.new_zeros(route.arriving[turn], *rows.shape[1:])
        found = self._back_here(rows, route.passed_on[turn], route.coming[turn])
        _returning(found, route.passed_on[turn]).finish(total)
        back = self._across(total, (source, len(total)), (reader, len(leaving)))
        return _returning(back, [leaving])

    def _of_round_here(self, number: int) -> tuple[list[torch.Tensor], list[int]]:
        """Own rows for each rank here, of which one gets some, and how many come of each."""
        source, reader = self._places(number)
        ranks = self._machines.ranks[self._machines.number]
        places = [
            self._sent[rank] if place == reader else self._sent[rank][:0]
            for place, rank in enumerate(ranks)
        ]
        return places, _only(source, self.part.wanted[ranks[source]], len(ranks))

    def _between_ranks_here(
        self, rows: torch.Tensor, places: Sequence[torch.Tensor], comes: Sequence[int]
    ) -> Arriving:
        """Begin to send each rank here rows at some places."""
        picked = rows.index_select(0, torch.cat(list(places)))
        return _send(self._here_group, picked, [len(ids) for ids in places], comes)

    def _back_here(
        self, rows: torch.Tensor, places: Sequence[torch.Tensor], came: Sequence[int]
    ) -> Arriving:
        """Begin to send back what `_between_ranks_here` brought; what comes is for ``places``."""
        return _send(self._here_group, rows, came, [len(ids) for ids in places])

    def _across(
        self, rows: torch.Tensor, goes: tuple[int, int], comes: tuple[int, int]
    ) -> Arriving:
        """Begin to send rows to one machine, and to get some of one; each is told with how many."""
        count = self._machines.count
        return _send(self._across_group, rows, _only(*goes, count), _only(*comes, count))


def _send(
    group: dist.ProcessGroup, rows: torch.Tensor, goes: Sequence[int], comes: Sequence[int]
) -> Arriving:
    """Begin to send each rank its rows; the result waits for theirs."""
    room = rows.new_empty(sum(comes), *rows.shape[1:])
    if math.prod(rows.shape[1:]) == 0:
        return lambda: room
    rows = rows.contiguous()
    work = dist.all_to_all_single(
        sendable(room), sendable(rows), list(comes), list(goes), group=group, async_op=True
    )
    message = Message(work, room, rows)

    def arrived() -> torch.Tensor:
        message.wait()
        return room

    return arrived


def _only(number: int, count: int, size: int) -> list[int]:
    """A count for one of so many, none for others."""
    return [count if other == number else 0 for other in range(size)]


def _returning(arriving: Arriving, places: Sequence[torch.Tensor]) -> Returning:
    """Rows that come from each rank, to be added at places of its own."""

    def add(own: torch.Tensor) -> None:
        # Of one rank no row comes twice: the order of additions is that of ranks.
        found = arriving().split_with_sizes([len(ids) for ids in places])
        for ids, of_rank in zip(places, found, strict=True):
            own.index_add_(0, ids, of_rank)

    return Returning(arriving, add)

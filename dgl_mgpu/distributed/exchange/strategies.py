"""The strategies to exchange rows: their names, and those that a group of ranks has."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.exchange.by_machine import HaloByMachine, Machines, rounds_of_machine
from dgl_mgpu.distributed.exchange.collectives import (
    Broadcast,
    Chunks,
    WholeHalo,
    num_rounds,
    portions_of,
)
from dgl_mgpu.distributed.exchange.peer_memory import MOST_WANTED, halo_in_chunks, rows_read
from dgl_mgpu.distributed.exchange.remote_reads import RemoteReads
from dgl_mgpu.distributed.exchange.schedule import CommSchedule
from dgl_mgpu.distributed.exchange.window import Window
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.spmm_remote import Pipeline

#: What a pipeline's parameters may be: MGG's ranges (section 4) in powers of two.
STEPS = {"ps": (1, 2, 4, 8, 16, 32), "dist": (1, 2, 4, 8, 16), "wpb": (1, 2, 4, 8, 16)}
#: Rounds of the halo where no number is given and it is small.
_DEFAULT_CHUNKS = 2
#: Buffers, each as large as the most rows that a rank has of its own, that rows in flight may
#: take: what any strategy does on two ranks; with a window, whose halves are two.
_MOST_BUFFERS, _MOST_WITH_WINDOW = 3, 5
_HALO = re.compile(r"halo in ([1-9]\d{0,8})")
_REMOTE = re.compile(r"remote reads, " + " ".join(rf"{name}=(\d{{1,9}})" for name in STEPS))
#: Instead of a strategy's name: whichever is the fastest.
AUTO = "auto"


@dataclass(frozen=True)
class ExchangeStrategy:
    """Broadcast; or the halo, before all sums, in chunks or by machine; or remote reads."""

    chunks: int = 0  # rounds of the halo; 0 for none
    pipeline: Pipeline | None = None  # of remote reads
    is_blocking: bool = False  # the halo comes before all sums
    is_by_machine: bool = False  # each row of the halo goes to a machine once

    def __str__(self) -> str:
        if self.pipeline is not None:
            steps = (f"{name}={getattr(self.pipeline, name)}" for name in STEPS)
            return f"remote reads, {' '.join(steps)}"
        if self.is_blocking:
            return "halo at first"
        if self.is_by_machine:
            return "halo by machine"
        return f"halo in {self.chunks}" if self.chunks else "broadcast"

    @classmethod
    def named(cls, name: str) -> ExchangeStrategy:
        """The strategy 'halo', 'broadcast', 'remote', or a name in full, as ``str`` writes it.

        'halo' is in two chunks here; `ExchangeStrategies.named` has more where ranks need more.
        """
        fixed = {
            "halo": cls(chunks=_DEFAULT_CHUNKS),
            "remote": cls(pipeline=Pipeline()),
            str(BROADCAST): BROADCAST,
            str(HALO_BLOCKING): HALO_BLOCKING,
            str(HALO_BY_MACHINE): HALO_BY_MACHINE,
        }
        if strategy := fixed.get(str(name)):
            return strategy
        if chunks := _HALO.fullmatch(str(name)):
            return cls(chunks=int(chunks[1]))
        if parameters := _REMOTE.fullmatch(str(name)):
            return cls(pipeline=Pipeline(*map(int, parameters.groups())))
        raise InvalidInputError(
            "exchange rows between ranks",
            f"there is no exchange={name!r}",
            f"use {AUTO}, halo, broadcast, remote, or one in full: 'halo at first', 'halo in 3', "
            "'halo by machine', 'remote reads, ps=16 dist=8 wpb=2'",
        )


BROADCAST = ExchangeStrategy()
HALO_BLOCKING = ExchangeStrategy(is_blocking=True)
HALO_BY_MACHINE = ExchangeStrategy(is_by_machine=True)


#: Chunks of a halo that are tried, beside one a rank.
_CHUNKS = (1, 2, 4)


class Rows(NamedTuple):
    """A rank's rows: its own, and those that it wants of each other rank."""

    own: int
    wanted: list[int]


def rows_in_flight(
    strategy: ExchangeStrategy,
    ranks: Sequence[Rows],
    has_window: bool,
    machines: Sequence[Sequence[int]] = (),
) -> int:
    """The most rows that sums, or their transposes, have on a rank beside their input and output.

    These are rows that have come and are added up, those that come meanwhile, what is sent, and
    both halves of a window.  ``machines`` are the ranks of each, where rows may go by machine.
    """
    if len(ranks) == 1:
        return 0
    if strategy == HALO_BY_MACHINE:
        return max(
            _in_flight_by_machine(ranks, machines, machine, place)
            for machine, here in enumerate(machines)
            for place in range(len(here))
        )
    own, halos = [rank.own for rank in ranks], [sum(rank.wanted) for rank in ranks]
    if strategy == BROADCAST:
        return sum(sorted(own)[-2:])
    if strategy == HALO_BLOCKING:
        sent = [sum(other.wanted[rank] for other in ranks) for rank in range(len(ranks))]
        window = 2 * max(*own, *halos) if has_window else 0
        return max(map(sum, zip(own, halos, sent, strict=True))) + window
    chunks = strategy.chunks or len(ranks) - 1
    size = len(ranks)
    most = MOST_WANTED if has_window else math.inf
    # By rank and round, what comes of others' rows, and what goes to others.
    arriving, leaving = ([[0] * num_rounds(size, chunks) for _ in ranks] for _ in range(2))
    for reader, rank in enumerate(ranks):
        for owner, count in enumerate(rows_read(rank.wanted, own, most)):
            if owner == reader:
                continue
            for portion in portions_of((owner - reader) % size, count, size, chunks):
                arriving[reader][portion.number] += portion.size
                leaving[owner][portion.number] += portion.size
    in_flight = 0
    for comes, goes in zip(arriving, leaving, strict=True):
        for (now, given), (later, later_given) in pairwise(zip(comes, goes, strict=True)):
            if has_window:  # what is sent lies there
                in_flight = max(in_flight, now + max(later, later_given), later + later_given)
            else:
                in_flight = max(in_flight, now + later + later_given, now + given)
    window = 2 * max(map(max, (*arriving, *leaving))) if has_window else 0
    return in_flight + window


class RowsOfPlace(NamedTuple):
    """Rows that one of a machine's ranks has to do with when another machine's come.

    At most: ``arriving`` from the rank at its place there, ``passed_on`` to ranks here, and
    ``coming`` to itself in the end.
    """

    arriving: int
    passed_on: int
    coming: int

    @classmethod
    def of(
        cls, ranks: Sequence[Rows], here: Sequence[int], there: Sequence[int], place: int
    ) -> RowsOfPlace:
        passed_on = sum(ranks[rank].wanted[there[place]] for rank in here)
        coming = sum(ranks[here[place]].wanted[rank] for rank in there)
        return cls(min(ranks[there[place]].own, passed_on), passed_on, coming)


def _in_flight_by_machine(
    ranks: Sequence[Rows], machines: Sequence[Sequence[int]], machine: int, place: int
) -> int:
    here, me = machines[machine], machines[machine][place]
    rounds = rounds_of_machine(len(here))
    of_rounds, leaving = [], []
    for number, there in enumerate(machines):
        if number != machine:
            of_place = RowsOfPlace.of(ranks, here, there, place)
            of_rounds.append([-(-count // rounds) for count in of_place])
            wanted = sum(ranks[rank].wanted[me] for rank in there)
            leaving.append(-(-min(ranks[me].own, wanted) // rounds))
    coming_here = max(ranks[me].wanted[rank] for rank in here)
    sent_here = max(ranks[rank].wanted[me] for rank in here)
    coming = max(coming_here, *(round_of[-1] for round_of in of_rounds))
    return coming + max(max(map(sum, of_rounds)) + max(leaving), coming_here + sent_here)


class ExchangeStrategies:
    """The strategies of one part of a graph, each prepared on first use; making them is collective.

    Remote reads need a ``window``, of GPUs that read each other's memory, and the halo by machine
    ``machines`` of several ranks.  Candidates are those whose rows in flight take a number of
    buffers that does not grow with the ranks.
    """

    def __init__(
        self,
        part: Part,
        group: dist.ProcessGroup | None,
        window: Window | None = None,
        machines: Machines | None = None,
    ) -> None:
        self.part, self.group = part, group
        self.window, self.machines = window, machines
        self._rows = Communicator.of_all_machines().all_gather(Rows(part.num_own_src, part.wanted))
        others = part.num_ranks - 1
        # Those of each other rank may come in two.
        counts = {*(count for count in _CHUNKS if count < others), others, 2 * others}
        chunks = sorted(counts - {0}) or [1]
        #: What is taken where there is nothing to choose: in few chunks, if the halo is small.
        self.default = ExchangeStrategy(
            chunks=next(
                count
                for count in chunks
                if count == chunks[-1]
                or (
                    count >= _DEFAULT_CHUNKS and self._is_bounded(ExchangeStrategy(chunks=count), 2)
                )
            )
        )
        #: Of remote reads, those with the pipeline that a search begins with.
        self.candidates = [
            strategy
            for strategy in (
                BROADCAST,
                HALO_BLOCKING,
                *([] if machines is None else [HALO_BY_MACHINE]),
                *(ExchangeStrategy(chunks=count) for count in chunks),
            )
            if self._is_bounded(strategy)
        ]
        every = list(self.candidates)
        if window is not None:
            self.candidates.append(ExchangeStrategy(pipeline=Pipeline()))
            every += [
                ExchangeStrategy(pipeline=Pipeline(*parameters))
                for parameters in itertools.product(*STEPS.values())
            ]
        #: All that may be chosen, with all pipelines.
        self.by_name = {str(strategy): strategy for strategy in every}
        self._schedules: dict[ExchangeStrategy, CommSchedule] = {}
        #: By the size of partitions: their pairs are costly to make, the rest is shared.
        self._readers: dict[int, RemoteReads] = {}

    def _is_bounded(self, strategy: ExchangeStrategy, part: int = 1) -> bool:
        """Whether more ranks with as many rows each would not have more rows in flight.

        And whether they take no more than a part of what they may.
        """
        has_window = self.window is not None
        buffers = (_MOST_WITH_WINDOW if has_window else _MOST_BUFFERS) / part
        most_own = max(rank.own for rank in self._rows)
        machines = [] if self.machines is None else self.machines.ranks
        in_flight = rows_in_flight(strategy, self._rows, has_window, machines)
        return in_flight <= buffers * most_own

    def named(self, name: str) -> ExchangeStrategy:
        """As `ExchangeStrategy.named`; 'halo' is the default.

        So are remote reads of nobody, and a halo by machine where there are no two levels.
        """
        strategy = ExchangeStrategy.named(name)
        is_default = (
            name == "halo"
            or (strategy.pipeline is not None and self.window is None)
            or (strategy.is_by_machine and self.machines is None)
        )
        return self.default if is_default else strategy

    def __getitem__(self, strategy: ExchangeStrategy) -> CommSchedule:
        """The schedule of a strategy; collective where it has not been made yet."""
        if strategy.pipeline is not None:
            reader = self._reader(strategy.pipeline.ps)
            reader.pipeline = strategy.pipeline
            return reader
        return self._schedule(strategy)

    def _schedule(self, strategy: ExchangeStrategy) -> CommSchedule:
        if strategy not in self._schedules:
            self._schedules[strategy] = self._make(strategy)
        return self._schedules[strategy]

    def keep(self, wanted: Iterable[ExchangeStrategy]) -> None:
        """Drop all schedules except those of some strategies, with their tiles."""
        wanted = set(wanted)
        self._schedules = {key: value for key, value in self._schedules.items() if key in wanted}
        if all(strategy.pipeline is None for strategy in wanted):
            self._readers = {}

    def _make(self, strategy: ExchangeStrategy) -> CommSchedule:
        if strategy == BROADCAST:
            return Broadcast(self.part, self.group)
        if strategy == HALO_BLOCKING:
            return WholeHalo(self._chunks(1, read_all=False))
        if strategy == HALO_BY_MACHINE:
            assert self.machines is not None and self.group is not None  # else no candidate
            return HaloByMachine(self.part, self.group, self.machines)
        return self._chunks(strategy.chunks)

    def _chunks(self, count: int, read_all: bool = True) -> Chunks:
        return halo_in_chunks(self.part, self.group, self.window, count, read_all)

    def _reader(self, ps: int) -> RemoteReads:
        if ps not in self._readers:
            if self._readers:  # with the tiles that it has
                self._readers[ps] = copy.copy(next(iter(self._readers.values())))
            else:
                assert self.window is not None  # else there is no such candidate
                self._readers[ps] = RemoteReads(self._schedule(self.default), self.window)
        return self._readers[ps]

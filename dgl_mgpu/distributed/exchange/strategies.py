"""The strategies to exchange rows: their names, and those that a group of ranks has."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from dgl_mgpu.distributed.exchange.collectives import Broadcast, Chunks, WholeHalo
from dgl_mgpu.distributed.exchange.peer_memory import halo_in_chunks
from dgl_mgpu.distributed.exchange.remote_reads import RemoteReads
from dgl_mgpu.distributed.exchange.schedule import CommSchedule
from dgl_mgpu.distributed.exchange.window import Window
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.spmm_remote import Pipeline

#: What a pipeline's parameters may be: MGG's ranges (section 4) in powers of two.
STEPS = {"ps": (1, 2, 4, 8, 16, 32), "dist": (1, 2, 4, 8, 16), "wpb": (1, 2, 4, 8, 16)}
#: Rounds of the halo where no number is given.
_DEFAULT_CHUNKS = 2
_HALO = re.compile(r"halo in ([1-9]\d{0,8})")
_REMOTE = re.compile(r"remote reads, " + " ".join(rf"{name}=(\d{{1,9}})" for name in STEPS))
#: Instead of a strategy's name: whichever is the fastest.
AUTO = "auto"


@dataclass(frozen=True)
class ExchangeStrategy:
    """Broadcast; or the halo, before all sums or in chunks; or remote reads with some pipeline."""

    chunks: int = 0  # rounds of the halo; 0 for none
    pipeline: Pipeline | None = None
    is_blocking: bool = False  # the halo comes before all sums

    def __str__(self) -> str:
        if self.pipeline is not None:
            steps = (f"{name}={getattr(self.pipeline, name)}" for name in STEPS)
            return f"remote reads, {' '.join(steps)}"
        if self.is_blocking:
            return "halo at first"
        return f"halo in {self.chunks}" if self.chunks else "broadcast"

    @classmethod
    def named(cls, name: str) -> ExchangeStrategy:
        """The strategy 'halo', 'broadcast', 'remote', or a name in full, as ``str`` writes it."""
        fixed = {
            "halo": cls(chunks=_DEFAULT_CHUNKS),
            "remote": cls(pipeline=Pipeline()),
            str(BROADCAST): BROADCAST,
            str(HALO_BLOCKING): HALO_BLOCKING,
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
            "'remote reads, ps=16 dist=8 wpb=2'",
        )


BROADCAST = ExchangeStrategy()
HALO_BLOCKING = ExchangeStrategy(is_blocking=True)


#: Chunks of a halo that are tried, beside one a rank.
_CHUNKS = (1, 2, 4)


class ExchangeStrategies:
    """The strategies of one part of a graph, each prepared on first use.

    Remote reads need a ``window``, of GPUs that read each other's memory.
    """

    def __init__(
        self, part: Part, group: dist.ProcessGroup | None, window: Window | None = None
    ) -> None:
        self.part, self.group = part, group
        self._window = window
        most = max(1, part.num_ranks - 1)
        chunks = sorted({count for count in (*_CHUNKS, most) if count <= most})
        #: What is taken where there is nothing to choose.
        self.default = ExchangeStrategy(chunks=min(_DEFAULT_CHUNKS, most))
        #: Of remote reads, those with the pipeline that a search begins with.
        self.candidates = [
            BROADCAST,
            HALO_BLOCKING,
            *(ExchangeStrategy(chunks=count) for count in chunks),
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

    def __getitem__(self, strategy: ExchangeStrategy) -> CommSchedule:
        """The schedule of a strategy; collective where it has not been made yet."""
        if strategy.pipeline is not None:
            reader = self._reader(strategy.pipeline.ps)
            reader.pipeline = strategy.pipeline
            return reader
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
            return WholeHalo(self._halo())
        return halo_in_chunks(self.part, self.group, self._window, strategy.chunks)

    def _reader(self, ps: int) -> RemoteReads:
        if ps not in self._readers:
            if self._readers:  # with the tiles that it has
                self._readers[ps] = copy.copy(next(iter(self._readers.values())))
            else:
                assert self._window is not None  # else there is no such candidate
                self._readers[ps] = RemoteReads(self._halo(), self._window)
        return self._readers[ps]

    def _halo(self) -> Chunks:
        """In one chunk, each row once."""
        return halo_in_chunks(self.part, self.group, self._window, 1, read_all=False)

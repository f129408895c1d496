"""The strategies to exchange rows that a group of ranks has, each made when it is first taken."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable

import torch.distributed as dist

from dgl_mgpu.distributed.exchange.broadcast import Broadcast
from dgl_mgpu.distributed.exchange.chunks import Chunks
from dgl_mgpu.distributed.exchange.halo_blocking import WholeHalo
from dgl_mgpu.distributed.exchange.peer_memory import halo_in_chunks
from dgl_mgpu.distributed.exchange.remote_reads import RemoteReads
from dgl_mgpu.distributed.exchange.schedule import CommSchedule
from dgl_mgpu.distributed.exchange.strategy import BROADCAST, HALO_BLOCKING, STEPS, ExchangeStrategy
from dgl_mgpu.distributed.exchange.window import Window
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.ops.spmm_remote import Pipeline

#: Chunks of a halo that are tried, beside one a rank.
_CHUNKS = (1, 2, 4)


class ExchangeStrategies:
    """Those of one part of a graph.

    Parameters
    ----------
    part : Part
    group : torch.distributed.ProcessGroup or None
        None for a single rank.
    window : Window, optional
        Of GPUs that read each other's memory: without one there are no remote reads.

    Attributes
    ----------
    default : ExchangeStrategy
        What is taken where there is nothing to choose.
    candidates : list of ExchangeStrategy
        Of remote reads, those with the pipeline that a search begins with.
    by_name : dict of str to ExchangeStrategy
        All that may be chosen, with all pipelines.
    """

    def __init__(
        self, part: Part, group: dist.ProcessGroup | None, window: Window | None = None
    ) -> None:
        self.part, self.group = part, group
        self._window = window
        most = max(1, part.num_ranks - 1)
        chunks = sorted({count for count in (*_CHUNKS, most) if count <= most})
        self.default = ExchangeStrategy(chunks=min(2, most))
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
        self.by_name = {str(strategy): strategy for strategy in every}
        self._made: dict[ExchangeStrategy, CommSchedule] = {}
        #: By the size of partitions: their pairs are costly to make, the rest is shared.
        self._readers: dict[int, RemoteReads] = {}

    def __getitem__(self, strategy: ExchangeStrategy) -> CommSchedule:
        """What carries a strategy out; collective where it has not been made yet."""
        if strategy.pipeline is not None:
            reader = self._reader(strategy.pipeline.ps)
            reader.pipeline = strategy.pipeline
            return reader
        if strategy not in self._made:
            self._made[strategy] = self._make(strategy)
        return self._made[strategy]

    def keep(self, wanted: Iterable[ExchangeStrategy]) -> None:
        """Forget all that is made but some strategies, with their tiles."""
        wanted = set(wanted)
        self._made = {strategy: made for strategy, made in self._made.items() if strategy in wanted}
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
                self._readers[ps] = self._new_reader()
        return self._readers[ps]

    def _new_reader(self) -> RemoteReads:
        assert self._window is not None  # else there is no such candidate
        return RemoteReads(self._halo(), self._window)

    def _halo(self) -> Chunks:
        """In one chunk, each row once."""
        return halo_in_chunks(self.part, self.group, self._window, 1, read_all=False)

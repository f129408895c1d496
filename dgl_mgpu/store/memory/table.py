"""A table as one rank has it mapped: the shards its plan has it read from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dgl_mgpu.errors import StoreClosedError
from dgl_mgpu.ops.host_reads import HostReads
from dgl_mgpu.ops.view import GraphView, RowView
from dgl_mgpu.placement import HOST, TablePlan
from dgl_mgpu.store.memory.device import DeviceMemory, DeviceSegment, not_in_workers
from dgl_mgpu.store.memory.format import RowFormat, TableFormat, local_rows
from dgl_mgpu.store.memory.layout import read_shards
from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.store.memory.staging import StagedRows


class Table:
    """One table, mapped.

    ``segments`` are the shards that ``rank`` reads, as :func:`read_shards` lists them, and
    ``position`` is row id → position, where rows are not kept in the order of their ids.  In a
    store on GPUs, ``gpu`` keeps the segments, ``staging_bytes`` of its memory cache rows on disk,
    and ``host_share`` of the reads are expected to go to host memory.

    ``version`` counts the changes of rows by :mod:`dgl_mgpu.store.row_updates`, and is the same on
    all ranks.  What was read at another version may be out of date.
    """

    def __init__(
        self,
        format: TableFormat,
        plan: TablePlan,
        rank: int,
        segments: Sequence[Segment | DeviceSegment],
        position: Segment | torch.Tensor | None,
        gpu: DeviceMemory | None = None,
        staging_bytes: int = 0,
        host_share: float = 1.0,
    ) -> None:
        self.format = format
        self.plan = plan
        self.rank = rank
        self.device = torch.device("cpu") if gpu is None else gpu.runtime.device
        self.version = 0
        self._segments = segments
        self._position = position
        self._gpu = gpu
        self._staging_bytes = staging_bytes
        self._host_share = host_share
        self._pid = os.getpid()
        #: Segments of other machines that are read, too, before those of ``segments``, and the
        #: first position behind them.
        self.num_mapped = self.first_own = 0
        #: Whether all ranks of a store over machines read all rows, wherever they are.
        self.reads_all_rows = False
        self._view: RowView | GraphView | None = self._map()

    @property
    def keeps_all_rows(self) -> bool:
        """Whether no other machine has rows that this one does not keep."""
        return self.num_kept == self.format.num_rows

    @property
    def num_kept(self) -> int:
        """Rows that are kept on this machine."""
        return sum(tier.num_rows for tier in self.plan.tiers)

    @property
    def caches_disk(self) -> bool:
        """Whether GPU memory caches rows on disk."""
        return isinstance(self._view, RowView) and self._view.disk is not None

    def _map(self) -> RowView | GraphView:
        # Addresses hold in this process only: a table that reached a DataLoader worker by
        # spawn maps its segments again.
        shards = list(read_shards(self.plan, self.rank))
        rows = [
            self.format.pointers(segment, len(local_rows(self.plan.tiers[shard.tier], shard.part)))
            for shard, segment in zip(shards, self._segments, strict=True)
        ]
        position = self._position
        if position is None:
            position = torch.empty(0, dtype=torch.int64)
        elif isinstance(position, Segment):
            position = position_tensor(position, self.format.num_rows)
        tiers, pointers = _tier_tensor(self.plan), torch.tensor(rows, dtype=torch.int64)
        view = self.format.view(
            tiers.to(self.device),
            pointers.to(self.device),
            position.to(self.device),
            owner=(self._segments, self._gpu),
        )
        if self._gpu is None:
            return view
        if isinstance(view, GraphView):
            on_host = any(self._memory_of(shard.tier, shard.part) == "host" for shard in shards)
            return dataclasses.replace(view, host_share=self._host_share if on_host else 0.0)
        view = dataclasses.replace(
            view, host_start=_host_start(self.plan), host_share=self._host_share
        )
        on_disk = [self.plan.tiers[shard.tier].memory == "disk" for shard in shards]
        if not any(on_disk) or view.row_bytes == 0:
            address = int(pointers[0, 0]) if len(shards) == 1 else 0
            return dataclasses.replace(view, host_reads=HostReads(), address=address)
        disk = RowView(
            tiers, pointers[:, 0].contiguous(), view.num_rows, view.row_shape, view.dtype,
            owner=self._segments,
        )  # fmt: skip
        num_rows = sum(tier.num_rows for tier in self.plan.tiers if tier.memory == "disk")
        in_memory = pointers.masked_fill(torch.tensor(on_disk)[:, None], 0)[:, 0]
        staged = StagedRows(disk, num_rows, self._staging_bytes, self.device)
        # Another stream may be the first to read what this one has filled.
        self._gpu.runtime.synchronize()
        return dataclasses.replace(view, pointers=in_memory.to(self.device), disk=staged)

    @property
    def view(self) -> RowView | GraphView:
        """The table as operators see it.

        Raises StoreClosedError if the store was closed, or is on GPUs and this process is a fork of
        its rank's.
        """
        view = self._view  # which another thread may close
        if view is None:
            raise _closed()
        if self._gpu is not None and os.getpid() != self._pid:
            raise not_in_workers()
        return view

    @property
    def is_closed(self) -> bool:
        """Whether it can no longer be read."""
        return self._view is None

    def also_read(
        self, tiers: list[list[int]], pointers: list[list[int]], position: torch.Tensor
    ) -> None:
        """Read what GPUs of other machines have, too, from now on.

        ``tiers`` and ``pointers`` are as those of a view, and come before the table's own;
        ``position`` is that of all rows in both.
        """
        view, device = self.view, self.device
        self.num_mapped, self.first_own = len(pointers), tiers[-1][1]
        shift = torch.tensor([self.first_own, self.first_own, 0, self.num_mapped], device=device)
        addresses = torch.tensor(pointers, dtype=torch.int64, device=device)
        total = self.first_own + self.num_kept
        changed: dict[str, Any] = {
            "tiers": torch.cat([torch.tensor(tiers, device=device), view.tiers + shift]),
            "pointers": torch.cat([addresses.view(-1, *view.pointers.shape[1:]), view.pointers]),
            "position": position,
        }
        self._position = position
        # Kernels that put rows of host memory in order count positions up to the number of rows.
        has_order = total <= view.num_rows
        if isinstance(view, RowView):
            host_start = view.host_start + self.first_own if view.host_start >= 0 else -1
            changed["host_start"] = host_start if has_order else -1
            changed |= {"address": 0, "num_positions": total}
        elif not has_order:
            changed["host_share"] = 0.0
        self._view = dataclasses.replace(view, **changed)

    def gpu_segment(self, address: int, nbytes: int) -> DeviceSegment:
        """Memory of a GPU at an address that this rank's has mapped."""
        assert self._gpu is not None
        return DeviceSegment(self._gpu.runtime, address, nbytes)

    def use_sms(self, sms: int, host_sms: int) -> None:
        """Limit operators to some of a GPU's multiprocessors, and gathers from host memory to
        ``host_sms``, as :class:`~dgl_mgpu.ops.view.RowView` says."""
        if isinstance(self._view, RowView):
            self._view = dataclasses.replace(self._view, sms=sms, host_sms=host_sms)
        elif self._view is not None:
            self._view = dataclasses.replace(self._view, sms=sms)

    def close(self) -> None:
        """Let go of the memory.

        What holds a view keeps shared memory mapped, but not that of GPUs, which goes back when
        the store is closed.
        """
        self._view, self._segments, self._position, self._gpu = None, (), None, None

    @property
    def row_bytes(self) -> int:
        """Size of a row, of a table of rows of one size."""
        assert isinstance(self.format, RowFormat)
        return self.format.row_bytes

    @property
    def memories(self) -> list[str]:
        """Where this rank reads each segment from, in pointer order: its GPU, a peer, and so on."""
        shards = read_shards(self.plan, self.rank)
        own = [self._memory_of(shard.tier, shard.part) for shard in shards]
        return ["peer"] * self.num_mapped + own

    def _memory_of(self, tier: int, part: int) -> str:
        """Where this rank reads a part from: 'device', 'peer', 'host' or 'disk'."""
        placed = self.plan.tiers[tier]
        if placed.memory != "gpu":
            return placed.memory
        holder = placed.source[self.rank][part]
        if holder == HOST:
            return "host"
        return "device" if holder == self.rank else "peer"

    def __getstate__(self) -> dict:
        if self._view is None:
            raise _closed()
        if self._gpu is not None:
            raise not_in_workers()
        return {name: value for name, value in self.__dict__.items() if name != "_view"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._view = self._map()


def _closed() -> StoreClosedError:
    return StoreClosedError(
        "read a table", "its store was closed", "close a store when all is read, or build it anew"
    )


def position_dtype(num_rows: int) -> np.dtype:
    """The smallest id type that holds ``num_rows`` positions."""
    return np.dtype(np.int32 if num_rows <= np.iinfo(np.int32).max else np.int64)


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """An integer type as torch has it."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def position_array(segment: Segment, num_rows: int) -> np.ndarray:
    """The positions kept in a segment."""
    return segment.array(position_dtype(num_rows), (num_rows,))


def position_tensor(segment: Segment, num_rows: int) -> torch.Tensor:
    """The positions kept in a segment, without a copy."""
    return torch.from_numpy(position_array(segment, num_rows))


def _host_start(plan: TablePlan) -> int:
    """The first position from which on all rows in memory are in the host's; -1 if none are."""
    start = -1
    for tier in reversed(plan.tiers):
        if tier.memory == "gpu":
            break
        if tier.memory == "host":
            start = tier.start
    return start


def _tier_tensor(plan: TablePlan) -> torch.Tensor:
    rows, first = [], 0
    for tier in plan.tiers:
        rows.append((tier.start, tier.stop, tier.parts, first))
        first += tier.parts
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)

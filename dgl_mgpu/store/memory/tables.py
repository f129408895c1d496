"""The store: all tables of a data set, once on the machine, which all of its ranks read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import Runtime, out_of_memory
from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.ops import workspace
from dgl_mgpu.placement import Plan, TablePlan
from dgl_mgpu.store.memory.device import (
    DeviceMemory,
    DeviceSegment,
    UploadChannel,
    UploadTarget,
    sweep,
)
from dgl_mgpu.store.memory.format import (
    CSCWriter,
    EdgeIds,
    FeatureSource,
    RowWriter,
    Source,
    Target,
    TopologySource,
    local_rows,
)
from dgl_mgpu.store.memory.layout import ShardKey, StoreLayout, all_shards, read_shards
from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.store.memory.staging import STAGING_BYTES
from dgl_mgpu.store.memory.table import Table, position_array, position_dtype, position_tensor

_BUILD, _ALLOCATE = "build the store", "allocate the store"


@dataclass(frozen=True)
class Blueprint:
    """The data of a store and the memory that each part goes to."""

    sources: Mapping[str, Source]  # by table
    #: For each order that a source names, row ids by position: of all rows, or of those that are
    #: kept here, while the others are on other machines and have position -1.
    orders: Mapping[str, np.ndarray]
    plan: Plan  # of one table for every source, for as many GPUs as there are ranks
    disk_path: Path | None = None  # folder for what the plan keeps on disk
    staging_memory: int = STAGING_BYTES  # bytes of each GPU that cache rows on disk, if any are

    def rows_kept(self, table: str) -> int:
        """How many rows of a table are kept here."""
        source = self.sources[table]
        return len(self.orders[source.position]) if source.position else source.num_rows


@dataclass(frozen=True)
class Store:
    """Mapped tables by name (XGNN's global GNN memory store, section 4)."""

    tables: dict[str, Table]
    layout: StoreLayout
    rank: int  # of this process, among the ``num_ranks`` that share the store
    num_ranks: int
    device: torch.device = field(default=torch.device("cpu"))  # where operators on tables run
    gpu: DeviceMemory | None = None  # of this rank; None where all is in shared memory or files

    @property
    def plan(self) -> Plan:
        """Where every row is."""
        return self.layout.plan

    def close(self) -> None:
        """Give all memory back; what was read stays, the tables can no longer be read.

        A view taken before, and whatever was made of it, holds on to shared memory but not to
        that of GPUs: there it must not be used any more.

        Every rank calls it, for a GPU's memory is freed once no other rank maps it; ranks wait
        for each other for some seconds.  What is not closed goes back when nothing refers to
        it any more, or with the process.  A fork of the process has nothing to give back.
        """
        for table in self.tables.values():
            table.close()
        if self.gpu is None or not self.gpu.is_mine:
            return
        try:
            self.gpu.runtime.synchronize()
            workspace.release()
        finally:
            self.gpu.close()


class RankMemory:
    """One rank's part of a store's memory, while the store is built.

    Without a ``runtime``, the plan's GPU memory is shared memory.  With ``joined``
    machines that NVLink joins can map that of GPUs.
    """

    def __init__(
        self,
        layout: StoreLayout,
        ranks: Communicator,
        runtime: Runtime | None,
        joined: bool = False,
    ) -> None:
        self._layout = layout
        self._joined = joined
        self._ranks = ranks
        self._runtime = runtime
        self._files: dict[ShardKey, Segment] = {}
        self._paths: dict[ShardKey, Path] = {}
        self._handles: list[bytes] = []
        self._shared: tuple[Segment, ...] = ()
        self._window: Segment | None = None
        #: Owns the GPU memory; None for shared memory.
        self.gpu: DeviceMemory | None = None

    def make(self) -> None:
        """Create this rank's segments, empty, and learn where the others' are.

        Collective.  Raises SharedMemoryError or DeviceMemoryError, and RankFailedError if another
        rank failed.
        """
        self._require_gpu_memory()
        own = self._ranks.run_all(_ALLOCATE, self._make_files)
        self._files.update(own)
        all_paths = self._ranks.all_gather({key: file.path for key, file in own.items()})
        self._paths = {key: path for paths in all_paths for key, path in paths.items()}
        if self._runtime is not None:
            shared = self._ranks.broadcast_from_rank0(_ALLOCATE, self._make_shared)
            handle = self._ranks.run_all(
                _ALLOCATE, partial(self._make_block, self._runtime, *shared)
            )
            self._handles = self._ranks.all_gather(handle)

    def fill(self, write: Callable[[Callable[[ShardKey], Target]], None] | None) -> None:
        """Call ``write`` on the first rank, with a function that returns the target of a shard.

        Collective; the other ranks pass None.
        """
        if self._runtime is None:
            if write is not None:
                write(self.file)
            return
        assert self.gpu is not None and self._window is not None
        channel = UploadChannel(self._ranks, self._runtime, self._window, self.gpu.block)

        def target(key: ShardKey) -> Target:
            rank = self._layout.gpu_of(key)
            if rank is None:
                return self.file(key)
            return UploadTarget(channel, rank, self._layout.offsets[key])

        channel.run(partial(write, target) if write is not None else None)
        self.gpu.unregister(self._window)
        self._window, self._shared = None, ()

    def file(self, key: ShardKey) -> Segment:
        """A segment in shared memory or on disk."""
        if key not in self._files:
            self._files[key] = Segment.attach(self._paths[key], self._layout.nbytes[key])
        return self._files[key]

    def map(self, key: ShardKey) -> Segment | DeviceSegment:
        """A segment for this rank's operators to read."""
        rank = self._layout.gpu_of(key)
        if rank is None:
            segment = self.file(key)
            # Pages of a file cannot be pinned without reading all of it into memory.
            if self.gpu is not None and not self._layout.is_on_disk(key):
                self.gpu.register(segment)
            return segment
        assert self.gpu is not None and self._runtime is not None
        nbytes = self._layout.nbytes[key]
        if nbytes == 0:  # its rank may have no block
            return DeviceSegment(self._runtime, 0, 0)
        mine = rank == self._ranks.rank
        base = self.gpu.block if mine else self.gpu.open(self._handles[rank])
        return DeviceSegment(self._runtime, base + self._layout.offsets[key], nbytes)

    def positions(self, order: str, num_rows: int) -> Segment | torch.Tensor:
        """The positions of an order: shared, or copied to the GPU."""
        segment = self.file((order, None))
        if self._runtime is None:
            return segment
        return position_tensor(segment, num_rows).to(self._runtime.device)

    def release(self) -> None:
        """Give everything back."""
        self._files.clear()
        self._window, self._shared = None, ()
        if self.gpu is not None:
            self.gpu.close()

    def _require_gpu_memory(self) -> None:
        """Raise on every rank unless all GPUs have enough memory, before anything is allocated."""
        if self._runtime is None:
            return
        # All ranks are here, so blocks of closed stores can be freed.
        self._ranks.run_all(_ALLOCATE, sweep)
        own_gpu = self._ranks.run_all(_ALLOCATE, self._runtime.device_info)
        own_bytes = self._layout.gpu_bytes(self._ranks.rank)
        needed: Counter[str] = Counter()
        free: dict[str, int] = {}
        for device_info, nbytes in self._ranks.all_gather((own_gpu, own_bytes)):
            needed[device_info.gpu] += nbytes
            free[device_info.gpu] = min(
                device_info.free, free.get(device_info.gpu, device_info.free)
            )
        for gpu, nbytes in needed.items():
            if nbytes > free[gpu]:
                raise out_of_memory(f"GPU {gpu}", nbytes, free[gpu])

    def _make_files(self) -> dict[ShardKey, Segment]:
        layout = self._layout
        return {
            key: Segment.create(layout.nbytes[key], layout.folder_of(key))
            for key in layout.files_of(self._ranks.rank)
        }

    def _make_shared(self) -> tuple[Path, Path]:
        # Kept until all ranks have mapped them.
        self._shared = (
            Segment.create(8 * self._ranks.size),
            Segment.create(UploadChannel.window_bytes),
        )
        return self._shared[0].path, self._shared[1].path

    def _make_block(self, runtime: Runtime, ref_counts: Path, window: Path) -> bytes:
        self.gpu = DeviceMemory(
            runtime, Segment.attach(ref_counts, 8 * self._ranks.size), self._ranks.rank
        )
        self._window = Segment.attach(window, UploadChannel.window_bytes)
        self.gpu.register(self._window)
        nbytes = self._layout.block_bytes(self._ranks.rank)
        if nbytes:
            self.gpu.allocate(nbytes, self._joined)
        return self.gpu.share() if self._layout.is_shared(self._ranks.rank) else b""


def build(
    blueprint: Blueprint | None,
    ranks: Communicator,
    runtime: Runtime | None = None,
    *,
    over_machines: bool = False,
    joined: bool = False,
) -> Store:
    """Allocate and fill the tables of a blueprint, and map them on every rank.

    Collective.  The machine's first rank has the data, reads it once and passes it on chunk by
    chunk; the others, whose ``blueprint`` is ignored, allocate their shards.  Without a ``runtime``
    of each rank's GPU, the plan's GPU memory is shared memory.  ``over_machines`` says that
    other machines have stores of the same data, and ``joined`` that they can map GPUs' memory.

    Raises InvalidInputError if the plan is not one for these sources and ranks; ConfigError if it
    keeps topology of a store on GPUs on disk; SharedMemoryError or DeviceMemoryError, before
    anything is allocated, if a folder or a GPU has too little room; PeerAccessError if a rank
    cannot map memory that the plan has it read; RankFailedError if another rank failed.
    """
    on_gpus = runtime is not None
    filler = ranks.run_all(_BUILD, lambda: _filler(blueprint, ranks, on_gpus, over_machines))
    layout = ranks.broadcast_from_rank0(_BUILD, lambda: _checked_layout(filler))
    memory = RankMemory(layout, ranks, runtime, joined)
    try:
        memory.make()
        write = partial(filler.fill, memory) if filler is not None else None
        ranks.run_all(_BUILD, lambda: memory.fill(write))
        # No rank may end before all others have mapped its memory.
        tables = ranks.run_all(_BUILD, lambda: _map_tables(layout, ranks.rank, memory))
    except BaseException:
        memory.release()
        raise
    device = torch.device("cpu") if runtime is None else runtime.device
    return Store(tables, layout, ranks.rank, ranks.size, device, memory.gpu)


def _host_share(plan: Plan, table: str) -> float:
    """The share of a table's reads that goes to host memory; 1 if no reads are expected."""
    rates = plan.hit_rates.get(table, {})
    return rates.get("host", 0.0) if any(rates.values()) else 1.0


def _map_tables(layout: StoreLayout, rank: int, memory: RankMemory) -> dict[str, Table]:
    """Map what ``rank`` reads."""
    plans = layout.plan.tables
    positions = {
        order: memory.positions(order, layout.formats[name].num_rows)
        for name, order in layout.orders.items()
        if order
    }
    return {
        name: Table(
            format,
            plans[name],
            rank,
            [memory.map((name, shard)) for shard in read_shards(plans[name], rank)],
            positions.get(layout.orders[name]),
            memory.gpu,
            layout.staging.get(name, 0),
            _host_share(layout.plan, name),
        )
        for name, format in layout.formats.items()
    }


def _filler(
    blueprint: Blueprint | None, ranks: Communicator, on_gpus: bool, over_machines: bool
) -> _Filler | None:
    if ranks.rank != 0:
        return None
    if blueprint is None:
        raise InvalidInputError(
            _BUILD, "the machine's first rank passed no data", "pass the data on that rank"
        )
    return _Filler(blueprint, ranks.size, on_gpus, over_machines)


def _checked_layout(filler: _Filler | None) -> StoreLayout:
    assert filler is not None  # the first rank has one
    filler.layout.require_room()
    return filler.layout


class _Filler:
    """Writes a blueprint's data into segments, on the machine's first rank."""

    def __init__(
        self, blueprint: Blueprint, num_ranks: int, on_gpus: bool, over_machines: bool
    ) -> None:
        _check(blueprint, num_ranks, on_gpus)
        plans = {name: blueprint.plan.tables[name] for name in blueprint.sources}
        # An order of all rows matters only with several tiers: all rows of a tier are equally fast
        # to read.
        order_of = {
            name: source.position
            if len(plans[name].tiers) > 1 or blueprint.rows_kept(name) < source.num_rows
            else ""
            for name, source in blueprint.sources.items()
        }
        self._orders = {name: blueprint.orders[name] for name in set(order_of.values()) if name}
        #: Rows of each order's tables, wherever they are.
        self._num_rows = {
            order: blueprint.sources[name].num_rows for name, order in order_of.items() if order
        }
        self._writers = {
            name: _writer(source, plans[name], self._orders.get(order_of[name]), over_machines)
            for name, source in blueprint.sources.items()
        }
        self._positions = {
            (name, shard): local_rows(plan.tiers[shard.tier], shard.part)
            for name, plan in plans.items()
            for shard in all_shards(plan)
        }
        nbytes: dict[ShardKey, int] = {
            key: self._writers[key[0]].nbytes(rows) for key, rows in self._positions.items()
        }
        for name, num_rows in self._num_rows.items():
            nbytes[name, None] = position_dtype(num_rows).itemsize * num_rows
        formats = {name: writer.format for name, writer in self._writers.items()}
        self.layout = StoreLayout(
            blueprint.plan,
            formats,
            order_of,
            nbytes,
            blueprint.disk_path,
            on_gpus,
            blueprint.staging_memory,
        )

    def fill(self, memory: RankMemory, target: Callable[[ShardKey], Target]) -> None:
        """Write every shard to its target, and the positions to their files."""
        for (name, shard), rows in self._positions.items():
            self._writers[name].fill(target((name, shard)), rows)
        for name, order in self._orders.items():
            position = position_array(memory.file((name, None)), self._num_rows[name])
            if len(order) < len(position):
                position.fill(-1)
            position[order] = np.arange(len(order), dtype=position.dtype)


def _writer(
    source: Source, plan: TablePlan, order: np.ndarray | None, over_machines: bool
) -> RowWriter | CSCWriter:
    if isinstance(source, FeatureSource):
        return RowWriter(source, order)
    if source.eids is not None:
        return CSCWriter(source, order, EdgeIds.STORED)
    in_order = order is None and len(plan.tiers) == 1 and plan.tiers[0].parts == 1
    in_order &= not over_machines  # which have ids alike, and not all of them all edges
    return CSCWriter(source, order, EdgeIds.POSITIONS if in_order else EdgeIds.FIRST)


def _check(blueprint: Blueprint, num_ranks: int, on_gpus: bool) -> None:
    for name, source in blueprint.sources.items():
        table = blueprint.plan.tables.get(name)
        covered = table.tiers[-1].stop if table is not None and table.tiers else 0
        num_rows = blueprint.rows_kept(name)
        if table is None or covered != num_rows:
            raise InvalidInputError(
                f"place table '{name}' of {num_rows} rows",
                "the plan has no such table" if table is None else f"the plan covers {covered}",
                "solve the plan for the data that is stored",
            )
        for tier in table.tiers:
            if tier.memory == "gpu" and len(tier.source) != num_ranks:
                raise InvalidInputError(
                    f"place table '{name}' for {num_ranks} ranks",
                    f"the plan is for {len(tier.source)} ranks",
                    "solve the plan for as many GPUs as there are ranks",
                )
            if tier.memory == "disk" and blueprint.disk_path is None:
                raise InvalidInputError(
                    f"place part of table '{name}' on disk",
                    "there is no folder for it",
                    "pass disk_path (store.disk_path)",
                )
            if tier.memory == "disk" and on_gpus and isinstance(source, TopologySource):
                raise ConfigError(
                    f"place part of table '{name}' on disk in a store on GPUs",
                    "the kernels that sample read GPU and host memory only",
                    "raise store.host_memory or store.gpu_memory, or use store.device=cpu",
                )

"""The shards of a store, their sizes and the memory that each is in, as every rank knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dgl_mgpu.machine.shared_memory import SHARED_MEMORY
from dgl_mgpu.placement import HOST, Plan, TablePlan
from dgl_mgpu.store.memory.format import TableFormat, aligned
from dgl_mgpu.store.memory.segment import require_room


@dataclass(frozen=True)
class Shard:
    """Part ``part`` of tier ``tier`` of a table, in the memory of GPU ``holder``.

    What lies in host memory or on disk has holder ``HOST`` and is made by the first rank.
    """

    tier: int
    part: int
    holder: int

    @property
    def maker(self) -> int:
        """The rank that creates it."""
        return 0 if self.holder == HOST else self.holder


def all_shards(plan: TablePlan) -> Iterator[Shard]:
    """Every shard of a table, in an order that all ranks agree on."""
    for index, tier in enumerate(plan.tiers):
        for part in range(tier.parts):
            for holder in tier.copies[part] if tier.memory == "gpu" else ():
                yield Shard(index, part, holder)
            # Also of a GPU's tier, where some other GPU reaches no copy.
            if tier.memory == "disk" or tier.on_host(part):
                yield Shard(index, part, HOST)


def read_shards(plan: TablePlan, rank: int) -> Iterator[Shard]:
    """The shards that ``rank`` reads, one for every tier and part, in pointer order."""
    for index, tier in enumerate(plan.tiers):
        for part in range(tier.parts):
            yield Shard(index, part, tier.source[rank][part] if tier.memory == "gpu" else HOST)


#: A table's name and a shard of it, or an order's name and None: the positions of the order.
ShardKey = tuple[str, Shard | None]


@dataclass(frozen=True)
class StoreLayout:
    """What a rank needs to allocate and map its part of a store."""

    plan: Plan
    formats: dict[str, TableFormat]
    orders: dict[str, str]  # by table, the order in which rows are kept; '' for that of their ids
    nbytes: dict[ShardKey, int]  # every shard and its size, in an order that all ranks agree on
    disk_path: Path | None
    on_gpus: bool  # whether the plan's GPU memory is on GPUs; otherwise it is shared memory
    staging_memory: int  # bytes of each GPU that may cache rows on disk

    def gpu_of(self, key: ShardKey) -> int | None:
        """The rank whose GPU has a shard; None for host memory and disk."""
        shard = key[1]
        return shard.holder if self.on_gpus and shard is not None and shard.holder != HOST else None

    def folder_of(self, key: ShardKey) -> Path:
        """The folder of the file of a shard that is not on a GPU."""
        if self.disk_path is not None and self.is_on_disk(key):
            return self.disk_path
        return SHARED_MEMORY

    def is_on_disk(self, key: ShardKey) -> bool:
        """Whether a shard is a file on disk."""
        name, shard = key
        return shard is not None and self.plan.tables[name].tiers[shard.tier].memory == "disk"

    @cached_property
    def staging(self) -> dict[str, int]:
        """By table, bytes of each GPU that cache its rows on disk, in proportion to their size."""
        on_disk: Counter[str] = Counter()
        for key, nbytes in self.nbytes.items():
            if self.on_gpus and self.is_on_disk(key):
                on_disk[key[0]] += nbytes
        return {
            name: self.staging_memory * nbytes // on_disk.total()
            for name, nbytes in on_disk.items()
            if nbytes
        }

    def files_of(self, rank: int) -> list[ShardKey]:
        """The shards that ``rank`` creates as files."""
        return [
            key
            for key in self.nbytes
            if self.gpu_of(key) is None and rank == (key[1].maker if key[1] is not None else 0)
        ]

    @cached_property
    def offsets(self) -> dict[ShardKey, int]:
        """Offset of each shard on a GPU in its rank's block."""
        return self._blocks[0]

    def copies(self, table: str, tier: int) -> list[list[tuple[int, int, int]]]:
        """Of each part of a tier on GPUs, all copies: the rank that holds it, its offset in the
        rank's block, and its bytes."""
        return [
            [
                (holder, self.offsets[key], self.nbytes[key])
                for holder in holders
                for key in [(table, Shard(tier, part, holder))]
            ]
            for part, holders in enumerate(self.plan.tables[table].tiers[tier].copies)
        ]

    def block_bytes(self, rank: int) -> int:
        """Size of the block of GPU memory that ``rank`` holds."""
        return self._blocks[1][rank]

    def gpu_bytes(self, rank: int) -> int:
        """GPU memory that ``rank`` needs: its block, the orders and the caches of rows on disk."""
        orders = sum(nbytes for (_, shard), nbytes in self.nbytes.items() if shard is None)
        return self.block_bytes(rank) + orders + sum(self.staging.values())

    def is_shared(self, rank: int) -> bool:
        """Whether another rank reads from the block of ``rank``."""
        return self.block_bytes(rank) > 0 and any(
            rank in holders
            for name in self.formats
            for tier in self.plan.tables[name].tiers
            if tier.memory == "gpu"
            for reader, holders in enumerate(tier.source)
            if reader != rank
        )

    @cached_property
    def _blocks(self) -> tuple[dict[ShardKey, int], Counter[int]]:
        offsets: dict[ShardKey, int] = {}
        ends: Counter[int] = Counter()
        for key, nbytes in self.nbytes.items():
            rank = self.gpu_of(key)
            if rank is not None:
                offsets[key] = ends[rank]
                ends[rank] += aligned(nbytes)
        return offsets, ends

    def require_room(self) -> None:
        """Raise SharedMemoryError unless every folder has enough free space for its files."""
        needed: Counter[Path] = Counter()
        for key, nbytes in self.nbytes.items():
            if self.gpu_of(key) is None:
                needed[self.folder_of(key)] += nbytes
        for folder, nbytes in needed.items():
            require_room(nbytes, folder)

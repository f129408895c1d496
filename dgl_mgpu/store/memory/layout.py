"""Which pieces there are, how large, and in whose memory: what every rank knows of a store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dgl_mgpu.machine.shared_memory import SHARED_MEMORY
from dgl_mgpu.placement import HOST, Plan
from dgl_mgpu.store.memory.format import TableFormat, aligned
from dgl_mgpu.store.memory.segment import require_room
from dgl_mgpu.store.memory.table import Shard

#: A piece of a table by the table's name, or (with None) the positions of an order by its.
PieceKey = tuple[str, Shard | None]


@dataclass(frozen=True)
class Layout:
    """What a rank needs to know to make and map its part.

    Attributes
    ----------
    plan : Plan
    formats : dict of str to TableFormat
    orders : dict of str to str
        By table, the name of the order its rows are kept in; '' for the order of their ids.
    nbytes : dict of PieceKey to int
        Every piece and its size, in an order that all ranks agree on.
    disk_path : Path or None
    on_gpus : bool
        Whether what the plan calls GPU memory is that, or shared memory.
    staging_memory : int
        Bytes of each GPU that may cache rows on disk.
    """

    plan: Plan
    formats: dict[str, TableFormat]
    orders: dict[str, str]
    nbytes: dict[PieceKey, int]
    disk_path: Path | None
    on_gpus: bool
    staging_memory: int

    def gpu_of(self, key: PieceKey) -> int | None:
        """The rank on whose GPU a piece lies; None for host memory and disk."""
        piece = key[1]
        return piece.holder if self.on_gpus and piece is not None and piece.holder != HOST else None

    def folder_of(self, key: PieceKey) -> Path:
        """Where the file lies that a piece off the GPUs is."""
        if self.disk_path is not None and self.is_on_disk(key):
            return self.disk_path
        return SHARED_MEMORY

    def is_on_disk(self, key: PieceKey) -> bool:
        """Whether a piece is a file on disk."""
        name, piece = key
        return piece is not None and self.plan.tables[name].tiers[piece.tier].memory == "disk"

    @cached_property
    def staging(self) -> dict[str, int]:
        """Bytes of each GPU that cache a table's rows on disk: as its share of all on disk."""
        on_disk: Counter[str] = Counter()
        for key, nbytes in self.nbytes.items():
            if self.on_gpus and self.is_on_disk(key):
                on_disk[key[0]] += nbytes
        return {
            name: self.staging_memory * nbytes // on_disk.total()
            for name, nbytes in on_disk.items()
            if nbytes
        }

    def files_of(self, rank: int) -> list[PieceKey]:
        """The pieces off the GPUs that ``rank`` makes."""
        return [
            key
            for key in self.nbytes
            if self.gpu_of(key) is None and rank == (key[1].maker if key[1] is not None else 0)
        ]

    @cached_property
    def offsets(self) -> dict[PieceKey, int]:
        """Where in its rank's block a piece on a GPU begins."""
        return self._blocks[0]

    def block_bytes(self, rank: int) -> int:
        """Size of the block of GPU memory that ``rank`` holds."""
        return self._blocks[1][rank]

    def gpu_bytes(self, rank: int) -> int:
        """What ``rank`` takes of its GPU: its block, the orders and the caches of rows on disk."""
        orders = sum(nbytes for (_, piece), nbytes in self.nbytes.items() if piece is None)
        return self.block_bytes(rank) + orders + sum(self.staging.values())

    def is_shared(self, rank: int) -> bool:
        """Whether another rank reads some of the block that ``rank`` holds."""
        return self.block_bytes(rank) > 0 and any(
            rank in holders
            for name in self.formats
            for tier in self.plan.tables[name].tiers
            if tier.memory == "gpu"
            for reader, holders in enumerate(tier.source)
            if reader != rank
        )

    @cached_property
    def _blocks(self) -> tuple[dict[PieceKey, int], Counter[int]]:
        offsets: dict[PieceKey, int] = {}
        ends: Counter[int] = Counter()
        for key, nbytes in self.nbytes.items():
            rank = self.gpu_of(key)
            if rank is not None:
                offsets[key] = ends[rank]
                ends[rank] += aligned(nbytes)
        return offsets, ends

    def require_room(self) -> None:
        """Raise unless every folder can take what is to be placed in it.

        Raises
        ------
        SharedMemoryError
        """
        need: Counter[Path] = Counter()
        for key, nbytes in self.nbytes.items():
            if self.gpu_of(key) is None:
                need[self.folder_of(key)] += nbytes
        for folder, nbytes in need.items():
            require_room(nbytes, folder)

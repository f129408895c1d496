"""One rank's segments of a store, allocated and mapped in shared memory or on GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dgl_mgpu.comm.communicator import Communicator, error_text, rank_failed
from dgl_mgpu.comm.cuda_runtime import Runtime, out_of_memory
from dgl_mgpu.store.memory.device import DeviceMemory, DeviceSegment, sweep
from dgl_mgpu.store.memory.format import Target
from dgl_mgpu.store.memory.layout import ShardKey, StoreLayout
from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.store.memory.table import position_tensor

_ALLOCATE = "allocate the store"
# Two parts for other ranks' data, used in turn, and one for the first rank's own.
_PART_BYTES = 16 << 20
_OWN = 2

#: Rank, offset in its block, number of bytes and part of the window; None at the end.
_Order = tuple[int, int, int, int] | None


class UploadChannel:
    """Uploads data that the first rank reads into every rank's GPU memory.

    The first rank copies a run of bytes into a window in shared memory, which is registered with
    every GPU, and announces the rank that they are for.  That rank uploads them while the first
    rank fills the other half of the window.  So every rank writes to its own GPU only, each byte
    crosses the bus once, and the window is all the memory that this takes, for any number of ranks.

    ``window`` has :attr:`window_bytes`, and ``block`` is the address of this rank's own block.
    """

    window_bytes = 3 * _PART_BYTES

    def __init__(self, ranks: Communicator, runtime: Runtime, window: Segment, block: int) -> None:
        self._ranks = ranks
        self._runtime = runtime
        self._block = block
        self._parts = window.array(np.uint8, (3, _PART_BYTES))
        self._turn = 0
        self._failed = False

    def run(self, fill: Callable[[], None] | None) -> None:
        """Call ``fill``, which writes to targets, on the first rank; upload for it on the others.

        Collective; raises on every rank when an upload fails on one.
        """
        if fill is None:
            return self._serve()
        try:
            fill()
        finally:
            if not self._failed:
                self._exchange(None)

    def write(self, rank: int, offset: int, data: np.ndarray) -> None:
        """Copy an array's bytes to ``offset`` of a rank's block."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        for begin in range(0, len(flat), _PART_BYTES):
            run = flat[begin : begin + _PART_BYTES]
            part = _OWN if rank == 0 else self._turn
            self._parts[part, : len(run)] = run
            if rank == 0:
                self._upload(offset + begin, len(run), part)
            else:
                # A rank comes to this exchange once it has uploaded the previous run, so the other
                # part of the window is free then.
                self._exchange((rank, offset + begin, len(run), part))
                self._turn = 1 - self._turn

    def _serve(self) -> None:
        failure: Exception | None = None
        while order := self._exchange(None, failure):
            rank, offset, nbytes, part = order
            if rank == self._ranks.rank:
                try:
                    self._upload(offset, nbytes, part)
                except Exception as error:
                    failure = error

    def _exchange(self, order: _Order, failure: Exception | None = None) -> _Order:
        """Send the first rank's order and every rank's failure; raise if there is one."""
        reason = "" if failure is None else error_text(failure)
        exchanged = self._ranks.all_gather((order, reason))
        for rank, (_, rank_reason) in enumerate(exchanged):
            if rank_reason:
                self._failed = True
                raise failure or rank_failed("fill GPU memory", rank, rank_reason)
        return exchanged[0][0]

    def _upload(self, offset: int, nbytes: int, part: int) -> None:
        self._runtime.upload(self._block + offset, self._parts[part, :nbytes])


@dataclass(frozen=True)
class UploadTarget:
    """Memory at ``offset`` of a rank's block, for the first rank to write to."""

    channel: UploadChannel
    rank: int
    offset: int

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy an array's bytes to ``offset``."""
        self.channel.write(self.rank, self.offset + offset, data)


class RankMemory:
    """One rank's part of a store's memory, while the store is built.

    Without a ``runtime``, the plan's GPU memory is shared memory.
    """

    def __init__(self, layout: StoreLayout, ranks: Communicator, runtime: Runtime | None) -> None:
        self._layout = layout
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
            self.gpu.allocate(nbytes)
        return self.gpu.share() if self._layout.is_shared(self._ranks.rank) else b""

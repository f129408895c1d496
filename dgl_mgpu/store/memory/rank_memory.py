"""One rank's segments of a store, allocated and mapped in shared memory or on GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import Runtime, out_of_memory
from dgl_mgpu.store.memory.device import DeviceMemory, DeviceSegment, sweep
from dgl_mgpu.store.memory.format import Target
from dgl_mgpu.store.memory.layout import ShardKey, StoreLayout
from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.store.memory.table import position_tensor
from dgl_mgpu.store.memory.upload import UploadChannel

_ALLOCATE = "allocate the store"


class RankMemory:
    """One rank's part of a store's memory, while the store is built.

    ``runtime``: of the GPU for the plan's GPU memory; None for shared memory.
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

        Collective.

        Raises SharedMemoryError, DeviceMemoryError.  Raises RankFailedError if another rank failed.
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
            return channel.target(rank, self._layout.offsets[key])

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

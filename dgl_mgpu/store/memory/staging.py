"""Rows on disk for a store on GPUs: the CPU reads them, and GPU memory caches some.

A kernel cannot read a file.  Rows that a gather's kernel finds neither in memory nor in the cache
are read by the CPU from the mapped file, in the order of the file, into pinned memory.  From there
each row is copied to its rows of the output and to its slot of the cache, which is direct-mapped:
the last row of a slot stays.  The cache holds copies only: it affects the speed of a gather, not
its result.
"""

from __future__ import annotations

import threading

import torch

from dgl_mgpu.comm.cuda_runtime import out_of_memory
from dgl_mgpu.ops import gather_rows
from dgl_mgpu.ops.view import RowView, as_words

#: Bytes of each GPU that cache rows on disk, by default.
STAGING_BYTES = 256 << 20

# Pinned memory, twice: one half is filled while the GPU copies the other.
_CHUNK_BYTES = 8 << 20


class StagedRows:
    """One table's rows on disk and their cache on one GPU: a :class:`~dgl_mgpu.ops.view.DiskRows`.

    ``disk`` has the rows by position, at addresses of this process; only the ``num_rows`` on disk
    are read.  The cache takes ``nbytes`` of the GPU's memory, or raises DeviceMemoryError.
    """

    def __init__(self, disk: RowView, num_rows: int, nbytes: int, device: torch.device) -> None:
        row_bytes = disk.row_bytes
        # A slot's tag takes 8 bytes.  The row after the last slot takes the rows that do not stay.
        slots = min(max(1, nbytes // (row_bytes + 8) - 1), num_rows)
        self.lock = threading.Lock()
        try:
            self.tags = torch.full((slots,), -1, dtype=torch.int64, device=device)
            self.cache = torch.empty((slots + 1, row_bytes), dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(device)[0]
            raise out_of_memory(str(device), slots * (row_bytes + 8), free) from error
        self._disk = disk
        self._device = device
        self._chunk_rows = min(max(1, _CHUNK_BYTES // row_bytes), num_rows)
        self._pinned: list[torch.Tensor] = []

    def fetch(self, out: torch.Tensor, miss_positions: torch.Tensor) -> None:
        """Read the rows that a gather missed from disk, into its output and into the cache.

        Waits for the GPU, so that no kernel uses the cache when the lock is released.  For each row
        of ``out``, shape (n, *row_shape), ``miss_positions``, int64, shape (n,), has its position
        if it was missed, or a negative number.
        """
        out_rows = (miss_positions >= 0).nonzero().flatten()
        if out_rows.numel() == 0:
            return
        positions, order = miss_positions[out_rows].sort()
        try:
            self._read(out, out_rows[order], positions)
        except BaseException:
            # Tags of rows that were not read may be set.
            self.tags.fill_(-1)
            raise
        finally:
            self._wait()

    def _read(self, out: torch.Tensor, out_rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Read the rows at ``positions``, in ascending order, into ``out_rows`` of ``out``."""
        rows, inverse, counts = positions.unique_consecutive(
            return_inverse=True, return_counts=True
        )
        chunk_ends = counts.cumsum(0)[self._chunk_rows - 1 :: self._chunk_rows].tolist()
        ends = [0, *chunk_ends, len(inverse)]
        for turn, part in enumerate(rows.cpu().split(self._chunk_rows)):
            begin = turn * self._chunk_rows
            read = gather_rows(self._disk, part, self._pinned_rows(turn % 2, len(part)))
            self._wait()  # for the copies from the other half, which the next turn fills
            staged = as_words(read).to(self._device, non_blocking=True)
            chunk = slice(ends[turn], ends[turn + 1])
            values = staged[inverse[chunk] - begin]
            if out.dtype != self._disk.dtype:
                values = values.view(self._disk.dtype).to(out.dtype)
            words = as_words(out)
            words.index_copy_(0, out_rows[chunk], values.view(words.dtype))
            self._cache_rows(rows[begin : begin + len(part)], staged)

    def _cache_rows(self, rows: torch.Tensor, staged: torch.Tensor) -> None:
        """Put distinct rows into their slots; of rows that share a slot one stays."""
        num_slots = len(self.tags)
        slots = rows % num_slots
        self.tags[slots] = rows
        stays = self.tags[slots] == rows
        as_words(self.cache).index_copy_(0, torch.where(stays, slots, num_slots), staged)

    def _pinned_rows(self, half: int, count: int) -> torch.Tensor:
        if not self._pinned:
            shape = (self._chunk_rows, *self._disk.row_shape)
            on_gpu = self._device.type == "cuda"
            self._pinned = [
                torch.empty(shape, dtype=self._disk.dtype, pin_memory=on_gpu) for _ in range(2)
            ]
        return self._pinned[half][:count]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

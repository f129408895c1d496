"""Rows on disk, for a store on GPUs: the CPU reads them, and GPU memory keeps some.

A kernel cannot read a file.  What a gather's kernel finds neither in memory nor in the cache, the
CPU reads from the mapped file, in the order in which it lies there, into pinned memory.  From there
each row goes to its places in the output and to its slot of the cache, which is direct-mapped:
the row that comes last stays.  The cache holds copies only, so what is in it decides how fast a
gather is and nothing else.
"""

from __future__ import annotations

import threading

import torch

from dgl_mgpu.comm.cuda_runtime import out_of_memory
from dgl_mgpu.ops import gather_rows
from dgl_mgpu.ops.view import RowView, as_words

#: Bytes of each GPU that cache rows on disk, where nothing else is asked for.
STAGING_BYTES = 256 << 20

# Pinned memory, twice: one half is filled while the GPU copies the other.
_CHUNK_BYTES = 8 << 20


class StagedRows:
    """One table's rows on disk and their cache on one GPU: a :class:`~dgl_mgpu.ops.view.DiskRows`.

    Parameters
    ----------
    disk : RowView
        The rows by position, at addresses of this process; only those on disk are read.
    num_rows : int
        Rows on disk.
    nbytes : int
        Of the GPU's memory.
    where : torch.device

    Raises
    ------
    DeviceMemoryError
        If the GPU has too little room.
    """

    def __init__(self, disk: RowView, num_rows: int, nbytes: int, where: torch.device) -> None:
        row_bytes = disk.row_bytes
        # A slot's tag is 8 bytes; one row more is where rows go that do not stay.
        slots = min(max(1, nbytes // (row_bytes + 8) - 1), num_rows)
        self.lock = threading.Lock()
        try:
            self.tags = torch.full((slots,), -1, dtype=torch.int64, device=where)
            self.cache = torch.empty((slots + 1, row_bytes), dtype=torch.uint8, device=where)
        except torch.cuda.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(where)[0]
            raise out_of_memory(str(where), slots * (row_bytes + 8), free) from error
        self._disk = disk
        self._where = where
        self._chunk_rows = min(max(1, _CHUNK_BYTES // row_bytes), num_rows)
        self._pinned: list[torch.Tensor] = []

    def fetch(self, out: torch.Tensor, aside: torch.Tensor) -> None:
        """Read rows from disk into their places of a gather's output, and into the cache.

        Waits for the GPU: whoever takes the lock next finds a cache that no kernel works on.
        """
        places = (aside >= 0).nonzero().flatten()
        if places.numel() == 0:
            return
        wanted, order = aside[places].sort()
        try:
            self._read(out, places[order], wanted)
        except BaseException:
            # There may be tags of rows that have not come.
            self.tags.fill_(-1)
            raise
        finally:
            self._wait()

    def _read(self, out: torch.Tensor, places: torch.Tensor, wanted: torch.Tensor) -> None:
        """Read the positions ``wanted``, in ascending order, into ``places`` of ``out``."""
        rows, which, counts = wanted.unique_consecutive(return_inverse=True, return_counts=True)
        ends = [0, *counts.cumsum(0)[self._chunk_rows - 1 :: self._chunk_rows].tolist(), len(which)]
        for turn, part in enumerate(rows.cpu().split(self._chunk_rows)):
            begin = turn * self._chunk_rows
            read = gather_rows(self._disk, part, self._pinned_rows(turn % 2, len(part)))
            self._wait()  # for the copies from the other half, which the next turn fills
            staged = as_words(read).to(self._where, non_blocking=True)
            served = slice(ends[turn], ends[turn + 1])
            found = staged[which[served] - begin]
            if out.dtype != self._disk.dtype:
                found = found.view(self._disk.dtype).to(out.dtype)
            words = as_words(out)
            words.index_copy_(0, places[served], found.view(words.dtype))
            self._keep(rows[begin : begin + len(part)], staged)

    def _keep(self, rows: torch.Tensor, staged: torch.Tensor) -> None:
        """Put rows, each another one, into their slots; one of those that share a slot stays."""
        slots = len(self.tags)
        slot = rows % slots
        self.tags[slot] = rows
        stays = self.tags[slot] == rows
        as_words(self.cache).index_copy_(0, torch.where(stays, slot, slots), staged)

    def _pinned_rows(self, half: int, count: int) -> torch.Tensor:
        if not self._pinned:
            shape = (self._chunk_rows, *self._disk.row_shape)
            on_gpu = self._where.type == "cuda"
            self._pinned = [
                torch.empty(shape, dtype=self._disk.dtype, pin_memory=on_gpu) for _ in range(2)
            ]
        return self._pinned[half][:count]

    def _wait(self) -> None:
        if self._where.type == "cuda":
            torch.cuda.current_stream(self._where).synchronize()

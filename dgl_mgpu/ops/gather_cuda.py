"""Row gather over tiers on CUDA; see ``kernels/gather.cu``."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, buckets_of, c_type, position_pointer, position_type
from dgl_mgpu.ops.gather import (
    DiskCache,
    GatherTuning,
    count_tiers_op,
    gather_rows_op,
    pick_rows_op,
)
from dgl_mgpu.ops.host_reads import HostCounters
from dgl_mgpu.ops.library import call, direct
from dgl_mgpu.ops.spmm_layout import ELEMENTS
from dgl_mgpu.ops.view import LISTED_ROWS, TieredRows

THREADS = 256
_WARPS = THREADS // 32
#: Bytes that memory, links and caches move at a time.
_LINE = 128
#: Loads that a lane has under way at once.
UNROLL = 8
#: More rows of a gather than a list of those in host memory can number.
_TOO_MANY_ROWS = 1 << 31
#: Look-ups of a thread that lists host rows.
_LOOKUPS = 4
#: ``HostRows`` where rows are not listed.
_NOT_LISTED: tuple[Any, ...] = (0, 0, 0, 0, 0)
VECTORS = {
    16: "dgl_mgpu::Vector16",
    8: "dgl_mgpu::uint64",
    4: "dgl_mgpu::uint32",
    2: "unsigned short",
    1: "unsigned char",
}
_ELEMENTS = {
    **ELEMENTS,
    torch.float8_e4m3fn: "dgl_mgpu::Float8E4M3",
    torch.float8_e5m2: "dgl_mgpu::Float8E5M2",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "dgl_mgpu::int64",
    torch.bool: "unsigned char",
}


@functools.cache
def _kernel(name: str, *arguments: torch.dtype | str) -> Kernel:
    types = [argument if isinstance(argument, str) else c_type(argument) for argument in arguments]
    return Kernel("gather.cu", f"dgl_mgpu::{name}<{', '.join(types)}>")


@functools.cache
def _gather_kernel(
    seed: torch.dtype, position: str, stored: torch.dtype | None, wanted: torch.dtype, vector: int
) -> Kernel:
    """The kernel that reads ``vector`` bytes at a time."""
    if stored is None:
        return _kernel("gather", seed, position, VECTORS[vector], str(UNROLL))
    elements = vector // stored.itemsize
    types = (_ELEMENTS[stored], _ELEMENTS[wanted])
    return _kernel("gather_cast", seed, position, *types, str(elements), str(UNROLL))


@gather_rows_op.cuda
def _gather_rows(
    out: Tensor,
    ids: Tensor,
    table: TieredRows,
    tuning: GatherTuning,
    stored: torch.dtype | None,
    disk: DiskCache | None,
    counters: HostCounters | None,
) -> None:
    tiers, pointers, position, num_rows = table
    host_start, sms, host_sms, host_share = tuning
    device = out.device
    gpu.raise_faults(device, wait=False)
    count = ids.numel()
    if out.numel() == 0:
        return
    elements = out.numel() // count
    row_bytes = elements * (stored or out.dtype).itemsize
    vector = _vector(out, elements, stored)
    types = ids.dtype, position_type(position)
    kernel = _gather_kernel(*types, stored, out.dtype, vector)
    blocks, warp_rows = launch_shape(kernel, count, device, sms)
    host_blocks, host_rows = 0, (host_start, *_NOT_LISTED)
    # Rows on disk follow those in host memory: with them, host rows are read unordered.
    worth = 0 <= host_start < num_rows and disk is None and LISTED_ROWS <= count < _TOO_MANY_ROWS
    listed = worth and host_share * count >= LISTED_ROWS
    if listed:
        host_rows = _host_rows(count, host_start, num_rows, device)
        host_blocks = min(blocks, gpu.blocks_within(kernel, THREADS, count, device, host_sms))
        if host_start == 0:  # no block reads anything else
            blocks = host_blocks
        else:
            # All are there at once, or some would begin when others end.
            host_blocks = min(host_blocks, max(1, blocks // 2))
            blocks = max(blocks, host_blocks + 1)
    request = gpu.struct(
        out, ids, count, tiers, tiers.shape[0], pointers, position_pointer(position), num_rows,
        row_bytes, row_slots(row_bytes, vector), warp_rows, *host_rows, host_blocks,
        *(counters if counters is not None and worth else (None, None)),
        *((None, None, 0, None) if disk is None else _disk_cache(disk)), gpu.fault_record(device),
    )  # fmt: skip
    if listed:
        counter, lister = _kernel("count_host_rows", *types), _kernel("list_host_rows", *types)
        wanted = -(-count // (_LOOKUPS * THREADS))
        some = gpu.blocks_within(lister, THREADS, wanted, device, sms)
        counter(some, THREADS, request, device=device)
        lister(some, THREADS, request, device=device)
    kernel(blocks, THREADS, request, device=device)


def _disk_cache(disk: DiskCache) -> tuple[Any, ...]:
    """The kernels' ``DiskCache``."""
    return disk.tags, disk.cache, disk.tags.shape[0], disk.miss_positions


def _host_rows(count: int, start: int, num_rows: int, device: torch.device) -> tuple[Any, ...]:
    """The kernels' ``HostRows``: buffers for a list of a gather's rows in host memory."""
    shift, buckets = buckets_of(num_rows - start)
    counts = torch.zeros(buckets + 2, dtype=torch.int32, device=device)
    # Positions, of eight bytes, and behind them places, of four.
    listed = torch.empty(3 * count, dtype=torch.int32, device=device)
    return start, shift, buckets, counts, listed, listed.data_ptr() + 8 * count


def _vector(out: Tensor, elements: int, stored: torch.dtype | None) -> int:
    """Bytes of a row to read at a time: 16, or fewer where rows are not aligned to them."""
    if stored is None:
        return math.gcd(elements * out.element_size(), out.data_ptr(), 16)
    together = math.gcd(elements, 16 // stored.itemsize)
    # What one vector becomes is written as vectors of up to 16 bytes.
    while out.data_ptr() % min(16, together * out.element_size()):
        together //= 2
    return together * stored.itemsize


def row_slots(row_bytes: int, vector: int) -> int:
    """Vectors of a row, and of the lines it lies in if those are not its own."""
    if row_bytes <= _LINE or row_bytes % _LINE == 0:
        return row_bytes // vector
    lines = -(-(row_bytes + _LINE - vector) // _LINE)
    return lines * _LINE // vector


def launch_shape(kernel: Kernel, count: int, device: torch.device, sms: int) -> tuple[int, int]:
    """Number of blocks, and of rows per warp: fewer where that keeps more warps busy."""
    most = gpu.blocks_within(kernel, THREADS, count, device, sms)
    warp_rows = min(32, max(1, count // (most * _WARPS)))
    return max(1, min(most, -(-count // (warp_rows * _WARPS)))), warp_rows


@count_tiers_op.cuda
def _count_tiers(
    counts: Tensor, ids: Tensor, tiers: Tensor, position: Tensor, num_rows: int
) -> None:
    device, count = ids.device, ids.numel()
    kernel = _kernel("count_tiers", ids.dtype, position_type(position))
    blocks = gpu.blocks_within(kernel, THREADS, -(-count // (4 * THREADS)), device)
    kernel(
        blocks if count else 0, THREADS, ids, count, tiers, len(tiers), position_pointer(position),
        num_rows, len(counts), counts, gpu.fault_record(device), device=device,
    )  # fmt: skip


#: Tensors of one launch.
_TABLES = 8


@functools.cache
def _pick_kernel(ids: torch.dtype) -> Kernel:
    return Kernel("gather.cu", f"dgl_mgpu::pick<{c_type(ids)}, {UNROLL}>")


@pick_rows_op.cuda
def _pick_rows(out: Tensor, rows: Tensor, ids: Tensor) -> None:
    _pick([(out, rows, ids)], out.device)


def pick_all(picks: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    """:func:`dgl_mgpu.ops.pick_rows` for several tensors on one GPU, by one launch.

    Parameters
    ----------
    picks : sequence of (Tensor, Tensor, Tensor)
        ``out``, ``rows`` and ``ids`` of each, which are not checked again.
    """
    if direct("pick_rows", tuple(itertools.chain.from_iterable(picks))) is None:
        for pick in picks:
            call("pick_rows", pick)
        return
    for dtype in {ids.dtype for _, _, ids in picks}:
        alike = [pick for pick in picks if pick[2].dtype == dtype]
        for begin in range(0, len(alike), _TABLES):
            _pick(alike[begin : begin + _TABLES], alike[0][0].device)


def _pick(picks: Sequence[tuple[Tensor, Tensor, Tensor]], device: torch.device) -> None:
    """See ``kernels/gather.cu``."""
    gpu.raise_faults(device, wait=False)
    kernel = _pick_kernel(picks[0][2].dtype)
    words: list[int] = []
    kept, first_block = [], 0
    for out, rows, ids in picks:
        num_bytes, count = out.nbytes, ids.shape[0]
        if not num_bytes:
            continue
        ids = ids.contiguous()
        kept.append(ids)
        row_bytes, to, table = num_bytes // count, out.data_ptr(), rows.data_ptr()
        vector = row_bytes | to | table | 16
        vector &= -vector  # the largest power of two that divides all of them
        blocks, warp_rows = launch_shape(kernel, count, device, 0)
        words += (
            to, table, ids.data_ptr(), count, rows.shape[0], row_bytes, vector,
            row_slots(row_bytes, vector), warp_rows, first_block, blocks,
        )  # fmt: skip
        first_block += blocks
    if kept:
        padding = [0] * (len(words) // len(kept) * (_TABLES - len(kept)))
        fault = gpu.fault_record(device).data_ptr()
        request = gpu.packed([fault, len(kept), *words, *padding])
        kernel(first_block, THREADS, request, device=device)

"""Row gather over tiers on CUDA; see ``kernels/gather.cu``."""

from __future__ import annotations

import functools
import math

import torch

from dgl_mgpu.ops import device
from dgl_mgpu.ops.device import Kernel, c_type, position_pointer
from dgl_mgpu.ops.gather import op  # noqa: F401  (defines the schemas)
from dgl_mgpu.ops.library import library

_THREADS = 256
_WARPS = _THREADS // 32
#: Bytes that memory, links and caches move at a time.
_LINE = 128
#: Loads that a lane has under way at once.
_UNROLL = 8
#: Multiprocessors that keep the host's link busy. With more, rows that are read at the same time
#: lie further apart, and more addresses have to be translated for them.
_HOST_SMS = 4
#: Rows from host memory that are worth sorting.
_SORTED_ROWS = 1 << 12
_VECTORS = {
    16: "dgl_mgpu::Vector16",
    8: "dgl_mgpu::uint64",
    4: "dgl_mgpu::uint32",
    2: "unsigned short",
    1: "unsigned char",
}


@functools.cache
def _kernel(name: str, *types: torch.dtype, vector: int = 0) -> Kernel:
    arguments = [c_type(dtype) for dtype in types]
    if vector:
        arguments += [_VECTORS[vector], str(_UNROLL)]
    return Kernel("gather.cu", f"dgl_mgpu::{name}<{', '.join(arguments)}>")


@torch.library.impl(library, "gather_rows", "CUDA")
def _gather_rows(
    out: torch.Tensor,
    ids: torch.Tensor,
    tiers: torch.Tensor,
    pointers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
    host_start: int = -1,
    sms: int = 0,
) -> None:
    where = out.device
    device.raise_faults(where, wait=False)
    count = ids.numel()
    row_bytes = 0 if count == 0 else out.numel() // count * out.element_size()
    if row_bytes == 0:
        return
    vector = math.gcd(row_bytes, out.data_ptr(), 16)
    if 0 <= host_start < num_rows and count >= _SORTED_ROWS:
        _gather_sorted(out, ids, tiers, pointers, position, num_rows, host_start, sms, vector)
        return
    kernel = _kernel("gather", ids.dtype, position.dtype, vector=vector)
    blocks, warp_rows = _shape(kernel, count, where, sms)
    kernel(
        blocks,
        _THREADS,
        out,
        ids,
        count,
        tiers,
        len(tiers),
        pointers,
        position_pointer(position),
        num_rows,
        row_bytes,
        _slots(row_bytes, vector),
        warp_rows,
        device.fault_record(where),
        device=where,
    )


def _gather_sorted(
    out: torch.Tensor,
    ids: torch.Tensor,
    tiers: torch.Tensor,
    pointers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
    host_start: int,
    sms: int,
    vector: int,
) -> None:
    where, count = out.device, ids.numel()
    row_bytes = out.numel() // count * out.element_size()
    fault = device.fault_record(where)
    dtype = torch.int32 if num_rows <= torch.iinfo(torch.int32).max else torch.int64
    positions = torch.empty(count, dtype=dtype, device=where)
    find = _kernel("find_positions", ids.dtype, position.dtype, dtype)
    find(
        device.blocks_within(find, _THREADS, -(-count // _THREADS), where),
        _THREADS,
        positions,
        ids,
        count,
        position_pointer(position),
        num_rows,
        fault,
        device=where,
    )
    positions, order = torch.sort(positions)
    kernel = _kernel("gather_sorted", dtype, vector=vector)
    blocks, warp_rows = _shape(kernel, count, where, sms)
    # Where all rows are the host's, nobody else needs a block.
    others = blocks if host_start > 0 else 0
    host_sms = _HOST_SMS if others else sms or _HOST_SMS
    host_blocks = device.blocks_within(kernel, _THREADS, blocks, where, host_sms)
    kernel(
        host_blocks + others,
        _THREADS,
        out,
        positions,
        order,
        count,
        tiers,
        len(tiers),
        pointers,
        num_rows,
        row_bytes,
        _slots(row_bytes, vector),
        warp_rows,
        host_start,
        host_blocks,
        fault,
        device=where,
    )


def _slots(row_bytes: int, vector: int) -> int:
    """Vectors of a row, and of the lines it lies in if those are not its own."""
    if row_bytes <= _LINE or row_bytes % _LINE == 0:
        return row_bytes // vector
    lines = -(-(row_bytes + _LINE - vector) // _LINE)
    return lines * _LINE // vector


def _shape(kernel: Kernel, count: int, where: torch.device, sms: int) -> tuple[int, int]:
    """Blocks, and rows for a warp at a time: fewer where that keeps more warps busy."""
    most = device.blocks_within(kernel, _THREADS, count, where, sms)
    warp_rows = min(32, max(1, count // (most * _WARPS)))
    return max(1, min(most, -(-count // (warp_rows * _WARPS)))), warp_rows


@torch.library.impl(library, "count_tiers", "CUDA")
def _count_tiers(
    ids: torch.Tensor,
    tiers: torch.Tensor,
    pointers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
) -> torch.Tensor:
    where, count = ids.device, ids.numel()
    counts = torch.zeros(pointers.shape[0], dtype=torch.int64, device=where)
    kernel = _kernel("count_tiers", ids.dtype, position.dtype)
    blocks = device.blocks_within(kernel, _THREADS, -(-count // (4 * _THREADS)), where)
    kernel(
        blocks if count else 0,
        _THREADS,
        ids,
        count,
        tiers,
        len(tiers),
        position_pointer(position),
        num_rows,
        len(counts),
        counts,
        device.fault_record(where),
        device=where,
    )
    return counts

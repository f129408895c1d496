"""Row gather over tiers, and of rows of one tensor; see ``kernels/gather.cu``."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import cpu
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import (
    check_ids,
    check_integer,
    check_tensor,
    raise_at_bad_id,
    raise_at_id_outside,
)
from dgl_mgpu.ops.cpu import (
    CACHE_LINE,
    Rows,
    copy_bytes,
    kernel,
    load_id,
    position_of,
    prefetch,
    rows_argument,
    segment_in,
    segment_of,
)
from dgl_mgpu.ops.device import Kernel, buckets_of, c_type, position_pointer, position_type
from dgl_mgpu.ops.host_reads import HostCounters
from dgl_mgpu.ops.library import Operator, Size, Written, call, direct
from dgl_mgpu.ops.spmm_layout import ELEMENTS
from dgl_mgpu.ops.view import HOST_SMS, LISTED_ROWS, STOP, RowView, TieredRows, as_words


class GatherTuning(NamedTuple):
    """How a GPU gathers; the fields are those of :class:`RowView`."""

    host_start: Size = -1
    sms: int = 0
    host_sms: int = HOST_SMS
    host_share: float = 1.0


class DiskCache(NamedTuple):
    """The cache of rows on disk (:class:`dgl_mgpu.ops.view.DiskRows`), and what it lacks."""

    tags: Tensor
    cache: Tensor
    miss_positions: Written  # int64, (n,): a gathered row's position if it is on disk alone, or -1


@Operator
def gather_rows_op(
    out: Written,
    ids: Tensor,
    table: TieredRows,
    tuning: GatherTuning,
    stored: torch.dtype | None = None,
    disk: DiskCache | None = None,
    counters: HostCounters | None = None,
) -> None:
    return None


@Operator
def count_tiers_op(
    counts: Written, ids: Tensor, tiers: Tensor, position: Tensor, num_rows: Size
) -> None:
    return None


#: Element types that can be cast while rows are gathered, and those they can be cast to.
CASTS_FROM = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
#: ``DiskCache`` and ``HostCounters`` of a gather without them.
_NO_DISK_CACHE = (None, None, None)
_NO_COUNTERS = (None, None)
CASTS_TO = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def gather_rows(
    view: RowView,
    ids: Tensor,
    out: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    sms: int = 0,
) -> Tensor:
    """Copy rows of a table from wherever they are kept.

    Parameters
    ----------
    view : RowView
        The table as this rank sees it.
    ids : Tensor, int32 or int64, shape (n,)
        Row ids, in any order and with repeats.
    out : Tensor, optional
        Contiguous, of the dtype asked for and shape ``(n, *view.row_shape)``; its content is
        undefined if an error is raised.
    dtype : torch.dtype, optional
        float32, float16, bfloat16 or float64: cast the rows on the way, to what torch's
        ``.to(dtype)`` gives.  ``view.dtype`` by default, as stored.
    sms : int
        Most multiprocessors of a GPU to use; 0 for ``view.sms``, and for ``view.host_sms`` where
        rows lie in host memory.  A small part of them fills a link, and the rest is then left to
        kernels that run meanwhile.

    Returns
    -------
    Tensor, ``dtype``, shape (n, *view.row_shape)
        ``out``, or a new tensor on the device of ``ids``.

    Raises
    ------
    InvalidInputError
        If ``ids`` or ``out`` has the wrong dtype, shape or device, or the table's element type
        cannot be cast to ``dtype``.
    IdOutOfRangeError
        If an id is negative or not smaller than ``view.num_rows``; it names the first one.  On a
        GPU, which the host does not wait for, the row is zero and the error is raised by the next
        operator call on that device or by :func:`dgl_mgpu.ops.device.raise_faults`.

    Notes
    -----
    Global gather of WholeGraph (section III-C) on the modulo layout of XGNN (section 4.3).

    A gather from a view with rows on disk (``view.disk``) waits for the GPU: the kernel says
    which rows it lacks, and the CPU reads these.  Such gathers of one table take turns.
    """
    action = f"gather rows of a table of {view.num_rows} rows"
    ids = check_ids(ids, action, view.tiers.device)
    dtype = _checked_dtype(view.dtype, dtype, action)
    shape = (ids.numel(), *view.row_shape)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=ids.device)
    else:
        check_tensor(out, "out", action, dtype, shape, ids.device, contiguous=True)
    sms = check_integer(sms, "sms", 0, action)
    # Where all rows are the host's, a limit is meant for them.
    host_sms = sms if sms and view.host_start == 0 else view.host_sms
    tensors = (out, ids, view.tiers, view.pointers, view.position)
    host_share = view.host_share
    counters: tuple[Tensor | None, Tensor | None] = _NO_COUNTERS
    reads = None if torch.compiler.is_compiling() else view.host_reads
    if reads is not None and view.host_start >= 0 and out.is_cuda:
        host_share, counters = reads.share(host_share), reads.counters(out.device)
    others = (
        view.num_rows, view.host_start, sms or view.sms, host_sms, host_share,
        None if dtype == view.dtype else view.dtype,
    )  # fmt: skip
    if view.disk is None or out.numel() == 0:
        call("gather_rows", tensors, *others, *_NO_DISK_CACHE, *counters)
        return out
    with view.disk.lock:
        miss_positions = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
        call("gather_rows", tensors, *others, view.disk.tags, view.disk.cache, miss_positions)
        view.disk.fetch(out, miss_positions)
    return out


def _checked_dtype(stored: torch.dtype, wanted: torch.dtype | None, action: str) -> torch.dtype:
    if wanted is None or wanted == stored:
        return stored
    if wanted not in CASTS_TO or stored not in CASTS_FROM:
        known = CASTS_TO if stored in CASTS_FROM else (stored,)
        raise InvalidInputError(
            action,
            f"dtype is {wanted}, but the elements are stored as {stored}",
            f"ask for {', '.join(map(str, known))}, or cast what is gathered",
        )
    return wanted


def count_tiers(view: RowView, ids: Tensor, counts: Tensor | None = None) -> Tensor:
    """Count how many of the rows asked for each segment serves.

    Parameters
    ----------
    view : RowView
        The table as this rank sees it.
    ids : Tensor, int32 or int64, shape (n,)
        Row ids, in any order and with repeats.
    counts : Tensor, int64, shape (len(view.pointers),), optional
        What an earlier call has returned, to add to.

    Returns
    -------
    Tensor, int64, shape (len(view.pointers),)
        ``counts``, or a new tensor that sums to n: rows of each segment, in the order of
        ``view.pointers``.  Tier ``t`` has the entries ``view.tiers[t, FIRST]`` to
        ``view.tiers[t, FIRST] + view.tiers[t, PARTS]``.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError
        As :func:`gather_rows`.
    """
    action = f"count tiers of a table of {view.num_rows} rows"
    ids = check_ids(ids, action, view.tiers.device)
    num_segments = view.pointers.shape[0]
    if counts is None:
        counts = torch.zeros(num_segments, dtype=torch.int64, device=ids.device)
    else:
        shape = (num_segments,)
        check_tensor(counts, "counts", action, torch.int64, shape, ids.device, contiguous=True)
    call("count_tiers", (counts, ids, view.tiers, view.position), view.num_rows)
    return counts


_GATHER, _PICK = "gather rows", "pick rows"


@Operator
def pick_rows_op(out: Written, rows: Tensor, ids: Tensor) -> None:
    return None


def pick_rows(rows: Tensor, ids: Tensor, out: Tensor) -> None:
    """Copy some rows of a tensor, as ``torch.index_select`` does, which takes a block for each row.

    Parameters
    ----------
    rows : Tensor, contiguous, shape (n, \\*shape)
    ids : Tensor, int32 or int64, shape (count,)
        In [0, n).
    out : Tensor, contiguous, of the same dtype, shape (count, \\*shape)

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype, shape or device.
    IdOutOfRangeError
        On a GPU by a later call, as :func:`dgl_mgpu.ops.gather_rows` says.
    """
    check_ids(ids, _PICK, rows.device)
    shape = (len(ids), *rows.shape[1:])
    check_tensor(out, "out", _PICK, rows.dtype, shape, rows.device, contiguous=True)
    if not rows.is_contiguous():
        raise InvalidInputError(_PICK, "rows is not contiguous", "pass rows.contiguous()")
    call("pick_rows", (out, rows, ids))


@pick_rows_op.cpu
def _pick_rows_cpu(out: Tensor, rows: Tensor, ids: Tensor) -> None:
    raise_at_id_outside(ids, len(rows), _PICK)
    torch.index_select(rows, 0, ids, out=out)


#: Bytes copied per range of ids that are worth waking a thread for.
_GRAIN_BYTES = 128 * 1024
#: Rows are copied in groups: while one is copied, the next one is on its way to the cache.
#: A group is of about this many bytes, within these bounds for the number of rows.
_GROUP_BYTES = 4096
_GROUP_ROWS = (16, 32)
#: Bytes gathered before they are cast: few enough to stay in the caches.
_CAST_BYTES = 8 << 20
#: Lines of a row asked for ahead; the hardware prefetcher follows with the rest.
_LINES = 4


@kernel
def _gather(
    begin: int, end: int, out: int, ids: int, id_width: int, rows: Rows, num_rows: int,
    row_bytes: int,
) -> int:  # fmt: skip
    """Copy rows ``[begin, end)`` to address ``out``; the first bad place, or -1."""
    tiers, pointers, position, width = rows
    group = min(max(_GROUP_ROWS[0], _GROUP_BYTES // max(row_bytes, 1)), _GROUP_ROWS[1])
    prefetched = min(row_bytes, _LINES * CACHE_LINE)
    positions = np.empty(group, np.int64)
    tier_of = np.empty(group, np.int64)
    next_addresses = np.empty(group, np.int64)
    addresses = np.empty(group, np.int64)
    target = out + begin * row_bytes
    num_waiting = 0
    for start in range(begin, end + group, group):
        count = max(0, min(group, end - start))

        for index in range(count):
            row = load_id(ids, start + index, id_width)
            if row < 0 or row >= num_rows:
                return start + index
            if width != 0 and start + index + group < end:
                prefetch(position + width * load_id(ids, start + index + group, id_width))
            positions[index] = position_of(row, position, width)
            tier_of[index] = 0
        for tier in range(len(tiers) - 1):  # all rows against one bound: this is vectorised
            for index in range(count):
                tier_of[index] += positions[index] >= tiers[tier, STOP]

        for index in range(max(count, num_waiting)):
            if index < count:
                segment, local = segment_in(tier_of[index], positions[index], tiers)
                address = pointers[segment] + local * row_bytes
                next_addresses[index] = address
                for offset in range(0, prefetched, CACHE_LINE):
                    prefetch(address + offset)
            if index < num_waiting:
                copy_bytes(target, addresses[index], row_bytes)
                target += row_bytes
        num_waiting = count
        next_addresses, addresses = addresses, next_addresses
    return -1


@kernel
def _count(
    begin: int, end: int, counts: np.ndarray, ids: int, id_width: int, rows: Rows, num_rows: int
) -> int:
    """Count the rows of each segment among ids ``[begin, end)``; the first bad place, or -1."""
    tiers, _, position, position_width = rows
    for place in range(begin, end):
        row = load_id(ids, place, id_width)
        if row < 0 or row >= num_rows:
            return place
        segment, _ = segment_of(position_of(row, position, position_width), tiers)
        counts[segment] += 1
    return -1


@gather_rows_op.cpu
def _gather_rows_cpu(
    out: Tensor,
    ids: Tensor,
    table: TieredRows,
    tuning: GatherTuning,
    stored: torch.dtype | None,
    disk: DiskCache | None,
    counters: HostCounters | None,
) -> None:
    tiers, pointers, position, num_rows = table
    stored = stored or out.dtype
    argument = rows_argument(tiers, pointers, position)
    if disk is None:
        _gather_mapped(out, ids, argument, num_rows, stored)
        return
    tags, cache, miss_positions = disk
    raise_at_id_outside(ids, num_rows, _GATHER)
    at = (position[ids] if position.numel() else ids).long()
    start, _, parts, first = tiers[
        torch.searchsorted(tiers[:, STOP].contiguous(), at, right=True)
    ].T
    on_disk = pointers[first + (at - start) % parts] == 0
    slot = at % len(tags)
    cached = on_disk & (tags[slot] == at)
    miss_positions.copy_(torch.where(on_disk & ~cached, at, -1))
    mapped = (~on_disk).nonzero().flatten()
    rows = out.new_empty((len(mapped), *out.shape[1:]))
    _gather_mapped(rows, ids[mapped], argument, num_rows, stored)
    words = as_words(out)
    words[mapped] = as_words(rows).view(words.dtype)
    rows = as_words(cache)[slot[cached]].view(stored).to(out.dtype)
    words[cached] = rows.view(words.dtype)


def _gather_mapped(
    out: Tensor, ids: Tensor, table: Rows, num_rows: int, stored: torch.dtype
) -> None:
    """Gather rows that all lie at addresses of this process."""
    count = ids.numel()
    if count == 0:
        return
    row_bytes = out.numel() // count * stored.itemsize
    step = count if stored == out.dtype else max(1, _CAST_BYTES // max(row_bytes, 1))
    held = out
    if stored != out.dtype:
        held = torch.empty((min(step, count), *out.shape[1:]), dtype=stored)
    for begin in range(0, count, step):
        part = ids[begin : begin + step]
        places = cpu.run(
            _gather, len(part), max(1, _GRAIN_BYTES // max(row_bytes, 8)), held.data_ptr(),
            part.data_ptr(), ids.element_size(), table, num_rows, row_bytes,
        )  # fmt: skip
        raise_at_bad_id([begin + at if at >= 0 else at for at in places], ids, num_rows, _GATHER)
        if held is not out:
            out[begin : begin + step] = held[: len(part)]


@count_tiers_op.cpu
def _count_tiers_cpu(
    counts: Tensor, ids: Tensor, tiers: Tensor, position: Tensor, num_rows: int
) -> None:
    rows = rows_argument(tiers, counts, position)  # addresses are not looked at
    # One thread: a pass over ids in the cache costs less than the gather it reports on.
    place = _count(
        0, ids.numel(), counts.numpy(), ids.data_ptr(), ids.element_size(), rows, num_rows
    )
    raise_at_bad_id([place], ids, num_rows, "count tiers")


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
def _gather_rows_cuda(
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
def _count_tiers_cuda(
    counts: Tensor, ids: Tensor, tiers: Tensor, position: Tensor, num_rows: int
) -> None:
    device, count = ids.device, ids.numel()
    kernel = _kernel("count_tiers", ids.dtype, position_type(position))
    blocks = gpu.blocks_within(kernel, THREADS, -(-count // (4 * THREADS)), device)
    kernel(
        blocks if count else 0, THREADS, ids, count, tiers, len(tiers), position_pointer(position),
        num_rows, len(counts), counts, gpu.fault_record(device), device=device,
    )  # fmt: skip


#: Tables of one launch.
_TABLES = 8
_TYPES_OF_IDS = (torch.int32, torch.int64)


@functools.cache
def _pick_kernel(ids: torch.dtype) -> Kernel:
    return Kernel("gather.cu", f"dgl_mgpu::pick<{c_type(ids)}, {UNROLL}>")


@pick_rows_op.cuda
def _pick_rows_cuda(out: Tensor, rows: Tensor, ids: Tensor) -> None:
    _pick([(out, rows, ids)], out.device)


#: ``out``, a tensor or a view with its rows, and ids.
Pick = tuple[Tensor, Tensor | RowView, Tensor]


def can_be_picked(ids: Tensor, rows: Tensor | RowView) -> bool:
    """Whether :func:`pick_all` can read these rows, and no gradient has to go back to them.

    It reads them in the order of ``ids``, which takes long for many rows in host memory.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype not in _TYPES_OF_IDS:
        return False
    if isinstance(rows, RowView):
        is_fast = rows.host_start < 0 or ids.shape[0] < LISTED_ROWS
        return rows.address != 0 and is_fast and ids.device == rows.tiers.device
    return (
        ids.device == rows.device
        and rows.is_contiguous()
        and not (rows.requires_grad and torch.is_grad_enabled())
    )


def to_be_picked(ids: Tensor, rows: Tensor | RowView) -> Pick:
    """Memory for rows, where they are and the ids, for :func:`pick_all`."""
    if isinstance(rows, RowView):
        shape = (ids.shape[0], *rows.row_shape)
        return torch.empty(shape, dtype=rows.dtype, device=ids.device), rows, ids
    out = rows.new_empty((ids.shape[0], *rows.shape[1:]))
    return out, rows.detach() if rows.requires_grad else rows, ids


def pick_all(picks: Sequence[Pick]) -> None:
    """:func:`dgl_mgpu.ops.pick_rows` for several tables on one device, on a GPU by one launch.

    Parameters
    ----------
    picks : sequence of Pick
        As :func:`to_be_picked` gives them; they are not checked again.
    """
    tensors = tuple(it for it in itertools.chain.from_iterable(picks) if isinstance(it, Tensor))
    if not tensors[0].is_cuda or direct("pick_rows", tensors) is None:
        for out, rows, ids in picks:
            if isinstance(rows, RowView):
                gather_rows(rows, ids, out)
            else:
                call("pick_rows", (out, rows, ids))
        return
    for dtype in {ids.dtype for _, _, ids in picks}:
        alike = [pick for pick in picks if pick[2].dtype == dtype]
        for begin in range(0, len(alike), _TABLES):
            _pick(alike[begin : begin + _TABLES], alike[0][0].device)


def _pick(picks: Sequence[Pick], device: torch.device) -> None:
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
        row_bytes, to = num_bytes // count, out.data_ptr()
        position = entry_bytes = 0
        if isinstance(rows, RowView):
            table, num_rows = rows.address, rows.num_rows
            if rows.position.shape[0]:
                position, entry_bytes = rows.position.data_ptr(), rows.position.itemsize
        else:
            table, num_rows = rows.data_ptr(), rows.shape[0]
        vector = row_bytes | to | table | 16
        vector &= -vector  # the largest power of two that divides all of them
        blocks, warp_rows = launch_shape(kernel, count, device, 0)
        words += (
            to, table, position, entry_bytes, ids.data_ptr(), count, num_rows, row_bytes, vector,
            row_slots(row_bytes, vector), warp_rows, first_block, blocks,
        )  # fmt: skip
        first_block += blocks
    if kept:
        padding = [0] * (len(words) // len(kept) * (_TABLES - len(kept)))
        fault = gpu.fault_record(device).data_ptr()
        request = gpu.packed([fault, len(kept), *words, *padding])
        kernel(first_block, THREADS, request, device=device)

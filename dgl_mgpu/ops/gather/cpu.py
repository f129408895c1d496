"""Row gather over tiers on the CPU."""

from __future__ import annotations

import numpy as np
import torch

from dgl_mgpu.ops import parallel
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.gather.op import DiskCache, GatherTuning, count_tiers_op, gather_rows_op
from dgl_mgpu.ops.host_reads import HostCounters
from dgl_mgpu.ops.memory import (
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
from dgl_mgpu.ops.view import STOP, TieredRows, as_words

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
_ASKED = "gather rows"


@kernel
def _gather(
    begin: int,
    end: int,
    out: int,
    ids: int,
    id_width: int,
    rows: Rows,
    num_rows: int,
    row_bytes: int,
) -> int:
    """Copy rows ``[begin, end)`` to address ``out``; the first bad place, or -1."""
    tiers, pointers, position, width = rows
    together = min(max(_GROUP_ROWS[0], _GROUP_BYTES // max(row_bytes, 1)), _GROUP_ROWS[1])
    asked_bytes = min(row_bytes, _LINES * CACHE_LINE)
    places = np.empty(together, np.int64)
    tier_of = np.empty(together, np.int64)
    coming = np.empty(together, np.int64)
    here = np.empty(together, np.int64)
    target = out + begin * row_bytes
    waiting = 0
    for start in range(begin, end + together, together):
        count = max(0, min(together, end - start))

        for index in range(count):
            row = load_id(ids, start + index, id_width)
            if row < 0 or row >= num_rows:
                return start + index
            if width != 0 and start + index + together < end:
                prefetch(position + width * load_id(ids, start + index + together, id_width))
            places[index] = position_of(row, position, width)
            tier_of[index] = 0
        for tier in range(len(tiers) - 1):  # all rows against one bound: this is vectorised
            for index in range(count):
                tier_of[index] += places[index] >= tiers[tier, STOP]

        for index in range(max(count, waiting)):
            if index < count:
                segment, local = segment_in(tier_of[index], places[index], tiers)
                address = pointers[segment] + local * row_bytes
                coming[index] = address
                for offset in range(0, asked_bytes, CACHE_LINE):
                    prefetch(address + offset)
            if index < waiting:
                copy_bytes(target, here[index], row_bytes)
                target += row_bytes
        waiting = count
        coming, here = here, coming
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
def _gather_rows(
    out: torch.Tensor,
    ids: torch.Tensor,
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
    bad = ((ids < 0) | (ids >= num_rows)).nonzero().flatten()
    raise_at_bad_id(bad[:1].tolist(), ids, num_rows, _ASKED)
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
    out: torch.Tensor, ids: torch.Tensor, table: Rows, num_rows: int, stored: torch.dtype
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
        places = parallel.run(
            _gather,
            len(part),
            max(1, _GRAIN_BYTES // max(row_bytes, 8)),
            held.data_ptr(),
            part.data_ptr(),
            ids.element_size(),
            table,
            num_rows,
            row_bytes,
        )
        raise_at_bad_id([begin + at if at >= 0 else at for at in places], ids, num_rows, _ASKED)
        if held is not out:
            out[begin : begin + step] = held[: len(part)]


@count_tiers_op.cpu
def _count_tiers(
    counts: torch.Tensor,
    ids: torch.Tensor,
    tiers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
) -> None:
    rows = rows_argument(tiers, counts, position)  # addresses are not looked at
    # One thread: a pass over ids in the cache costs less than the gather it reports on.
    place = _count(
        0, ids.numel(), counts.numpy(), ids.data_ptr(), ids.element_size(), rows, num_rows
    )
    raise_at_bad_id([place], ids, num_rows, "count tiers")

"""Uniform neighbour sampling on the CPU.

Two passes: find each seed's edges and count its sample, then, after a prefix sum, fill.  The
second works on a few dozen seeds at a time, in steps over all of them, so that the random
numbers are vectorised and the misses of all seeds overlap.
"""

from __future__ import annotations

import numpy as np
import torch

from dgl_mgpu.ops import parallel
from dgl_mgpu.ops.edges import (
    DEGREE,
    FIRST_EDGE,
    GRAIN,
    SEGMENT,
    SHIFT,
    edge_id,
    find_edges,
    stored_ids,
)
from dgl_mgpu.ops.memory import (
    CACHE_LINE,
    copy_bytes,
    inline,
    kernel,
    load_id,
    prefetch,
    rows_argument,
    store_id,
)
from dgl_mgpu.ops.philox import SAMPLE_STREAM, below, philox
from dgl_mgpu.ops.sample.op import sample_neighbors_op
from dgl_mgpu.ops.view import INDICES, TieredRows

#: Seeds sampled together, and the draws they may need together.
_SEEDS, _DRAWS = 64, 1024
#: Up to here repeated picks are found by comparing with all earlier ones, then by hashing.
_FEW = 48


@inline
def _prefetch_range(address: int, size: int) -> None:
    """Ask for the first lines of a range; the hardware prefetcher follows with the rest."""
    for offset in range(0, min(size, 4 * CACHE_LINE), CACHE_LINE):
        prefetch(address + offset)


@kernel
def _count(found: np.ndarray, fanout: int, replace: bool, indptr: np.ndarray) -> int:
    """Prefix sum of the sample sizes; the largest of them."""
    total = 0
    largest = 0
    for place in range(len(found)):
        count = found[place, DEGREE]
        if fanout >= 0 and count > 0 and (replace or count > fanout):
            count = fanout
        largest = max(largest, count)
        total += count
        indptr[place + 1] = total
    return largest


@inline
def _seen(picks: np.ndarray, begin: int, end: int, value: int) -> bool:
    found = False
    for index in range(begin, end):  # no early exit: this way it is vectorised
        found |= picks[index] == value
    return found


@inline
def _insert(table: np.ndarray, value: int) -> bool:
    """Add to an open-addressing set of non-negative values; whether it was new."""
    mask = len(table) - 1
    slot = value & mask
    while table[slot] >= 0:
        if table[slot] == value:
            return False
        slot = (slot + 1) & mask
    table[slot] = value
    return True


@inline
def _pick_distinct(
    picks: np.ndarray, at: int, count: int, degree: int, draws: np.ndarray, table: np.ndarray
) -> None:
    """Floyd's algorithm: ``count`` distinct numbers below ``degree`` at ``picks[at:]``.

    Draw ``j`` falls on t in [0, i], where i = degree - count + j; where t has been picked
    before, i is picked, which cannot have been.  On many threads: draw j picks its i exactly
    if some earlier draw fell on the same t, or t is the i of an earlier draw that did so.
    """
    if count > _FEW:
        table[:] = -1
    for index in range(count):
        last = degree - count + index
        pick = below(draws[at + index], last + 1)
        if count <= _FEW:
            if _seen(picks, at, at + index, pick):
                pick = last
        elif not _insert(table, pick):
            pick = last
            _insert(table, pick)
        picks[at + index] = pick


@kernel
def _fill(
    begin: int,
    end: int,
    seeds: int,
    seed_width: int,
    pointers: np.ndarray,
    found: np.ndarray,
    indptr: np.ndarray,
    replace: bool,
    largest: int,
    key: int,
    neighbors: int,
    eids: int,
    width: int,
) -> None:
    """Write the samples of seeds ``[begin, end)`` to the addresses ``neighbors`` and ``eids``."""
    blocks = (largest + 1) // 2
    step = max(1, min(_SEEDS, _DRAWS // (2 * blocks + 1)))
    nodes = np.empty(step * blocks, np.int64)
    block_of = np.empty(step * blocks, np.int64)
    draws = np.empty(2 * step * blocks, np.uint64)
    picks = np.empty(2 * step * blocks, np.int64)
    table_size = 1
    while largest > _FEW and table_size < 2 * largest:
        table_size *= 2
    table = np.empty(table_size, np.int64)

    for start in range(begin, end, step):
        stop = min(start + step, end)

        used = 0
        for place in range(start, stop):
            count = indptr[place + 1] - indptr[place]
            degree = found[place, DEGREE]
            if count == degree and not replace:
                segment, first = found[place, SEGMENT], found[place, FIRST_EDGE]
                _prefetch_range(pointers[segment, INDICES] + first * width, count * width)
                edge_ids = stored_ids(pointers, segment)
                if edge_ids != 0:
                    _prefetch_range(edge_ids + first * width, count * width)
            else:
                node = load_id(seeds, place, seed_width)
                for block in range((count + 1) // 2):
                    nodes[used] = node
                    block_of[used] = block
                    used += 1
        for index in range(used):
            even, odd = philox(nodes[index], block_of[index], SAMPLE_STREAM, key)
            draws[2 * index] = even
            draws[2 * index + 1] = odd

        at = 0
        for place in range(start, stop):
            count = indptr[place + 1] - indptr[place]
            degree = found[place, DEGREE]
            if count == degree and not replace:
                continue
            if replace:
                for index in range(count):
                    picks[at + index] = below(draws[at + index], degree)
            else:
                _pick_distinct(picks, at, count, degree, draws, table)
            segment, first = found[place, SEGMENT], found[place, FIRST_EDGE]
            edge_ids = stored_ids(pointers, segment)
            for index in range(count):
                prefetch(pointers[segment, INDICES] + (first + picks[at + index]) * width)
                if edge_ids != 0:
                    prefetch(edge_ids + (first + picks[at + index]) * width)
            at += (count + 1) // 2 * 2

        at = 0
        for place in range(start, stop):
            to = indptr[place]
            count = indptr[place + 1] - to
            segment, first = found[place, SEGMENT], found[place, FIRST_EDGE]
            edge_ids, shift = stored_ids(pointers, segment), found[place, SHIFT]
            indices = pointers[segment, INDICES]
            if count == found[place, DEGREE] and not replace:
                copy_bytes(neighbors + to * width, indices + first * width, count * width)
                if edge_ids != 0:
                    copy_bytes(eids + to * width, edge_ids + first * width, count * width)
                else:
                    for index in range(count):
                        store_id(eids, to + index, width, first + index + shift)
            else:
                for index in range(count):
                    edge = first + picks[at + index]
                    store_id(neighbors, to + index, width, load_id(indices, edge, width))
                    store_id(eids, to + index, width, edge_id(edge_ids, edge, shift, width))
                at += (count + 1) // 2 * 2


@sample_neighbors_op.cpu
def _sample_neighbors(
    seeds: torch.Tensor,
    rows: TieredRows,
    idtype: torch.dtype,
    fanout: int,
    replace: bool,
    key: int,
    sms: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tiers, pointers, position, num_rows = rows
    graph = rows_argument(tiers, pointers, position)
    found = find_edges(seeds, graph, num_rows)
    replace = replace and fanout >= 0
    indptr = torch.zeros(seeds.numel() + 1, dtype=torch.int64)
    largest = _count(found, fanout, replace, indptr.numpy())
    if not replace and largest < fanout:
        largest = 0  # no seed draws
    total = int(indptr[-1])
    neighbors = torch.empty(total, dtype=idtype)
    eids = torch.empty(total, dtype=idtype)
    parallel.run(
        _fill,
        seeds.numel(),
        GRAIN,
        seeds.data_ptr(),
        seeds.element_size(),
        graph[1],
        found,
        indptr.numpy(),
        replace,
        largest if fanout >= 0 else 0,
        key,
        neighbors.data_ptr(),
        eids.data_ptr(),
        idtype.itemsize,
    )
    return indptr, neighbors, eids

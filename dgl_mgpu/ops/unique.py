"""Append-unique; see ``kernels/unique.cu`` and ``kernels/node_table.cuh``.

On the CPU the ids (seeds, then neighbors; an id's *place* counts through both) are dealt by hash
into buckets whose tables fit a core's cache.  Buckets are independent, so threads need no locks,
and keep ids in the order of their places, so the first id of its kind in a bucket is the
first of all.  A bit for each place says whether it starts a new node; counting bits numbers
the nodes.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import cpu
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import check_ids
from dgl_mgpu.ops.cpu import count_bits, inline, kernel, load_id, scratch, store_id
from dgl_mgpu.ops.device import Kernel, Launch, c_type
from dgl_mgpu.ops.library import Operator
from dgl_mgpu.ops.workspace import NodePrefix, Workspace, beginning, workspace

_ACTION = "append unique neighbors to seeds"


@Operator
def append_unique_op(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.library.get_ctx().new_dynamic_size()
    return neighbors.new_empty(total), torch.empty_like(neighbors)


def append_unique(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    """Number the nodes of a sample: seeds first, then each new neighbor as it comes.

    Parameters
    ----------
    seeds : Tensor, int32 or int64, shape (n,)
        Destination nodes.
    neighbors : Tensor, same dtype, shape (E,)
        Source nodes of the sampled edges.

    Returns
    -------
    nodes : Tensor, same dtype, shape (m,)
        ``seeds`` as given, so that row ``i`` of a block's destination is seed ``i`` (a repeated
        seed has a row of its own, as in ``dgl.to_block``); then the neighbors that are not
        among them, once each, by first occurrence.
    local : Tensor, same dtype, shape (E,)
        Index in ``nodes`` of each neighbor; the first one where a seed is repeated.

    Raises
    ------
    InvalidInputError
        If the inputs are not two vectors of one integer dtype.
    IdOutOfRangeError
        If an id is negative.

    Notes
    -----
    Same result as WholeGraph's append-unique (section III-C) but for the order of the new
    nodes, which there is the order of a hash table.
    """
    seeds = check_ids(seeds, _ACTION)
    neighbors = check_ids(neighbors, _ACTION, seeds.device)
    if seeds.dtype != neighbors.dtype:
        raise InvalidInputError(
            _ACTION,
            f"seeds has dtype {seeds.dtype}, but neighbors has dtype {neighbors.dtype}",
            "convert one to the dtype of the other",
        )
    if seeds.numel() + neighbors.numel() > torch.iinfo(seeds.dtype).max:
        raise InvalidInputError(
            _ACTION,
            f"there are more ids than {seeds.dtype} can number",
            "pass int64 ids or a smaller batch",
        )
    return torch.ops.dgl_mgpu.append_unique(seeds, neighbors)


#: Ids that are worth waking a thread for, and up to how many one thread numbers alone.
_GRAIN = _FEW = 32768
#: Ids per bucket aimed at: its table and keys stay in a core's second-level cache.
_BUCKET = 8192
_MAX_BUCKETS = 1 << 12
_WORD = 64

_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)


@inline
def _hash(key: int) -> np.int64:
    mixed = np.uint64(key ^ (key >> 32)) * _FIBONACCI
    return np.int64((mixed ^ (mixed >> np.uint64(32))) >> np.uint64(1))


@inline
def _bucket_of(hashed: int, buckets: int) -> int:
    return (hashed >> 40) & (buckets - 1)


@inline
def _id_at(place: int, seeds: int, num_seeds: int, neighbors: int, width: int) -> int:
    if place < num_seeds:
        return load_id(seeds, place, width)
    return load_id(neighbors, place - num_seeds, width)


@kernel
def _count(
    begin: int, end: int, bounds: np.ndarray, seeds: int, num_seeds: int, neighbors: int,
    width: int, counts: np.ndarray,
) -> int:  # fmt: skip
    """Count the ids of each bucket in chunks ``[begin, end)``; a place with a bad id, or -1."""
    for chunk in range(begin, end):
        mine = counts[chunk]
        mine[:] = 0
        for place in range(bounds[chunk], bounds[chunk + 1]):
            key = _id_at(place, seeds, num_seeds, neighbors, width)
            if key < 0:
                return place
            mine[_bucket_of(_hash(key), len(mine))] += 1
    return -1


@kernel
def _offsets(counts: np.ndarray, starts: np.ndarray) -> None:
    """Turn counts into the place where each chunk's share of each bucket begins."""
    chunks, buckets = counts.shape
    total = 0
    for bucket in range(buckets):
        starts[bucket] = total
        for chunk in range(chunks):
            count = counts[chunk, bucket]
            counts[chunk, bucket] = total
            total += count
    starts[buckets] = total


@kernel
def _deal(
    begin: int, end: int, bounds: np.ndarray, seeds: int, num_seeds: int, neighbors: int,
    width: int, offsets: np.ndarray, keys: np.ndarray, places: np.ndarray,
) -> None:  # fmt: skip
    """Move the ids of chunks ``[begin, end)`` and their places into the buckets."""
    for chunk in range(begin, end):
        mine = offsets[chunk]
        for place in range(bounds[chunk], bounds[chunk + 1]):
            key = _id_at(place, seeds, num_seeds, neighbors, width)
            bucket = _bucket_of(_hash(key), len(mine))
            entry = mine[bucket]
            mine[bucket] = entry + 1
            keys[entry] = key
            places[entry] = place


@kernel
def _find_first(
    begin: int, end: int, starts: np.ndarray, keys: np.ndarray, places: np.ndarray, num_seeds: int,
    first: int, width: int,
) -> None:  # fmt: skip
    """For each neighbor in buckets ``[begin, end)``, the first place of its id."""
    largest = 0
    for bucket in range(begin, end):
        largest = max(largest, starts[bucket + 1] - starts[bucket])
    size = 1
    while size < 2 * largest:
        size *= 2
    # A slot holds an entry of the bucket at hand; entries of earlier buckets count as empty.
    table = np.full(size, -1, np.int64)
    for bucket in range(begin, end):
        start = starts[bucket]
        for entry in range(start, starts[bucket + 1]):
            key = keys[entry]
            slot = _hash(key) & (size - 1)
            other = table[slot]
            while other >= start and keys[other] != key:
                slot = (slot + 1) & (size - 1)
                other = table[slot]
            if other < start:
                table[slot] = entry
                other = entry
            if places[entry] >= num_seeds:
                store_id(first, places[entry] - num_seeds, width, places[other])


@kernel
def _mark_new(
    begin: int, end: int, num_seeds: int, total: int, first: int, width: int, bits: np.ndarray,
    counts: np.ndarray,
) -> None:  # fmt: skip
    """Set the bit of each place in words ``[begin, end)`` that starts a node; count them."""
    for word in range(begin, end):
        marks = np.uint64(0)
        start = word * _WORD
        for place in range(start, min(start + _WORD, total)):
            if place < num_seeds or load_id(first, place - num_seeds, width) == place:
                marks |= np.uint64(1) << np.uint64(place - start)
        bits[word] = np.int64(marks)
        counts[word] = count_bits(bits[word])


@kernel
def _prefix_sum(counts: np.ndarray) -> int:
    total = 0
    for index in range(len(counts)):
        count = counts[index]
        counts[index] = total
        total += count
    return total


@kernel
def _number(
    begin: int, end: int, num_seeds: int, neighbors: int, width: int, bits: np.ndarray,
    before: np.ndarray, nodes: int, local: int,
) -> None:  # fmt: skip
    """Turn the first places of neighbors ``[begin, end)`` into numbers of nodes."""
    for index in range(begin, end):
        place = load_id(local, index, width)
        word = place // _WORD
        below = (np.uint64(1) << np.uint64(place % _WORD)) - np.uint64(1)
        number = before[word] + count_bits(bits[word] & np.int64(below))
        if place == index + num_seeds:
            store_id(nodes, number, width, load_id(neighbors, index, width))
        store_id(local, index, width, number)


@kernel
def _number_few(
    total: int, seeds: int, num_seeds: int, neighbors: int, width: int, keys: np.ndarray,
    table: np.ndarray, local: int,
) -> int:  # fmt: skip
    """Number all ids one by one; how many nodes there are, or -1 - place for a bad id's place.

    ``keys`` gets the nodes; ``table``, a power of two, has for each slot a node's number.
    """
    table[:] = -1
    mask, count = len(table) - 1, 0
    for place in range(total):
        key = _id_at(place, seeds, num_seeds, neighbors, width)
        if key < 0:
            return -1 - place
        slot = _hash(key) & mask
        number = table[slot]
        while number >= 0 and keys[number] != key:
            slot = (slot + 1) & mask
            number = table[slot]
        if number < 0 or place < num_seeds:
            keys[count] = key
            if number < 0:
                table[slot] = count
                number = count
            count += 1
        if place >= num_seeds:
            store_id(local, place - num_seeds, width, number)
    return count


def _append_few(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`append_unique`, on one thread: to wake another would take longer."""
    total = seeds.numel() + neighbors.numel()
    keys = scratch("unique_keys", total)
    table = scratch("unique_table", 1 << (2 * total).bit_length())
    local = torch.empty_like(neighbors)
    count = _number_few(
        total, seeds.data_ptr(), seeds.numel(), neighbors.data_ptr(), seeds.element_size(), keys,
        table, local.data_ptr(),
    )  # fmt: skip
    if count < 0:
        raise_at_negative_id(torch.cat([seeds, neighbors]), -1 - count)
    return torch.from_numpy(keys[:count]).to(seeds.dtype, copy=True), local


@append_unique_op.cpu
def _append_unique_cpu(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    num_seeds, num_neighbors, width = seeds.numel(), neighbors.numel(), seeds.element_size()
    total = num_seeds + num_neighbors
    if total <= _FEW:
        return _append_few(seeds, neighbors)
    ids = (seeds.data_ptr(), num_seeds, neighbors.data_ptr(), width)

    bounds = np.array(cpu.split(total, _GRAIN), dtype=np.int64)
    chunks = len(bounds) - 1
    buckets = 1
    while buckets * _BUCKET < total and buckets < _MAX_BUCKETS:
        buckets *= 2
    counts = np.empty((chunks, buckets), dtype=np.int64)
    for place in cpu.run(_count, chunks, 1, bounds, *ids, counts):
        if place >= 0:
            raise_at_negative_id(torch.cat([seeds, neighbors]), place)
    starts = np.empty(buckets + 1, dtype=np.int64)
    _offsets(counts, starts)
    keys, places = scratch("unique_keys", total), scratch("unique_places", total)
    cpu.run(_deal, chunks, 1, bounds, *ids, counts, keys, places)

    local = torch.empty_like(neighbors)
    first = local.data_ptr()
    cpu.run(_find_first, buckets, 1, starts, keys, places, num_seeds, first, width)

    words = -(-total // _WORD)
    bits, before = scratch("unique_bits", words), scratch("unique_before", words)
    cpu.run(_mark_new, words, _GRAIN // _WORD, num_seeds, total, first, width, bits, before)
    nodes = torch.empty(_prefix_sum(before), dtype=seeds.dtype)
    nodes[:num_seeds] = seeds
    cpu.run(
        _number, num_neighbors, _GRAIN, num_seeds, neighbors.data_ptr(), width, bits, before,
        nodes.data_ptr(), first,
    )  # fmt: skip
    return nodes, local


_THREADS = 512
#: Nodes in the largest hash table whose entries 32-bit integers number.
_MAX_NODES = (1 << 32) // 3


@functools.cache
def _kernel(dtype: torch.dtype, ample: bool) -> Kernel:
    types = f"{c_type(dtype)}, {'true' if ample else 'false'}"
    return Kernel("unique.cu", f"dgl_mgpu::append_unique<{types}>", cooperative=True)


def table_size(nodes: int, dtype: torch.dtype) -> tuple[int, int]:
    """Number of words of a hash table for a number of nodes, and the mask of its slots.

    Raises InvalidInputError if there are too many nodes.
    """
    if nodes > _MAX_NODES:
        raise InvalidInputError(
            "number the nodes of a sample on a GPU",
            f"there may be {nodes} nodes, and its hash table has room for {_MAX_NODES}",
            "pass fewer seeds and neighbors",
        )
    slots = 1 << max(4, (nodes + nodes // 2).bit_length())
    return slots * (1 if dtype == torch.int32 else 2), slots - 1


def hash_table(space: Workspace, nodes: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Allocate a hash table for a number of nodes: its words, and the mask of its slots."""
    words, mask = table_size(nodes, dtype)
    return space.buffer("table", words, torch.int64), mask


#: Places of nodes and ``local`` among the arguments of :func:`numbering_launch`'s launch.
NODES, LOCAL = 4, 5


def numbering_launch(
    space: Workspace,
    seeds: NodePrefix,
    local: Tensor,
    exact_neighbors: Tensor | None,
    capacity: int,
    report: Tensor,
) -> Launch:
    """The launch that numbers ``local``, with a hash table for at most ``capacity`` nodes.

    For the workspace's present buffers; see ``kernels/unique.cu``.
    """
    nodes, num_seeds, exact_seeds = seeds
    device, num_neighbors = nodes.device, local.numel()
    kernel = _kernel(nodes.dtype, exact_neighbors is not None)
    blocks = gpu.blocks_within(kernel, _THREADS, -(-num_neighbors // _THREADS), device)
    table, mask = hash_table(space, capacity, nodes.dtype)
    return Launch(
        kernel, blocks, _THREADS, num_seeds, exact_seeds, num_neighbors, exact_neighbors, nodes,
        local, space.buffer("slots", num_neighbors, torch.int32),
        space.buffer("numbers", num_neighbors, torch.int32), space.control(blocks), table, mask,
        report, device=device,
    )  # fmt: skip


def raise_at_negative_id(ids: Tensor, place: int) -> None:
    """Raise IdOutOfRangeError for an id of seeds and then neighbors."""
    raise IdOutOfRangeError(
        _ACTION,
        f"there is the negative id {int(ids[place])} at place {place} of seeds and neighbors",
        "pass non-negative ids",
    )


@append_unique_op.cuda
def _append_unique_cuda(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    device, num_seeds, space = seeds.device, seeds.numel(), workspace(seeds.device)
    gpu.raise_faults(device, wait=False)
    total = num_seeds + neighbors.numel()
    table_size(total, seeds.dtype)  # raises before anything is allocated
    nodes = torch.empty(total, dtype=seeds.dtype, device=device)
    capacity, full = total, True
    while full:
        nodes[:num_seeds] = seeds
        local = neighbors.clone()
        with space.lock:
            first = NodePrefix(nodes, num_seeds)
            numbering_launch(space, first, local, None, capacity, space.report)()
            bad, overflow, count = space.read_report(3)
        full = overflow == 0 and bad < 0
        capacity *= 4
    if bad >= 0:
        raise_at_negative_id(torch.cat([seeds, neighbors]), bad)
    return beginning(nodes, count), local

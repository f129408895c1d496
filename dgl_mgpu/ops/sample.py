"""Uniform neighbour sampling; see ``kernels/sample.cu``.

The CPU makes two passes: find each seed's edges and count its sample, then, after a prefix sum,
fill.  The second works on a few dozen seeds at a time, in steps over all of them, so that the
random numbers are vectorised and the misses of all seeds overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace as with_fields
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.ops import cpu
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import check_ids, check_integer, check_types, fanout_of, raise_at_bad_id
from dgl_mgpu.ops.cpu import (
    CACHE_LINE,
    copy_bytes,
    inline,
    kernel,
    load_id,
    prefetch,
    rows_argument,
    store_id,
)
from dgl_mgpu.ops.device import (
    Kernel,
    Launch,
    buckets_of,
    c_type,
    position_pointer,
    position_type,
)
from dgl_mgpu.ops.edges import (
    DEGREE,
    FIRST_EDGE,
    GRAIN,
    LOOK_UP,
    SEGMENT,
    SHIFT,
    HopOptions,
    edge_id,
    find_edges,
    new_sample,
    stored_ids,
)
from dgl_mgpu.ops.library import Operator
from dgl_mgpu.ops.philox import SAMPLE_STREAM, SampleKey, below, philox
from dgl_mgpu.ops.sample_weighted import EdgeTimes, weighting
from dgl_mgpu.ops.view import INDICES, GraphView, RowView, TieredRows, tiered_rows
from dgl_mgpu.ops.workspace import NodePrefix, Workspace, beginning, workspace

#: An edge type.
E = TypeVar("E", bound=Hashable)


@Operator
def sample_neighbors_op(
    seeds: Tensor, rows: TieredRows, idtype: torch.dtype, options: HopOptions
) -> tuple[Tensor, Tensor, Tensor]:
    return new_sample(seeds, idtype)


class SampledNeighbors(NamedTuple):
    """In-edges sampled for a batch of seeds, in the order of the seeds.

    Attributes
    ----------
    indptr : Tensor, int64, shape (n + 1,)
        Seed ``i`` has the edges ``indptr[i]`` to ``indptr[i + 1]``.
    neighbors : Tensor, the graph's idtype, shape (E,)
        Source node of each edge.
    eids : Tensor, the graph's idtype, shape (E,)
        Edge ids.
    """

    indptr: Tensor
    neighbors: Tensor
    eids: Tensor


def sample_neighbors(
    view: GraphView,
    seeds: Tensor,
    fanout: int,
    key: SampleKey,
    *,
    replace: bool = False,
    weights: RowView | None = None,
    times: EdgeTimes | None = None,
) -> SampledNeighbors:
    """Sample in-edges of each seed.

    Parameters
    ----------
    view : GraphView
        The topology as this rank sees it.
    seeds : Tensor, int32 or int64, shape (n,)
        Destination nodes; repeats are allowed and get equal samples.
    fanout : int
        Edges per seed; -1 takes all.
    key : SampleKey
        Names the experiment.  A node's sample depends on the key and the node and on
        nothing else.
    replace : bool
        Whether an edge may be drawn more than once.  Without, a seed of no more than
        ``fanout`` edges gives all of them, in the order in which they are stored.
    weights : RowView of scalars, float32, float64, bool or uint8, optional
        Weight of each edge id: an edge is drawn with a probability proportional to it, and
        never where it is 0, not even by ``fanout=-1``.  bool and uint8 are masks (any value
        but 0 counts as 1).  See :mod:`dgl_mgpu.ops.sample_weighted`.
    times : EdgeTimes, optional
        Temporal sampling: only the edges no later than the seed's time are drawn, as if the
        others had weight 0; a seed without such edges gets none.  A node asked for at two
        times may get two samples.

    Returns
    -------
    SampledNeighbors

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype, shape or value.
    IdOutOfRangeError
        If a seed is not a node; it names the first one.
    InvalidWeightError
        If a seed has a weight that is NaN, infinite or negative, or edges with float weights
        that are all zero.  With ``times``, only the edges no later than the seed's count.

    Notes
    -----
    Draw ``j`` of a node is draw ``j`` of its Philox stream ``SAMPLE_STREAM``
    (:mod:`dgl_mgpu.ops.philox`), mapped to [0, b) as the high half of its product with b.
    Uniform with replacement: the edges at draws 0 … fanout - 1, with b the degree d.
    Without: R. W. Floyd's algorithm (Bentley, Floyd, CACM 30(9), 1987), b = d - fanout + j + 1.
    It needs one draw an edge, like WholeGraph's Algorithm 1, and can like it be resolved in
    parallel: a draw collides exactly if an earlier draw fell on the same index, or on this
    index falls the replacement of an earlier collision.
    """
    action = f"sample {fanout} neighbors"
    seeds = check_ids(seeds, action, view.tiers.device)
    fanout = check_integer(fanout, "fanout", -1, action)
    graph = (seeds, *tiered_rows(view), view.idtype)
    draw = (fanout, replace, key.fold(), view.sms)
    if weights is None and times is None:
        return SampledNeighbors(*torch.ops.dgl_mgpu.sample_neighbors(*graph, *draw))
    weighed = weighting(view, seeds, weights, times)
    return SampledNeighbors(*torch.ops.dgl_mgpu.sample_neighbors_weighted(*graph, *weighed, *draw))


def sample_etype_neighbors(
    views: Mapping[E, GraphView],
    seeds: Mapping[E, Tensor],
    fanouts: int | Mapping[E, int],
    key: SampleKey,
    *,
    replace: bool = False,
    weights: Mapping[E, RowView] | None = None,
    times: Mapping[E, EdgeTimes] | None = None,
) -> dict[E, SampledNeighbors]:
    """Sample in-edges of each seed, from each edge type on its own.

    Parameters
    ----------
    views : mapping of edge type to GraphView
        All edge types of the graph: the place of a type among them enters the key, so that
        two types between the same nodes are sampled independently.
    seeds : mapping of edge type to Tensor, int32 or int64, shape (n,)
        Destination nodes for each edge type; a type left out is not sampled.
    fanouts : int or mapping of edge type to int
        Edges per seed and edge type.
    key, replace, weights, times
        As in :func:`sample_neighbors`; ``weights`` and ``times`` by edge type, a type left out
        is uniform and has no times.

    Returns
    -------
    dict of edge type to SampledNeighbors
        For the edge types of ``seeds``, in the order of ``views``.

    Raises
    ------
    InvalidInputError
        If an edge type is unknown or has no fanout; else as :func:`sample_neighbors`.
    """
    action = "sample neighbors of each edge type"
    check_types(views, action, seeds=seeds, weights=weights, times=times)
    return {
        etype: sample_neighbors(
            view,
            seeds[etype],
            fanout_of(fanouts, etype, action),
            with_fields(key, etype=number),
            replace=replace,
            weights=(weights or {}).get(etype),
            times=(times or {}).get(etype),
        )
        for number, (etype, view) in enumerate(views.items())
        if etype in seeds
    }


#: Seeds sampled together, and the draws they may need together.
_SEEDS, _DRAWS = 64, 1024
#: Sampled edges that are worth waking a thread for.
_EDGES = 8192
#: Up to here repeated picks are found by comparing with all earlier ones, then by hashing.
_FEW = 48


@inline
def _prefetch_range(address: int, size: int) -> None:
    """Ask for the first lines of a range; the hardware prefetcher follows with the rest."""
    for offset in range(0, min(size, 4 * CACHE_LINE), CACHE_LINE):
        prefetch(address + offset)


@kernel
def _count(ranges: np.ndarray, fanout: int, replace: bool, indptr: np.ndarray) -> int:
    """Prefix sum of the sample sizes; the largest of them."""
    total = 0
    largest = 0
    for place in range(len(ranges)):
        count = ranges[place, DEGREE]
        if fanout >= 0 and count > 0 and (replace or count > fanout):
            count = fanout
        largest = max(largest, count)
        total += count
        indptr[place + 1] = total
    return largest


@inline
def _seen(picks: np.ndarray, begin: int, end: int, value: int) -> bool:
    repeated = False
    for index in range(begin, end):  # no early exit: this way it is vectorised
        repeated |= picks[index] == value
    return repeated


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
    begin: int, end: int, seeds: int, seed_width: int, pointers: np.ndarray, ranges: np.ndarray,
    indptr: np.ndarray, replace: bool, largest: int, key: int, neighbors: int, eids: int,
    width: int,
) -> None:  # fmt: skip
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
            degree = ranges[place, DEGREE]
            if count == degree and not replace:
                segment, first = ranges[place, SEGMENT], ranges[place, FIRST_EDGE]
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
            degree = ranges[place, DEGREE]
            if count == degree and not replace:
                continue
            if replace:
                for index in range(count):
                    picks[at + index] = below(draws[at + index], degree)
            else:
                _pick_distinct(picks, at, count, degree, draws, table)
            segment, first = ranges[place, SEGMENT], ranges[place, FIRST_EDGE]
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
            segment, first = ranges[place, SEGMENT], ranges[place, FIRST_EDGE]
            edge_ids, shift = stored_ids(pointers, segment), ranges[place, SHIFT]
            indices = pointers[segment, INDICES]
            if count == ranges[place, DEGREE] and not replace:
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
def _sample_neighbors_cpu(
    seeds: Tensor, rows: TieredRows, idtype: torch.dtype, options: HopOptions
) -> tuple[Tensor, Tensor, Tensor]:
    fanout, replace, key, _ = options
    graph = rows_argument(*rows[:3])
    ranges = find_edges(seeds, graph, rows.num_rows)
    replace = replace and fanout >= 0
    indptr = torch.zeros(seeds.numel() + 1, dtype=torch.int64)
    largest = _count(ranges, fanout, replace, indptr.numpy())
    if not replace and largest < fanout:
        largest = 0  # no seed draws
    total = int(indptr[-1])
    neighbors = torch.empty(total, dtype=idtype)
    eids = torch.empty(total, dtype=idtype)
    grain = max(GRAIN, _EDGES * seeds.numel() // max(total, 1))
    cpu.run(
        _fill, seeds.numel(), grain, seeds.data_ptr(), seeds.element_size(), graph[1], ranges,
        indptr.numpy(), replace, largest if fanout >= 0 else 0, key, neighbors.data_ptr(),
        eids.data_ptr(), idtype.itemsize,
    )  # fmt: skip
    return indptr, neighbors, eids


_THREADS = 256
#: Edges up to which the largest possible sample is allocated in advance.
_MAX_EDGES = 1 << 27


@functools.cache
def _kernel(name: str, types: str) -> Kernel:
    return Kernel("sample.cu", f"dgl_mgpu::{name}<{types}>", cooperative=name != "fill_edges")


def range_buffers(
    buffer: Callable[[str, int, torch.dtype], Tensor], count: int
) -> tuple[Tensor, ...]:
    """Buffers for the location of each seed's edges, the kernels' struct ``SeedEdges``."""
    return (
        buffer("first", count, torch.int64),
        buffer("degree", count, torch.int64),
        buffer("shift", count, torch.int64),
        buffer("segment", count, torch.int32),
    )


def seed_order(
    buffer: Callable[[str, int, torch.dtype], Tensor], count: int, num_rows: int, ordered_from: int
) -> tuple[Tensor | int, ...]:
    """Working memory for ``count`` seeds in order, the kernels' ``SeedOrder``: five words."""
    # One bucket at least, for seeds that are no nodes.
    shift, number = buckets_of(max(num_rows, 1))
    seeds, counts = buffer("order", count, torch.int32), buffer("buckets", number + 1, torch.int32)
    return seeds, shift, number, counts, ordered_from


#: The same for unordered seeds, and as a kernel parameter.
NO_ORDER = (0,) * 5
_NO_ORDER_STRUCT = gpu.struct(*NO_ORDER)


class HopOutputs(NamedTuple):
    """What a hop is written to: neighbors and edge ids from the place on that ``start`` has."""

    indptr: Tensor
    start: Tensor | None
    neighbors: Tensor
    eids: Tensor


#: Place of the key among the arguments of a hop's launch, of which those of the seeds come first.
HOP_KEY = 10


def hop_launch(
    space: Workspace,
    seeds: NodePrefix,
    rows: TieredRows,
    options: HopOptions,
    out: HopOutputs,
    report: Tensor,
    ordered_from: int = 0,
) -> Launch:
    """The launch that samples one hop, for the workspace's present buffers.

    See ``kernels/sample.cu``.  From ``ordered_from`` seeds on, they are taken in the order of their
    edges' addresses; 0 for never.
    """
    tiers, pointers, position, num_rows = rows
    nodes, count, _ = seeds
    fanout, replace, key, sms = options
    device, ordered = nodes.device, 0 < ordered_from <= count
    types = f"{c_type(nodes.dtype)}, {c_type(out.eids.dtype)}, {position_type(position)}"
    types += f", {'true' if ordered else 'false'}"
    order = _NO_ORDER_STRUCT
    if ordered:
        order = gpu.struct(*seed_order(space.buffer, count, num_rows, ordered_from))
    kernel = _kernel("sample_hop", types)
    blocks = _blocks(kernel, count, device, sms)
    return Launch(
        kernel, blocks, _THREADS, *seeds, tiers, len(tiers), pointers, position_pointer(position),
        num_rows, fanout, replace, key, *range_buffers(space.buffer, count), *out,
        space.control(blocks), report, order, device=device,
    )  # fmt: skip


def _blocks(kernel: Kernel, count: int, device: torch.device, sms: int) -> int:
    # A few lanes a seed.
    return gpu.blocks_within(kernel, _THREADS, -(-8 * count // _THREADS), device, sms)


@sample_neighbors_op.cuda
def _sample_neighbors_cuda(
    seeds: Tensor, rows: TieredRows, idtype: torch.dtype, options: HopOptions
) -> tuple[Tensor, Tensor, Tensor]:
    tiers, pointers, position, num_rows = rows
    fanout, replace, key, sms = options
    device, count, space = seeds.device, seeds.numel(), workspace(seeds.device)
    gpu.raise_faults(device, wait=False)
    indptr = torch.empty(count + 1, dtype=torch.int64, device=device)

    def new_edges(edges: int) -> tuple[Tensor, Tensor]:
        neighbors = torch.empty(edges, dtype=idtype, device=device)
        return neighbors, torch.empty_like(neighbors)

    def read_report() -> int:
        bad, total = space.read_report(2)
        raise_at_bad_id([bad], seeds, num_rows, LOOK_UP)
        return total

    with space.lock:
        if fanout >= 0 and count * fanout <= _MAX_EDGES:
            try:
                neighbors, eids = new_edges(count * fanout)
            except torch.cuda.OutOfMemoryError:
                pass  # the sample itself may be much smaller
            else:
                out = HopOutputs(indptr, None, neighbors, eids)
                hop_launch(space, NodePrefix(seeds, count), rows, options, out, space.report)()
                total = read_report()
                return indptr, beginning(neighbors, total), beginning(eids, total)
        types = f"{c_type(seeds.dtype)}, {c_type(idtype)}, {position_type(position)}"
        kernel = _kernel("count_edges", types)
        blocks = _blocks(kernel, count, device, sms)
        ranges = (*range_buffers(space.buffer, count), indptr)
        kernel(
            blocks, _THREADS, seeds, count, tiers, len(tiers), pointers, position_pointer(position),
            num_rows, fanout, replace, *ranges, space.control(blocks), space.report, device=device,
        )  # fmt: skip
        neighbors, eids = new_edges(read_report())
        _kernel("fill_edges", types)(
            blocks, _THREADS, seeds, count, pointers, fanout, replace, key, *ranges, neighbors,
            eids, device=device,
        )  # fmt: skip
    return indptr, neighbors, eids

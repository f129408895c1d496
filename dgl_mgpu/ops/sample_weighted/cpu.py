"""Neighbour sampling by edge weight and by time on the CPU.

Three passes: find each seed's edges; check and count its weights; then, after a prefix sum of
the sample sizes, fill.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    Rows,
    inline,
    kernel,
    load_float32,
    load_float64,
    load_id,
    load_int64,
    load_uint8,
    position_of,
    rows_argument,
    segment_of,
    store_id,
)
from dgl_mgpu.ops.philox import SAMPLE_STREAM, draw, exponential, mulhi64
from dgl_mgpu.ops.sample_weighted.op import (
    Weighting,
    check_weights_op,
    raise_bad_weight,
    sample_neighbors_weighted_op,
)
from dgl_mgpu.ops.view import INDICES, TieredRows

#: Nodes checked at a time by ``check_weights``, to bound its memory.
_CHECKED_TOGETHER = 1 << 20
_ONE = np.uint64(1)

#: Weights and the bytes of one: 4 or 8 of a float, 1 of a mask, 0 where all weights are 1. Times
#: and the bytes of one, negative those of floats, 0 where there are none; address of the seeds'.
EdgeWeights = tuple[Rows, int, Rows, int, int]
_NO_ROWS: Rows = (np.empty((0, 4), np.int64), np.empty(0, np.int64), 0, 0)


@inline
def _address_of(edge: int, rows: Rows, size: int) -> int:
    tiers, pointers, position, width = rows
    segment, local = segment_of(position_of(edge, position, width), tiers)
    return pointers[segment] + local * size


@inline
def _in_time(edge: int, place: int, weights: EdgeWeights) -> bool:
    """Whether an edge is no later than the time of the seed at a place."""
    _, _, times, size, until = weights
    if size == 0:
        return True
    if size > 0:
        return load_id(_address_of(edge, times, size), 0, size) <= load_int64(until + 8 * place)
    address = _address_of(edge, times, -size)
    time = load_float64(address) if size == -8 else np.float64(load_float32(address))
    return time <= load_float64(until + 8 * place)


@inline
def _weight_of(edge: int, weights: EdgeWeights) -> float:
    """Weight of an edge id that is in time."""
    rows, size = weights[0], weights[1]
    if size == 0:
        return 1.0
    address = _address_of(edge, rows, size)
    if size == 1:
        return 1.0 if load_uint8(address) != 0 else 0.0
    if size == 4:
        return np.float64(load_float32(address))
    return load_float64(address)


@inline
def _weight_at(edge: int, place: int, weights: EdgeWeights) -> float:
    """Weight of an edge id for the seed at a place."""
    return _weight_of(edge, weights) if _in_time(edge, place, weights) else 0.0


@inline
def _edge_id(edge_ids: tuple[int, int], edge: int, width: int) -> int:
    return edge_id(edge_ids[0], edge, edge_ids[1], width)


@inline
def _scaled(weight: float, largest: float) -> np.uint64:
    """Weight relative to the node's largest one as an integer of at most 2**32."""
    if weight == 0.0:
        return np.uint64(0)
    return max(np.uint64(weight / largest * 4294967296.0), _ONE)


@kernel
def _weigh(
    begin: int,
    end: int,
    pointers: np.ndarray,
    width: int,
    weights: EdgeWeights,
    found: np.ndarray,
    positive: np.ndarray,
    largest: np.ndarray,
) -> tuple[int, int]:
    """Count the positive weights of seeds ``[begin, end)`` and find the largest.

    Returns the first bad place and the id of its bad edge, -1 where all its weights are zero;
    (-1, -1) if none is bad.
    """
    for place in range(begin, end):
        edge_ids = (stored_ids(pointers, found[place, SEGMENT]), found[place, SHIFT])
        first, degree = found[place, FIRST_EDGE], found[place, DEGREE]
        in_time = 0
        count = 0
        most = 0.0
        for edge in range(first, first + degree):
            edge_id = _edge_id(edge_ids, edge, width)
            if not _in_time(edge_id, place, weights):
                continue
            weight = _weight_of(edge_id, weights)
            if not 0.0 <= weight < np.inf:
                return place, edge_id
            in_time += 1
            count += weight > 0.0
            most = max(most, weight)
        if in_time > 0 and count == 0 and weights[1] != 1:
            return place, -1
        positive[place] = count
        largest[place] = most
    return -1, -1


@inline
def _pick_with_replacement(
    picks: np.ndarray,
    count: int,
    first: int,
    degree: int,
    edge_ids: tuple[int, int],
    width: int,
    place: int,
    weights: EdgeWeights,
    largest: float,
    sums: np.ndarray,
    node: int,
    key: int,
) -> None:
    total = np.uint64(0)
    for index in range(degree):
        edge_id = _edge_id(edge_ids, first + index, width)
        total += _scaled(_weight_at(edge_id, place, weights), largest)
        sums[index] = total
    for index in range(count):
        point = mulhi64(draw(node, index, SAMPLE_STREAM, key), total)
        low, high = 0, degree - 1
        while low < high:
            middle = (low + high) // 2
            if sums[middle] > point:
                high = middle
            else:
                low = middle + 1
        picks[index] = low


@inline
def _pick_without_replacement(
    picks: np.ndarray,
    count: int,
    first: int,
    degree: int,
    edge_ids: tuple[int, int],
    width: int,
    place: int,
    weights: EdgeWeights,
    largest: float,
    keys: np.ndarray,
    node: int,
    key: int,
) -> None:
    kept = 0
    for index in range(degree):
        edge_id = _edge_id(edge_ids, first + index, width)
        scaled = _scaled(_weight_at(edge_id, place, weights), largest)
        if scaled == 0:
            continue
        mine = exponential(draw(node, index, SAMPLE_STREAM, key)) / np.float64(scaled)
        if kept == count and mine >= keys[count - 1]:
            continue
        kept = min(kept + 1, count)
        slot = kept - 1
        while slot > 0 and keys[slot - 1] > mine:
            keys[slot] = keys[slot - 1]
            picks[slot] = picks[slot - 1]
            slot -= 1
        keys[slot] = mine
        picks[slot] = index


@inline
def _pick_positive(
    picks: np.ndarray,
    first: int,
    degree: int,
    edge_ids: tuple[int, int],
    width: int,
    place: int,
    weights: EdgeWeights,
) -> None:
    kept = 0
    for index in range(degree):
        if _weight_at(_edge_id(edge_ids, first + index, width), place, weights) > 0.0:
            picks[kept] = index
            kept += 1


@kernel
def _fill(
    begin: int,
    end: int,
    seeds: int,
    seed_width: int,
    pointers: np.ndarray,
    width: int,
    weights: EdgeWeights,
    found: np.ndarray,
    positive: np.ndarray,
    largest: np.ndarray,
    indptr: np.ndarray,
    replace: bool,
    key: int,
    neighbors: int,
    eids: int,
) -> None:
    """Write the samples of seeds ``[begin, end)`` to the addresses ``neighbors`` and ``eids``."""
    most_edges = 0
    most_picks = 0
    for place in range(begin, end):
        most_edges = max(most_edges, found[place, DEGREE])
        most_picks = max(most_picks, indptr[place + 1] - indptr[place])
    picks = np.empty(most_picks, np.int64)
    keys = np.empty(most_picks, np.float64)
    sums = np.empty(most_edges if replace else 0, np.uint64)

    for place in range(begin, end):
        to = indptr[place]
        count = indptr[place + 1] - to
        segment, first, degree, shift = found[place]
        edge_ids = (stored_ids(pointers, segment), shift)
        node = load_id(seeds, place, seed_width)
        if replace and count > 0:
            _pick_with_replacement(
                picks,
                count,
                first,
                degree,
                edge_ids,
                width,
                place,
                weights,
                largest[place],
                sums,
                node,
                key,
            )
        elif count < positive[place] and count > 0:
            _pick_without_replacement(
                picks,
                count,
                first,
                degree,
                edge_ids,
                width,
                place,
                weights,
                largest[place],
                keys,
                node,
                key,
            )
        elif count > 0:
            _pick_positive(picks, first, degree, edge_ids, width, place, weights)
        for index in range(count):
            edge = first + picks[index]
            neighbor = load_id(pointers[segment, INDICES], edge, width)
            store_id(neighbors, to + index, width, neighbor)
            store_id(eids, to + index, width, _edge_id(edge_ids, edge, width))


def _checked(
    seeds: torch.Tensor, graph: Rows, num_rows: int, width: int, weights: EdgeWeights
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges, number of positive weights and largest weight of each seed."""
    found = find_edges(seeds, graph, num_rows)
    positive = np.empty(len(found), dtype=np.int64)
    largest = np.empty(len(found), dtype=np.float64)
    bad = parallel.run(
        _weigh, len(found), GRAIN, graph[1], width, weights, found, positive, largest
    )
    for place, edge in bad:
        if place >= 0:
            raise_bad_weight(int(seeds[place]), edge)
    return found, positive, largest


def _weights_argument(weighting: Weighting) -> EdgeWeights:
    weights, weight_dtype, times, time_dtype, until = weighting
    size = time_size = address = 0
    if weight_dtype is not None:
        size = weight_dtype.itemsize
    if time_dtype is not None and until is not None:
        time_size = time_dtype.itemsize * (-1 if time_dtype.is_floating_point else 1)
        address = until.data_ptr()
    return (
        rows_argument(*weights) if weights else _NO_ROWS,
        size,
        rows_argument(*times) if times else _NO_ROWS,
        time_size,
        address,
    )


@sample_neighbors_weighted_op.cpu
def _sample_neighbors_weighted(
    seeds: torch.Tensor,
    rows: TieredRows,
    idtype: torch.dtype,
    weighting: Weighting,
    fanout: int,
    replace: bool,
    key: int,
    sms: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tiers, pointers, position, num_rows = rows
    graph = rows_argument(tiers, pointers, position)
    edge_weights = _weights_argument(weighting)
    width = idtype.itemsize
    found, positive, largest = _checked(seeds, graph, num_rows, width, edge_weights)
    replace = replace and fanout >= 0
    counts = positive if fanout < 0 else np.minimum(positive, fanout)
    if replace:
        counts = np.where(positive > 0, fanout, 0)
    indptr = torch.zeros(len(found) + 1, dtype=torch.int64)
    np.cumsum(counts, out=indptr.numpy()[1:])
    neighbors = torch.empty(int(indptr[-1]), dtype=idtype)
    eids = torch.empty_like(neighbors)
    parallel.run(
        _fill,
        len(found),
        GRAIN,
        seeds.data_ptr(),
        seeds.element_size(),
        graph[1],
        width,
        edge_weights,
        found,
        positive,
        largest,
        indptr.numpy(),
        replace,
        key,
        neighbors.data_ptr(),
        eids.data_ptr(),
    )
    return indptr, neighbors, eids


@check_weights_op.cpu
def _check_weights(
    rows: TieredRows,
    idtype: torch.dtype,
    weights: Sequence[torch.Tensor],
    weight_dtype: torch.dtype,
) -> None:
    tiers, pointers, position, num_rows = rows
    graph = rows_argument(tiers, pointers, position)
    edge_weights = _weights_argument(Weighting(weights, weight_dtype, [], None, None))
    for start in range(0, num_rows, _CHECKED_TOGETHER):
        nodes = torch.arange(start, min(start + _CHECKED_TOGETHER, num_rows))
        _checked(nodes, graph, num_rows, idtype.itemsize, edge_weights)

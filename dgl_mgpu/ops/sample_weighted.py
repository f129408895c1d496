"""Neighbour sampling by edge weight and by time; see ``kernels/weighted.cuh``.

At a node whose largest weight is ``w_max``, an edge's float64 weight ``w`` becomes::

    W = max(1, floor(w / w_max * 2**32))   if w > 0, else 0

so that sums are exact and do not depend on their order; a positive weight below w_max / 2**32
counts as that much.  Draw ``j`` is draw ``j`` of the node's Philox stream ``SAMPLE_STREAM``.

With replacement, sample ``j`` is the first edge whose inclusive prefix sum of W exceeds the
high half of draw ``j`` times the sum of W.

Without replacement, edge ``j`` gets the key ``exponential(draw j) / W`` and the edges with the
smallest keys are taken, in the order of their keys, equal ones by place: the same
distribution as drawing one after another, each time in proportion to the weights that are
left (Efraimidis, Spirakis, «Weighted random sampling with a reservoir», 2006).  Where no more
than ``fanout`` edges have a positive weight, they are all taken as they are stored.

With times, an edge later than the seed's time is as if it were not there, except that the
others keep their draws: its weight is not looked at and W is 0.  Without weights, all edges
have weight 1.

The CPU makes three passes: find each seed's edges; check and count its weights; then, after a
prefix sum of the sample sizes, fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError, InvalidWeightError
from dgl_mgpu.ops import cpu
from dgl_mgpu.ops.cpu import (
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
from dgl_mgpu.ops.edges import (
    DEGREE,
    FIRST_EDGE,
    GRAIN,
    SEGMENT,
    SHIFT,
    HopOptions,
    edge_id,
    find_edges,
    new_sample,
    stored_ids,
)
from dgl_mgpu.ops.library import Operator
from dgl_mgpu.ops.philox import SAMPLE_STREAM, draw, exponential, mulhi64
from dgl_mgpu.ops.view import INDICES, GraphView, RowView, TieredRows, tiered_rows

_MASK_DTYPES = (torch.bool, torch.uint8)
_WEIGHT_DTYPES = (torch.float32, torch.float64, *_MASK_DTYPES)
_TIME_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)


class Weighting(NamedTuple):
    """Weights and times as operators take them; dtypes are None where there are none."""

    weights: Sequence[Tensor]  # tiers, pointers and position of a view, or empty
    weight_dtype: torch.dtype | None
    times: Sequence[Tensor]  # the same
    time_dtype: torch.dtype | None
    until: Tensor | None  # int64 or float64, (n,): the time of each seed


@Operator
def sample_neighbors_weighted_op(
    seeds: Tensor,
    rows: TieredRows,
    idtype: torch.dtype,
    weighting: Weighting,
    options: HopOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    return new_sample(seeds, idtype)


@Operator
def check_weights_op(
    rows: TieredRows, idtype: torch.dtype, weights: Sequence[Tensor], weight_dtype: torch.dtype
) -> None:
    return None


@dataclass(frozen=True)
class EdgeTimes:
    """When each edge came to be, and how late each seed may look.

    Attributes
    ----------
    edges : RowView of scalars, int32, int64, float32 or float64
        Time of each edge id.
    until : Tensor, shape (n,)
        Time of each seed: it has the edges whose time is at most that.  Integers (int32,
        int64) if the edges' times are, else float32 or float64; NaN, on either side, is no
        time and has or is in no sample.
    """

    edges: RowView
    until: Tensor


def _tensors(rows: RowView) -> list[Tensor]:
    return [rows.tiers, rows.pointers, rows.position]


def check_weight_view(view: GraphView, weights: RowView) -> None:
    """Raise InvalidInputError if ``weights`` cannot be weights of the edges of ``view``."""
    action = "sample neighbors by weight"
    _check_edge_numbers(view, weights, action, "weight", "weights", _WEIGHT_DTYPES)


def _check_edge_numbers(
    view: GraphView,
    numbers: RowView,
    action: str,
    singular: str,
    plural: str,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raise InvalidInputError unless each edge has a number of these dtypes within reach."""
    if numbers.dtype not in dtypes or numbers.row_shape != ():
        *first, last = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        raise InvalidInputError(
            action,
            f"the {plural} have dtype {numbers.dtype} and shape"
            f" {numbers.num_rows, *numbers.row_shape}",
            f"pass one number for each edge, of dtype {', '.join(first)} or {last}",
        )
    if numbers.num_rows != view.num_edges:
        raise InvalidInputError(
            action,
            f"there are {numbers.num_rows} {plural}, but {view.num_edges} edges",
            f"pass one {singular} for each edge id",
        )
    if numbers.tiers.device != view.tiers.device:
        raise InvalidInputError(
            action,
            f"the {plural} are on '{numbers.tiers.device}', but the graph is on"
            f" '{view.tiers.device}'",
            "keep both in one store",
        )
    if numbers.disk is not None:
        raise InvalidInputError(
            action,
            "some weights or times are on disk, where a GPU cannot read them while it samples",
            "keep weights and times in GPU or host memory: raise store.host_memory, or leave"
            " store.disk_path out",
        )


def _check_times(view: GraphView, seeds: Tensor, times: EdgeTimes) -> None:
    action = "sample neighbors by time"
    edges, until = times.edges, times.until
    _check_edge_numbers(view, edges, action, "time", "times of edges", _TIME_DTYPES)
    if (
        until.dtype not in _TIME_DTYPES
        or until.dtype.is_floating_point != edges.dtype.is_floating_point
        or until.shape != seeds.shape
        or until.device != seeds.device
    ):
        kind = "floating-point" if edges.dtype.is_floating_point else "integer"
        raise InvalidInputError(
            action,
            f"the times of seeds have dtype {until.dtype} and shape {tuple(until.shape)} on"
            f" '{until.device}', but there are {len(seeds)} seeds on '{seeds.device}', and the"
            f" times of edges are {edges.dtype}",
            f"pass one {kind} time for each seed, on the device of the seeds",
        )


def weighting(
    view: GraphView, seeds: Tensor, weights: RowView | None, times: EdgeTimes | None
) -> Weighting:
    """Check weights and times, and put them into the form in which the operator takes them.

    Times of seeds become int64 or float64, with which every time of an edge compares exactly.
    Raises InvalidInputError if the dtype, shape, device or number of weights or times is wrong.
    """
    placed: list[Tensor] = []
    timed: list[Tensor] = []
    weight_dtype = time_dtype = until = None
    if weights is not None:
        check_weight_view(view, weights)
        placed, weight_dtype = _tensors(weights), weights.dtype
    if times is not None:
        _check_times(view, seeds, times)
        timed, time_dtype = _tensors(times.edges), times.edges.dtype
        wide = torch.float64 if time_dtype.is_floating_point else torch.int64
        until = times.until.to(wide).contiguous()
    return Weighting(placed, weight_dtype, timed, time_dtype, until)


def raise_bad_weight(node: int, edge: int) -> None:
    """Raise InvalidWeightError for an edge of a node; -1 says that all have weight 0."""
    raise InvalidWeightError(
        "sample neighbors by weight",
        f"all edges of node {node} have weight 0"
        if edge < 0
        else f"edge {edge} of node {node} has a weight that is NaN, infinite or negative",
        "give each node a positive, finite weight, or pass a bool mask"
        if edge < 0
        else "make all weights finite and at least 0",
    )


def check_weights(view: GraphView, weights: RowView) -> None:
    """Check the weights of a whole graph, before any work starts.

    Parameters
    ----------
    view : GraphView
        The topology as this rank sees it.
    weights : RowView of scalars, float32, float64, bool or uint8
        Weight of each edge id.

    Raises
    ------
    InvalidInputError
        If the dtype, shape or number of weights is wrong.
    InvalidWeightError
        If a weight is NaN, infinite or negative, or if the float weights of a node with edges
        are all zero; it names the first such node.
    """
    check_weight_view(view, weights)
    torch.ops.dgl_mgpu.check_weights(
        *tiered_rows(view), view.idtype, _tensors(weights), weights.dtype
    )


#: Nodes checked at a time by ``check_weights``, to bound its memory.
CHECKED_TOGETHER = 1 << 20
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
    begin: int, end: int, pointers: np.ndarray, width: int, weights: EdgeWeights,
    ranges: np.ndarray, positive: np.ndarray, largest: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """Count the positive weights of seeds ``[begin, end)`` and find the largest.

    Returns the first bad place and the id of its bad edge, -1 where all its weights are zero;
    (-1, -1) if none is bad.
    """
    for place in range(begin, end):
        edge_ids = (stored_ids(pointers, ranges[place, SEGMENT]), ranges[place, SHIFT])
        first, degree = ranges[place, FIRST_EDGE], ranges[place, DEGREE]
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
    picks: np.ndarray, count: int, first: int, degree: int, edge_ids: tuple[int, int], width: int,
    place: int, weights: EdgeWeights, largest: float, sums: np.ndarray, node: int, key: int,
) -> None:  # fmt: skip
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
    picks: np.ndarray, count: int, first: int, degree: int, edge_ids: tuple[int, int], width: int,
    place: int, weights: EdgeWeights, largest: float, keys: np.ndarray, node: int, key: int,
) -> None:  # fmt: skip
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
    picks: np.ndarray, first: int, degree: int, edge_ids: tuple[int, int], width: int, place: int,
    weights: EdgeWeights,
) -> None:  # fmt: skip
    kept = 0
    for index in range(degree):
        if _weight_at(_edge_id(edge_ids, first + index, width), place, weights) > 0.0:
            picks[kept] = index
            kept += 1


@kernel
def _fill(
    begin: int, end: int, seeds: int, seed_width: int, pointers: np.ndarray, width: int,
    weights: EdgeWeights, ranges: np.ndarray, positive: np.ndarray, largest: np.ndarray,
    indptr: np.ndarray, replace: bool, key: int, neighbors: int, eids: int,
) -> None:  # fmt: skip
    """Write the samples of seeds ``[begin, end)`` to the addresses ``neighbors`` and ``eids``."""
    max_edges = 0
    max_picks = 0
    for place in range(begin, end):
        max_edges = max(max_edges, ranges[place, DEGREE])
        max_picks = max(max_picks, indptr[place + 1] - indptr[place])
    picks = np.empty(max_picks, np.int64)
    keys = np.empty(max_picks, np.float64)
    sums = np.empty(max_edges if replace else 0, np.uint64)

    for place in range(begin, end):
        to = indptr[place]
        count = indptr[place + 1] - to
        segment, first, degree, shift = ranges[place]
        edge_ids = (stored_ids(pointers, segment), shift)
        node = load_id(seeds, place, seed_width)
        if replace and count > 0:
            _pick_with_replacement(
                picks, count, first, degree, edge_ids, width, place, weights, largest[place],
                sums, node, key,
            )  # fmt: skip
        elif count < positive[place] and count > 0:
            _pick_without_replacement(
                picks, count, first, degree, edge_ids, width, place, weights, largest[place],
                keys, node, key,
            )  # fmt: skip
        elif count > 0:
            _pick_positive(picks, first, degree, edge_ids, width, place, weights)
        for index in range(count):
            edge = first + picks[index]
            neighbor = load_id(pointers[segment, INDICES], edge, width)
            store_id(neighbors, to + index, width, neighbor)
            store_id(eids, to + index, width, _edge_id(edge_ids, edge, width))


def _checked(
    seeds: Tensor, graph: Rows, num_rows: int, width: int, weights: EdgeWeights
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges, number of positive weights and largest weight of each seed."""
    ranges = find_edges(seeds, graph, num_rows)
    positive = np.empty(len(ranges), dtype=np.int64)
    largest = np.empty(len(ranges), dtype=np.float64)
    bad = cpu.run(_weigh, len(ranges), GRAIN, graph[1], width, weights, ranges, positive, largest)
    for place, edge in bad:
        if place >= 0:
            raise_bad_weight(int(seeds[place]), edge)
    return ranges, positive, largest


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
    seeds: Tensor,
    rows: TieredRows,
    idtype: torch.dtype,
    weighting: Weighting,
    options: HopOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    fanout, replace, key, _ = options
    graph = rows_argument(*rows[:3])
    edge_weights = _weights_argument(weighting)
    width = idtype.itemsize
    ranges, positive, largest = _checked(seeds, graph, rows.num_rows, width, edge_weights)
    replace = replace and fanout >= 0
    counts = positive if fanout < 0 else np.minimum(positive, fanout)
    if replace:
        counts = np.where(positive > 0, fanout, 0)
    indptr = torch.zeros(len(ranges) + 1, dtype=torch.int64)
    np.cumsum(counts, out=indptr.numpy()[1:])
    neighbors = torch.empty(int(indptr[-1]), dtype=idtype)
    eids = torch.empty_like(neighbors)
    cpu.run(
        _fill, len(ranges), GRAIN, seeds.data_ptr(), seeds.element_size(), graph[1], width,
        edge_weights, ranges, positive, largest, indptr.numpy(), replace, key, neighbors.data_ptr(),
        eids.data_ptr(),
    )  # fmt: skip
    return indptr, neighbors, eids


@check_weights_op.cpu
def _check_weights(
    rows: TieredRows, idtype: torch.dtype, weights: Sequence[Tensor], weight_dtype: torch.dtype
) -> None:
    graph, num_rows = rows_argument(*rows[:3]), rows.num_rows
    edge_weights = _weights_argument(Weighting(weights, weight_dtype, [], None, None))
    for start in range(0, num_rows, CHECKED_TOGETHER):
        nodes = torch.arange(start, min(start + CHECKED_TOGETHER, num_rows))
        _checked(nodes, graph, num_rows, idtype.itemsize, edge_weights)

"""Neighbour sampling by edge weight and by time: the contract.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dgl_mgpu.errors import InvalidInputError, InvalidWeightError
from dgl_mgpu.ops.library import Operator
from dgl_mgpu.ops.view import GraphView, RowView, TieredRows, tiered_rows

_MASK_DTYPES = (torch.bool, torch.uint8)
_WEIGHT_DTYPES = (torch.float32, torch.float64, *_MASK_DTYPES)
_TIME_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)


class Weighting(NamedTuple):
    """Weights and times as operators take them.

    Attributes
    ----------
    weights, times : sequence of Tensor
        Tiers, pointers and position of a view, or empty.
    weight_dtype, time_dtype : torch.dtype, optional
        None where there are none.
    until : Tensor, int64 or float64, shape (n,), optional
        Time of each seed.
    """

    weights: Sequence[torch.Tensor]
    weight_dtype: torch.dtype | None
    times: Sequence[torch.Tensor]
    time_dtype: torch.dtype | None
    until: torch.Tensor | None


@Operator
def sample_neighbors_weighted_op(
    seeds: torch.Tensor,
    rows: TieredRows,
    idtype: torch.dtype,
    weighting: Weighting,
    fanout: int,
    replace: bool,
    key: int,
    sms: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = torch.library.get_ctx().new_dynamic_size()
    return (
        seeds.new_empty(seeds.shape[0] + 1, dtype=torch.int64),
        seeds.new_empty(total, dtype=idtype),
        seeds.new_empty(total, dtype=idtype),
    )


@Operator
def check_weights_op(
    rows: TieredRows,
    idtype: torch.dtype,
    weights: Sequence[torch.Tensor],
    weight_dtype: torch.dtype,
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
    until: torch.Tensor


def _tensors(rows: RowView) -> list[torch.Tensor]:
    return [rows.tiers, rows.pointers, rows.position]


def check_weight_view(view: GraphView, weights: RowView) -> None:
    """Raise InvalidInputError if ``weights`` cannot be weights of the edges of ``view``."""
    asked = "sample neighbors by weight"
    if weights.dtype not in _WEIGHT_DTYPES or weights.row_shape != ():
        raise InvalidInputError(
            asked,
            f"the weights have dtype {weights.dtype} and shape"
            f" {weights.num_rows, *weights.row_shape}",
            "pass one number for each edge, of dtype float32, float64, bool or uint8",
        )
    if weights.num_rows != view.num_edges:
        raise InvalidInputError(
            asked,
            f"there are {weights.num_rows} weights, but {view.num_edges} edges",
            "pass one weight for each edge id",
        )
    _check_reachable(view, weights, asked)


def _check_reachable(view: GraphView, rows: RowView, asked: str) -> None:
    if rows.tiers.device != view.tiers.device:
        raise InvalidInputError(
            asked,
            f"the weights or times are on '{rows.tiers.device}', but the graph is on"
            f" '{view.tiers.device}'",
            "keep both in one store",
        )
    if rows.disk is not None:
        raise InvalidInputError(
            asked,
            "some weights or times are on disk, where a GPU cannot read them while it samples",
            "keep weights and times in GPU or host memory: raise store.host_memory, or leave"
            " store.disk_path out",
        )


def _check_times(view: GraphView, seeds: torch.Tensor, times: EdgeTimes) -> None:
    asked = "sample neighbors by time"
    edges, until = times.edges, times.until
    if edges.dtype not in _TIME_DTYPES or edges.row_shape != ():
        raise InvalidInputError(
            asked,
            f"the times of edges have dtype {edges.dtype} and shape"
            f" {edges.num_rows, *edges.row_shape}",
            "pass one number for each edge, of dtype int32, int64, float32 or float64",
        )
    if edges.num_rows != view.num_edges:
        raise InvalidInputError(
            asked,
            f"there are {edges.num_rows} times of edges, but {view.num_edges} edges",
            "pass one time for each edge id",
        )
    kind = "floating-point" if edges.dtype.is_floating_point else "integer"
    if (
        until.dtype not in _TIME_DTYPES
        or until.dtype.is_floating_point != edges.dtype.is_floating_point
        or until.shape != seeds.shape
        or until.device != seeds.device
    ):
        raise InvalidInputError(
            asked,
            f"the times of seeds have dtype {until.dtype} and shape {tuple(until.shape)} on"
            f" '{until.device}', but there are {len(seeds)} seeds on '{seeds.device}', and the"
            f" times of edges are {edges.dtype}",
            f"pass one {kind} time for each seed, on the device of the seeds",
        )
    _check_reachable(view, edges, asked)


def weighting(
    view: GraphView, seeds: torch.Tensor, weights: RowView | None, times: EdgeTimes | None
) -> Weighting:
    """Check weights and times, and put them into the form in which the operator takes them.

    Times of seeds become int64 or float64, with which every time of an edge compares exactly.

    Raises
    ------
    InvalidInputError
        If the dtype, shape, device or number of weights or times is wrong.
    """
    placed: list[torch.Tensor] = []
    timed: list[torch.Tensor] = []
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

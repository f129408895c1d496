"""Neighbour sampling: the contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as with_fields
from typing import NamedTuple

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_ids, check_integer
from dgl_mgpu.ops.library import Operator
from dgl_mgpu.ops.philox import SampleKey
from dgl_mgpu.ops.sample_weighted.op import EdgeTimes, weighting
from dgl_mgpu.ops.view import GraphView, RowView, TieredRows, tiered_rows


@Operator
def sample_neighbors_op(
    seeds: torch.Tensor,
    rows: TieredRows,
    idtype: torch.dtype,
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

    indptr: torch.Tensor
    neighbors: torch.Tensor
    eids: torch.Tensor


def sample_neighbors(
    view: GraphView,
    seeds: torch.Tensor,
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
        but 0 counts as 1).  See :mod:`dgl_mgpu.ops.sample_weighted.op`.
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
    asked = f"sample {fanout} neighbors"
    seeds = check_ids(seeds, asked, view.tiers.device)
    fanout = check_integer(fanout, "fanout", -1, asked)
    graph = (seeds, *tiered_rows(view), view.idtype)
    draw = (fanout, replace, key.fold(), view.sms)
    if weights is None and times is None:
        return SampledNeighbors(*torch.ops.dgl_mgpu.sample_neighbors(*graph, *draw))
    weighed = weighting(view, seeds, weights, times)
    return SampledNeighbors(*torch.ops.dgl_mgpu.sample_neighbors_weighted(*graph, *weighed, *draw))


def sample_etype_neighbors(
    views: Mapping[str, GraphView],
    seeds: Mapping[str, torch.Tensor],
    fanouts: int | Mapping[str, int],
    key: SampleKey,
    *,
    replace: bool = False,
    weights: Mapping[str, RowView] | None = None,
    times: Mapping[str, EdgeTimes] | None = None,
) -> dict[str, SampledNeighbors]:
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
    asked = "sample neighbors of each edge type"
    for name, types in (("seeds", seeds), ("weights", weights or {}), ("times", times or {})):
        if unknown := [etype for etype in types if etype not in views]:
            raise InvalidInputError(
                asked,
                f"{name} names the unknown edge type {unknown[0]!r}",
                f"use one of {list(views)}",
            )
    sampled = {}
    for number, (etype, view) in enumerate(views.items()):
        if etype not in seeds:
            continue
        fanout = fanouts.get(etype) if isinstance(fanouts, Mapping) else fanouts
        if fanout is None:
            raise InvalidInputError(
                asked,
                f"there is no fanout for edge type {etype!r}",
                "give each edge type a fanout; 0 leaves it out",
            )
        sampled[etype] = sample_neighbors(
            view,
            seeds[etype],
            fanout,
            with_fields(key, etype=number),
            replace=replace,
            weights=(weights or {}).get(etype),
            times=(times or {}).get(etype),
        )
    return sampled

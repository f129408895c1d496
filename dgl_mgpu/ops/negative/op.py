"""Negative sampling: the contract.

A candidate pair is an edge if its source is among the in-edges of its destination, which are in
no order: all of them are read.  A mini-batch's candidates are spread over all rows, so they read
a few dozen ids each; the hundreds of thousands of a hub are read only by what falls on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_ids, check_integer
from dgl_mgpu.ops.library import Operator, Size
from dgl_mgpu.ops.philox import NEGATIVE_EDGE_STREAM, SampleKey
from dgl_mgpu.ops.view import GraphView, TieredGraph, tiered_graph
from dgl_mgpu.ops.walk.op import occurrences


@Operator
def negative_edges_op(
    graph: TieredGraph, num: Size, replace: bool, exclude_self_loops: bool, max_tries: int, key: int
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.library.get_ctx().new_dynamic_size()
    ends = [graph.tiers.new_empty(total, dtype=graph.idtype) for _ in range(2)]
    return ends[0], ends[1]


@Operator
def negative_destinations_op(
    sources: torch.Tensor,
    numbers: torch.Tensor,
    graph: TieredGraph,
    k: Size,
    avoid_existing: bool,
    exclude_self_loops: bool,
    max_tries: int,
    key: int,
) -> torch.Tensor:
    return sources.new_empty((sources.shape[0], k), dtype=graph.idtype)


class NegativeEdges(NamedTuple):
    """Pairs of nodes that are no edges.

    Attributes
    ----------
    sources, destinations : Tensor, the graph's idtype, shape (m,)
    """

    sources: torch.Tensor
    destinations: torch.Tensor


def _check_tries(view: GraphView, max_tries: int, exclude_self_loops: bool, asked: str) -> int:
    max_tries = check_integer(max_tries, "max_tries", 1, asked)
    if max_tries > NEGATIVE_EDGE_STREAM:
        raise InvalidInputError(
            asked, f"max_tries is {max_tries}", f"pass at most {NEGATIVE_EDGE_STREAM}"
        )
    if exclude_self_loops and view.num_rows != view.num_cols:
        raise InvalidInputError(
            asked,
            f"exclude_self_loops is set, but edges lead from {view.num_cols} nodes to"
            f" {view.num_rows} others",
            "pass exclude_self_loops=False where sources and destinations are different types",
        )
    return max_tries if view.num_rows > 0 and view.num_cols > 0 else 0


def negative_edges(
    view: GraphView,
    num: int,
    key: SampleKey,
    *,
    replace: bool = False,
    exclude_self_loops: bool = True,
    max_tries: int = 10,
) -> NegativeEdges:
    """Draw pairs of nodes that are no edges, each such pair with the same probability.

    What ``dgl.sampling.global_uniform_negative_sampling`` does.

    Parameters
    ----------
    view : GraphView
        The topology of the edge type that is avoided.
    num : int
        Pairs to draw at most.
    key : SampleKey
        Names the experiment.
    replace : bool
        Whether a pair may be drawn more than once.
    exclude_self_loops : bool
        Whether to avoid pairs of a node and itself, too.
    max_tries : int
        Candidates for each pair.  In a graph that lacks few edges all of them may fail, and in
        a complete one they do: then there are fewer than ``num`` pairs.

    Returns
    -------
    NegativeEdges
        Of ``m <= num`` pairs.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong type or value, or self-loops are to be excluded where there
        cannot be any because sources and destinations are not the same nodes.

    Notes
    -----
    Candidate ``t`` of pair ``i`` is block 0 of the Philox stream ``NEGATIVE_EDGE_STREAM + t`` of
    ``i``: the first draw gives the source, the second the destination.  With replacement a pair
    is its first candidate that is no edge.  Without, all pairs that have none yet try candidate
    ``t`` together; one that an earlier try has taken fails, and of equal ones the first stays.
    """
    asked = f"sample {num} negative edges"
    num = check_integer(num, "num", 0, asked)
    max_tries = _check_tries(view, max_tries, exclude_self_loops, asked)
    return NegativeEdges(
        *torch.ops.dgl_mgpu.negative_edges(
            *tiered_graph(view), num, replace, exclude_self_loops, max_tries, key.fold()
        )
    )


def negative_destinations(
    view: GraphView,
    sources: torch.Tensor,
    k: int,
    key: SampleKey,
    *,
    avoid_existing: bool = True,
    exclude_self_loops: bool = True,
    max_tries: int = 10,
) -> torch.Tensor:
    """Draw for each source destinations to which it has no edge, with replacement.

    What ``dgl.dataloading.negative_sampler.PerSourceUniform`` does for the sources of a batch
    of edges, but that draws from all nodes, which ``avoid_existing=False`` does here.

    Parameters
    ----------
    view : GraphView
        The topology of the edge type that is avoided.
    sources : Tensor, int32 or int64, shape (n,)
        Source nodes, such as those of the edges to predict.  The j-th mention of a node in a
        call has draws of its own.
    k : int
        Destinations for each.
    key : SampleKey
        Names the experiment.
    avoid_existing, exclude_self_loops : bool
        What makes a candidate fail: an edge to it; its being the source itself.
    max_tries : int
        Candidates for each destination.

    Returns
    -------
    Tensor, the graph's idtype, shape (n, k)
        Destination nodes; -1 where all candidates failed, which where a source lacks a share
        ``s`` of all destinations happens with probability ``(1 - s) ** max_tries``.

    Raises
    ------
    InvalidInputError
        As :func:`negative_edges`.
    IdOutOfRangeError
        If a source is not a node; it names the first one.

    Notes
    -----
    Candidate ``t`` for place ``p`` of mention ``j`` of a source is the first draw of block
    ``j * k + p`` of the node's Philox stream ``NEGATIVE_DESTINATION_STREAM + t``.
    """
    asked = f"sample {k} negative destinations a source"
    sources = check_ids(sources, asked, view.tiers.device)
    k = check_integer(k, "k", 0, asked)
    max_tries = _check_tries(view, max_tries, exclude_self_loops, asked)
    return torch.ops.dgl_mgpu.negative_destinations(
        sources,
        occurrences(sources),
        *tiered_graph(view),
        k,
        avoid_existing,
        exclude_self_loops,
        max_tries,
        key.fold(),
    )

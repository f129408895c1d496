"""Random walks and PinSAGE's neighbour selection: the contract."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_ids, check_integer
from dgl_mgpu.ops.library import Operator, Sizes, Written
from dgl_mgpu.ops.philox import SampleKey
from dgl_mgpu.ops.view import GraphView


class TieredPath(NamedTuple):
    """What operators take of a metapath: the arguments of each step's view."""

    tiers: Sequence[torch.Tensor]
    pointers: Sequence[torch.Tensor]
    positions: Sequence[torch.Tensor]
    num_rows: Sizes
    idtype: torch.dtype


@Operator
def random_walk_op(
    starts: torch.Tensor,
    walks: torch.Tensor,
    path: TieredPath,
    stops: Sequence[int],
    key: int,
    edges: Written | None = None,
) -> torch.Tensor:
    return starts.new_empty((starts.shape[0], len(stops) + 1), dtype=torch.int64)


@Operator
def pinsage_neighbors_op(
    seeds: torch.Tensor,
    path: TieredPath,
    stops: Sequence[int],
    num_walks: int,
    num_neighbors: int,
    key: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = torch.library.get_ctx().new_dynamic_size()
    return (
        seeds.new_empty(seeds.shape[0] + 1, dtype=torch.int64),
        seeds.new_empty(total, dtype=path.idtype),
        seeds.new_empty(total, dtype=torch.int64),
    )


class VisitedNeighbors(NamedTuple):
    """For each seed the nodes its walks visited most.

    Attributes
    ----------
    indptr : Tensor, int64, shape (n + 1,)
        Seed ``i`` has the neighbors ``indptr[i]`` to ``indptr[i + 1]``.
    neighbors : Tensor, the graph's idtype, shape (E,)
        Visited nodes, the most visited first.
    counts : Tensor, int64, shape (E,)
        Number of visits to each.
    """

    indptr: torch.Tensor
    neighbors: torch.Tensor
    counts: torch.Tensor


def _as_metapath(
    views: GraphView | Sequence[GraphView], asked: str, length: int | None = None
) -> list[GraphView]:
    """The views of a walk of ``length`` steps, or of any, checked to follow each other."""
    path = [views] if isinstance(views, GraphView) else list(views)
    if not path:
        raise InvalidInputError(asked, "the metapath is empty", "pass at least one view")
    begins_again = length is None or length > len(path)
    for view, following in pairwise(path + path[:1] if begins_again else path):
        ends = view.num_cols, view.idtype, view.tiers.device
        begins = following.num_rows, following.idtype, following.tiers.device
        if ends != begins:
            raise InvalidInputError(
                asked,
                "a step ends at one of {} nodes of {} on '{}', but the next begins at one of {}"
                " nodes of {} on '{}'".format(*ends, *begins),
                "pass views each of which ends where the next one begins, and the last where the"
                " first does",
            )
    return path


def graphs(path: list[GraphView]) -> TieredPath:
    """A metapath as operators take it."""
    return TieredPath(
        [view.tiers for view in path],
        [view.pointers for view in path],
        [view.position for view in path],
        [view.num_rows for view in path],
        path[0].idtype,
    )


def _as_stops(probabilities: list[float]) -> list[int]:
    """Probabilities as multiples of 2**-53, to be compared with the top 53 bits of a draw."""
    return [math.ceil(probability * 2**53) for probability in probabilities]


def _check_probability(value: float, name: str, asked: str) -> float:
    if not 0.0 <= value <= 1.0:
        raise InvalidInputError(asked, f"{name} is {value!r}", "pass a probability in [0, 1]")
    return float(value)


def occurrences(ids: torch.Tensor) -> torch.Tensor:
    """Number of equal ids before each id."""
    ordered, order = torch.sort(ids, stable=True)
    place = torch.arange(ids.numel(), device=ids.device)
    begins = torch.ones_like(place, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    run_start = torch.cummax(torch.where(begins, place, 0), dim=0).values if len(ids) else place
    occurrence = torch.empty_like(place)
    occurrence[order] = place - run_start
    return occurrence


def random_walk(
    views: GraphView | Sequence[GraphView],
    starts: torch.Tensor,
    length: int,
    key: SampleKey,
    *,
    restart_prob: float | Sequence[float] = 0.0,
    edges: torch.Tensor | None = None,
) -> torch.Tensor:
    """Walk from each start, each step along a uniformly chosen edge.

    A step goes from a row of a view to one of the columns stored there.  A view is CSC, rows
    are destinations: to walk *along* edges, as ``dgl.sampling.random_walk`` does, pass the
    view of the reversed graph (the CSR of the graph).

    Parameters
    ----------
    views : GraphView or sequence of GraphView
        Topology; of a sequence (a metapath), step ``t`` uses ``views[t % len(views)]``.  Each
        view ends where the next begins, and the last where the first does if the walk gets there.
    starts : Tensor, int32 or int64, shape (n,)
        Start nodes.  The j-th walk from the same node in a call uses the node's j-th stream.
    length : int
        Number of steps.
    key : SampleKey
        Names the experiment.
    restart_prob : float or sequence of ``length`` floats
        Probability to end the walk before each step.
    edges : Tensor, int64, shape (n, length), optional
        Gets the id of the edge that each step takes; -1 after the end of a walk.

    Returns
    -------
    Tensor, int64, shape (n, length + 1)
        The nodes visited, the start first; -1 after the end of a walk, which comes early at a
        node without edges.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype, shape or value, or views do not follow each other.
    IdOutOfRangeError
        If a start is not a node; it names the first one.

    Notes
    -----
    Step ``t`` of a start's walk ``j`` has block ``j`` of the node's Philox stream
    ``WALK_STREAM + t``: the walk ends if the top 53 bits of the second draw are below
    ``ceil(restart_prob * 2**53)``; else it takes edge number high half of first draw * degree.
    """
    asked = f"walk {length} steps"
    length = check_integer(length, "length", 0, asked)
    path = _as_metapath(views, asked, length)
    starts = check_ids(starts, asked, path[0].tiers.device)
    if edges is not None:
        _check_edges(edges, starts, length, asked)
    stops = (
        [restart_prob] * length
        if isinstance(restart_prob, (int, float))
        else [float(probability) for probability in restart_prob]
    )
    if len(stops) != length:
        raise InvalidInputError(
            asked,
            f"there are {len(stops)} restart probabilities",
            "pass one float, or one for each step",
        )
    stops = [_check_probability(stop, "restart_prob", asked) for stop in stops]
    return torch.ops.dgl_mgpu.random_walk(
        starts, occurrences(starts), *graphs(path), _as_stops(stops), key.fold(), edges
    )


def _check_edges(edges: torch.Tensor, starts: torch.Tensor, length: int, asked: str) -> None:
    shape = (starts.numel(), length)
    if (
        edges.dtype != torch.int64
        or edges.shape != shape
        or edges.device != starts.device
        or not edges.is_contiguous()
    ):
        raise InvalidInputError(
            asked,
            f"edges has dtype {edges.dtype}, shape {tuple(edges.shape)} and strides"
            f" {edges.stride()} on '{edges.device}'",
            f"pass a contiguous int64 tensor of shape {shape} on '{starts.device}'",
        )


def pinsage_neighbors(
    views: GraphView | Sequence[GraphView],
    seeds: torch.Tensor,
    *,
    num_traversals: int,
    termination_prob: float,
    num_random_walks: int,
    num_neighbors: int,
    key: SampleKey,
) -> VisitedNeighbors:
    """Select for each seed the nodes that short random walks from it visit most.

    Semantics of DGL's ``RandomWalkNeighborSampler`` and, with the two views of a bipartite
    graph, ``PinSAGESampler``; a walk may visit, and a seed select, the seed itself.  XGNN's
    setting (section 6.1) is ``num_traversals=3, num_random_walks=4, num_neighbors=5``.

    Parameters
    ----------
    views : GraphView or sequence of GraphView
        The metapath of one traversal, see :func:`random_walk`; it ends at the type of node at
        which it begins.
    seeds : Tensor, int32 or int64, shape (n,)
        Nodes to select neighbors for; repeats are allowed and get equal neighbors.
    num_traversals : int
        Times that a walk goes through the metapath; visits count at the end of each.
    termination_prob : float
        Probability to end a walk after each traversal.
    num_random_walks : int
        Walks from each seed.
    num_neighbors : int
        Nodes to select at most.
    key : SampleKey
        Names the experiment.

    Returns
    -------
    VisitedNeighbors
        By decreasing number of visits; of equally visited ones those visited first (counting
        walk by walk) come first.  DGL prefers higher ids, which is a bias if ids mean anything.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError
        As :func:`random_walk`.
    """
    asked = "select PinSAGE neighbors"
    path, stops = check_traversals(
        views, asked, num_traversals, termination_prob, num_random_walks, num_neighbors
    )
    seeds = check_ids(seeds, asked, path[0].tiers.device)
    return VisitedNeighbors(
        *torch.ops.dgl_mgpu.pinsage_neighbors(
            seeds, *graphs(path), stops, num_random_walks, num_neighbors, key.fold()
        )
    )


def check_traversals(
    views: GraphView | Sequence[GraphView],
    asked: str,
    num_traversals: int,
    termination_prob: float,
    num_random_walks: int,
    num_neighbors: int,
) -> tuple[list[GraphView], list[int]]:
    """The metapath of PinSAGE's walks, and where they stop; raises InvalidInputError if there is
    something wrong with an argument."""
    path = _as_metapath(views, asked)
    check_integer(num_traversals, "num_traversals", 1, asked)
    check_integer(num_random_walks, "num_random_walks", 1, asked)
    check_integer(num_neighbors, "num_neighbors", 0, asked)
    _check_probability(termination_prob, "termination_prob", asked)
    hops = len(path)
    stops = [
        termination_prob if step > 0 and step % hops == 0 else 0.0
        for step in range(hops * num_traversals)
    ]
    return path, _as_stops(stops)

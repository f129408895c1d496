"""Nearest neighbours, farthest points and matchings, as DGL's C++ offers them to its Python.

Each function takes the arguments of the C function that its docstring names, with tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from dgl_mgpu.graph.dispatch import is_null
from dgl_mgpu.graph.random import generator

#: Distances that are kept at the same time.
_MAX_DISTANCES = 1 << 24
#: Share of nodes that propose to others in each round of a matching; Fagginger Auer and Bisseling
#: derive it.
_PROPOSING = 0.53406


@torch.no_grad()
def knn(
    x: torch.Tensor,
    x_offsets: torch.Tensor,
    y: torch.Tensor,
    y_offsets: torch.Tensor,
    k: int,
    out: torch.Tensor,
    algorithm: str,
) -> None:
    """The nearest points of the same set, nearest first: ``_CAPI_DGLKNN``.

    Finds points ``x`` of shape (n, d) for the points ``y`` of shape (m, d); offsets say where each
    set begins, and where the last one ends.  ``k`` is at most the size of the smallest set.
    ``out``, of shape (2, m * k), gets rows of ``y`` and of ``x``.  All of DGL's algorithms mean the
    same here: all distances are compared.
    """
    queries, neighbors = out.view(2, len(y), k)
    queries.copy_(torch.arange(len(y), device=out.device)[:, None])
    if x.dtype.itemsize < 4:
        x, y = x.float(), y.float()
    for x_start, x_counts, y_start, y_counts in _groups(x_offsets.tolist(), y_offsets.tolist()):
        # One set, in several steps if it is large, or many small ones at once, filled up.
        most_x, most_y = max(x_counts), max(y_counts)
        step = max(1, _MAX_DISTANCES // (most_x * len(x_counts)))
        x_places, x_there = _padded(x_start, x_counts, 0, most_x, x.device)
        points = x[x_places]
        for first in range(0, most_y, step):
            y_places, y_there = _padded(
                y_start, y_counts, first, min(most_y, first + step), x.device
            )
            distances = _squared_distances(y[y_places], points)
            if len(x_counts) > 1:
                distances.masked_fill_(~x_there[:, None, :], float("inf"))
            nearest = distances.topk(k, largest=False).indices
            nearest += torch.tensor(x_start, device=x.device)[:, None, None]
            if len(y_counts) > 1:
                neighbors[y_places[y_there]] = nearest[y_there].to(out.dtype)
            else:
                neighbors[y_places[0]] = nearest[0].to(out.dtype)


def _squared_distances(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Of points in sets, shapes (s, m, d) and (s, n, d): shape (s, m, n).

    One coordinate after the other, as DGL adds them up: a matrix product would lose what is small
    beside the points' own lengths, and torch.cdist on a GPU takes a block of threads a distance.
    """
    total = y.new_zeros(len(y), y.shape[1], x.shape[1])
    apart = torch.empty_like(total)
    for axis in range(y.shape[2]):
        torch.sub(y[:, :, None, axis], x[:, None, :, axis], out=apart)
        total.addcmul_(apart, apart)
    return total


def nn_descent(
    x: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    k: int,
    num_iters: int,
    max_candidates: int,
    delta: float,
) -> None:
    """The nearest points of the same set: ``_CAPI_DGLNNDescent``; ``out`` as in `knn`.

    DGL approximates them, in ``num_iters`` steps of ``max_candidates`` a point, until no more than
    the share ``delta`` changes; here they are exact, and these three have no effect.
    """
    knn(x, offsets, x, offsets, k, out, "nn-descent")


def _groups(x_bounds: list[int], y_bounds: list[int]) -> Iterator[Any]:
    """Sets that are compared at once: their starts and sizes in ``x``, and those in ``y``."""
    group: list[tuple[int, int, int, int]] = []
    for (x_start, x_stop), (y_start, y_stop) in zip(
        pairwise(x_bounds), pairwise(y_bounds), strict=True
    ):
        if y_stop == y_start:
            continue
        group.append((x_start, x_stop - x_start, y_start, y_stop - y_start))
        _, x_counts, _, y_counts = zip(*group, strict=True)
        if len(group) > 1 and len(group) * max(x_counts) * max(y_counts) > _MAX_DISTANCES:
            yield zip(*group[:-1], strict=True)
            del group[:-1]
    if group:
        yield zip(*group, strict=True)


def _padded(
    starts: Sequence[int], counts: Sequence[int], first: int, stop: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places ``[first, stop)`` of several runs, and which of them there are."""
    offsets = torch.arange(first, stop, device=device)
    start, count = torch.tensor([starts, counts], device=device)[:, :, None]
    return start + torch.minimum(offsets, count - 1), offsets < count


@torch.no_grad()
def farthest_point_sampler(
    points: torch.Tensor,
    batch_size: int,
    num_samples: int,
    distances: torch.Tensor,
    start: torch.Tensor,
    result: torch.Tensor,
) -> None:
    """Sample points far from those sampled before: ``_CAPI_FarthestPointSampler``.

    ``points`` has shape (batch_size * n, d), and ``start`` the first sample of each set.
    ``distances`` is overwritten. ``result`` gets places in each set; of points equally far, the
    first.
    """
    sets = points.view(batch_size, -1, points.shape[1])
    nearest = distances.view(batch_size, -1).fill_(float("inf"))
    samples = result.view(batch_size, num_samples)
    last = start.long()[:, None]
    everywhere = (batch_size, 1, points.shape[1])
    for place in range(num_samples):
        if place:
            chosen = sets.gather(1, last[:, :, None].expand(everywhere))
            torch.minimum(nearest, (sets - chosen).square_().sum(2), out=nearest)
            last = nearest.argmax(1, keepdim=True)
        samples[:, place] = last[:, 0]


@torch.no_grad()
def neighbor_matching(graph: Any, weights: torch.Tensor, labels: torch.Tensor) -> None:
    """Match nodes with neighbours, along heavy edges: ``_CAPI_NeighborMatching``.

    The graph has one relation among nodes of one type, with both directions of each edge; weights
    are not negative, or null for a random choice.  Labels are negative for nodes without a match;
    matched nodes get the smaller of their ids, others their own.  Some nodes, drawn at random,
    propose to their heaviest neighbour among the others, who take the heaviest proposal (Fagginger
    Auer and Bisseling, «A GPU algorithm for greedy graph matching»).  The host waits for the GPU
    once a round.
    """
    source, target, _ = graph.edges(0, "eid")
    source, target = source.long(), target.long()
    random = generator(labels.device)
    shuffled = torch.randperm(len(source), generator=random, device=labels.device)
    # Edges by weight, ties in random order: no two are equally heavy.
    order = shuffled
    if not is_null(weights):
        order = shuffled[torch.argsort(weights[shuffled], stable=True)]
    source, target = source[order], target[order]
    num_nodes = len(labels)
    while True:
        free = labels < 0
        open_edges = (free[source] & free[target] & (source != target)).nonzero()[:, 0]
        source, target = source[open_edges], target[open_edges]
        if not len(source):
            break
        proposes = torch.rand(num_nodes, generator=random, device=labels.device) < _PROPOSING
        heaviest = _heaviest(source, proposes[source] & ~proposes[target], num_nodes)
        accepted = _heaviest(target, heaviest, num_nodes)
        # What is not accepted is written to a place of no node: how much is, nobody waits for.
        smaller = torch.minimum(source, target).to(labels.dtype)
        for end in (source, target):
            padded = torch.cat([labels, labels.new_empty(1)])
            padded[torch.where(accepted, end, num_nodes)] = smaller
            labels.copy_(padded[:-1])
    own = torch.arange(num_nodes, dtype=labels.dtype, device=labels.device)
    labels.copy_(torch.where(labels < 0, own, labels))


def _heaviest(end: torch.Tensor, among: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Which edges ``among`` some are the heaviest of their node; edges are sorted by weight."""
    rank = torch.arange(len(end), device=end.device)
    last = torch.full((num_nodes,), -1, device=end.device)
    last.scatter_reduce_(0, end, rank.masked_fill(~among, -1), "amax")
    return among & (last[end] == rank)

"""Layer-neighbour sampling (LABOR): seeds that share a neighbour take it together or not at all.

Every node ``t`` has one random number ``r_t``, and seed ``s`` takes its edge from ``t`` if ``r_t``
is below the edge's probability.  So as many edges as in neighbour sampling, in expectation, come
from fewer nodes.

Source: Balin, Çatalyürek, «Layer-Neighbor Sampling: Defusing Neighborhood Explosion in GNNs»
(NeurIPS 2023, arXiv:2210.13339).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dgl_mgpu.ops import SampleKey
from dgl_mgpu.ops.philox import as_uniform, draw_blocks

#: Fourth counter word of the variates, which no operator uses.
_STREAM = 1 << 28
#: Probabilities are found when two steps differ by less than this share.
_TOLERANCE = 1e-4
#: More steps than any distribution of weights was seen to need.
_MAX_STEPS = 1000


class Variates:
    """One random number a node, the same in all calls with the same seeds.

    With two seeds they move smoothly from those of the first to those of the second: normal
    variates are added with weights whose squares sum to 1, and mapped back to [0, 1).  ``second``
    says how far they have moved, from 0 to 1.
    """

    def __init__(self, seeds: Sequence[int], second: float) -> None:
        self._keys = [SampleKey(seed & (1 << 64) - 1).fold() for seed in seeds]
        self._second = second

    def draw(self, nodes: torch.Tensor) -> torch.Tensor:
        """Numbers of nodes, float64 in [0, 1)."""
        first = self._uniform(nodes, self._keys[0])
        if len(set(self._keys)) == 1 or self._second == 0:
            return first
        angle = self._second * math.pi / 2
        tiny = 2.0**-53
        normal = [
            torch.special.ndtri(uniform.clamp(min=tiny))
            for uniform in (first, self._uniform(nodes, self._keys[-1]))
        ]
        moved = math.cos(angle) * normal[0] + math.sin(angle) * normal[1]
        return torch.special.ndtr(moved).clamp(max=1 - tiny)

    @staticmethod
    def _uniform(nodes: torch.Tensor, key: int) -> torch.Tensor:
        return as_uniform(draw_blocks(nodes.long(), 0, _STREAM, key)[0])


class Picked(NamedTuple):
    """Which edges were picked: their places, int64, ascending, and their importances.

    With importances, float32 or in the weights' dtype, as weights, the mean over a seed's picked
    edges is that over all of its edges, in expectation.
    """

    places: torch.Tensor
    importances: torch.Tensor | None


def take_all(indptr: torch.Tensor, count: int, weights: torch.Tensor | None, steps: int) -> Picked:
    """Take all edges of seeds, as with a fanout that none of them reaches.

    There are ``count`` edges, and those of weight 0 are not taken; the rest is as for
    :func:`pick_labor`.
    """
    if weights is not None:
        places = weights.nonzero()[:, 0]
        return Picked(places, _importances(weights[places].double(), indptr, places, weights.dtype))
    places = torch.arange(count, device=indptr.device)
    return Picked(places, torch.ones(count, device=indptr.device) if steps else None)


def pick_labor(
    indptr: torch.Tensor,
    neighbors: torch.Tensor,
    fanout: int,
    variates: torch.Tensor,
    weights: torch.Tensor | None,
    steps: int,
) -> Picked:
    """Pick edges of seeds.

    Seed ``i`` has the edges ``indptr[i]`` to ``indptr[i + 1]`` and ``fanout``, at least 1, of them
    are expected.  For each edge there are its neighbor, float64 ``variates``, the number ``r_t`` of
    the neighbor, and perhaps its weight.  ``steps`` optimise the nodes' probabilities, for fewer
    nodes; if negative, until they converge.
    """
    degrees = indptr.diff()
    count = len(degrees)
    row = torch.arange(count, device=indptr.device).repeat_interleave(
        degrees, output_size=len(neighbors)
    )
    shares = torch.ones_like(variates) if weights is None else weights.double()
    sums = _row_sums(shares, degrees)
    scale = torch.where(sums > 0, fanout / sums, 0)
    if weights is None and steps == 0:
        return Picked((variates < scale[row]).nonzero()[:, 0], None)
    chances = _Chances(row, degrees, neighbors, shares, weights is not None, fanout, sums, scale)
    chosen = chances.optimise(steps)
    places = (variates < chosen).nonzero()[:, 0]
    dtype = torch.float32 if weights is None else weights.dtype
    return Picked(places, _importances(shares[places] / chosen[places], indptr, places, dtype))


def _importances(
    values: torch.Tensor, indptr: torch.Tensor, places: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Values of picked edges, scaled for each seed to a mean of 1."""
    numbers = torch.searchsorted(places, indptr).diff()
    scale = numbers / _row_sums(values, numbers)
    return (values * scale.repeat_interleave(numbers, output_size=len(values))).to(dtype)


def _row_sums(values: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
    # Added in one order always, which by scattering they are not.
    return torch.segment_reduce(values, "sum", lengths=degrees, unsafe=True)


class _Chances:
    """The search for probabilities of edges: equations (14) to (22) of the paper."""

    def __init__(
        self,
        row: torch.Tensor,
        degrees: torch.Tensor,
        neighbors: torch.Tensor,
        shares: torch.Tensor,
        weighted: bool,
        fanout: int,
        sums: torch.Tensor,
        scale: torch.Tensor,
    ) -> None:
        self.row, self.degrees, self.shares, self.weighted = row, degrees, shares, weighted
        self.scale = scale
        nodes, self.node = torch.unique(neighbors, return_inverse=True)
        self.num_nodes = len(nodes)
        self.squares = shares * shares
        kept = degrees.clamp(max=fanout)
        self.target = sums * sums / kept
        if weighted:
            self.target += _row_sums(self.squares, degrees) - sums * sums / degrees

    def optimise(self, steps: int) -> torch.Tensor:
        """Probabilities of edges after so many steps."""
        if self.weighted:
            # In proportion to weights; without weights, the first scale is right already.
            self._fit(self.shares)
        if steps == 0:
            return self._probabilities(self.shares)
        hotness: torch.Tensor | None = None
        before = math.inf
        for step in range(_MAX_STEPS if steps < 0 else steps):
            wanted = self.scale[self.row]
            if self.weighted and step == 0:
                wanted = wanted * self.shares
            largest = wanted.new_zeros(self.num_nodes).scatter_reduce_(0, self.node, wanted, "amax")
            hotness = largest if hotness is None else hotness * largest
            self._fit(hotness[self.node])
            expected = float(hotness.clamp(max=1).sum())
            if expected >= before * (1 - _TOLERANCE):
                break
            before = expected
        assert hotness is not None
        return self._probabilities(hotness[self.node])

    def _probabilities(self, relative: torch.Tensor) -> torch.Tensor:
        chances = (self.scale[self.row] * relative).clamp(max=1)
        return torch.where(self.shares > 0, chances, 0)

    def _fit(self, relative: torch.Tensor) -> None:
        """Scale probabilities in each row so that its estimate has the variance of sampling."""
        for _ in range(_MAX_STEPS):
            chance = (self.scale[self.row] * relative).clamp(max=1)
            terms = torch.where(self.shares > 0, self.squares / chance, 0)
            variance = _row_sums(terms, self.degrees)
            ratio = torch.where(variance > 0, variance / self.target, 1)
            self.scale = self.scale * ratio
            if bool(((ratio - 1).abs() < _TOLERANCE).all()):
                return

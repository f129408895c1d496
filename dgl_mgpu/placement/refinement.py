"""Solves the linear programme of placement over segments that become finer where it pays.

Segments start coarse and are split only where the prices say that their finer pieces belong in
different places, until the lower bound that the prices prove for the finest segments is met.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .master import Master
from .programme import FIRST, GAP, LAST, Programme, Run

# Pieces of a table at first, and of a segment that is split: few, so that each linear
# programme is small and starts near its optimum.
_INITIAL_SEGMENTS = 4
_SPLIT = 4
_MAX_ROUNDS = 12


@dataclass(frozen=True)
class Solution:
    """Shares found, and how good they are.

    Attributes
    ----------
    runs : list of Run
        By table and position.
    overflow : float
        Bytes that fit nowhere.
    seconds, lower_bound : float
        Time of the slowest GPU, and what no placement by these candidates can beat.
    """

    runs: list[Run]
    overflow: float
    seconds: float
    lower_bound: float


def refined(programme: Programme, segments: np.ndarray) -> Solution:
    """The best placement of the segments' rows.

    Parameters
    ----------
    programme : Programme
    segments : ndarray, int64, shape (k, 4)
    """
    if not len(segments):
        return Solution([], 0.0, 0.0, 0.0)
    finest = _split(segments, np.ones(len(segments), bool), programme.breakpoints)
    coarse = _split(segments, np.ones(len(segments), bool), _INITIAL_SEGMENTS)
    best: tuple[float, list[Run]] = (np.inf, [])
    bound = 0.0
    for _ in range(_MAX_ROUNDS):
        master = Master(programme, coarse, best[1])
        runs = master.runs()
        seconds = programme.seconds(runs)
        if seconds <= best[0] * (1 + 1e-9):
            best = seconds, runs
        # What finer segments could still gain, and where; shares of a segment lie one
        # after another, so a segment that is not uniform is not quite as reckoned.
        cheapest = programme.cheapest_sums(coarse, finest, master.row_prices)
        gain = master.segment_prices - cheapest
        bound = max(bound, master.objective - float(gain.sum()))
        if best[0] - bound <= GAP * best[0]:
            break
        wanted = master.mixed | (gain > GAP / 2 * seconds / len(coarse))
        wanted &= coarse[:, LAST] > coarse[:, FIRST] + 1
        if not wanted.any():
            break
        coarse = _split(coarse, wanted, _SPLIT)
    overflow = sum(run.end - run.begin for run in best[1] if run.key is None)
    scale = programme.time_scale
    return Solution(best[1], overflow, best[0] * scale, bound * scale)


def _split(segments: np.ndarray, wanted: np.ndarray, pieces: int) -> np.ndarray:
    """Segments, those wanted in up to so many pieces of equal numbers of breakpoints."""
    length = segments[:, LAST] - segments[:, FIRST]
    count = np.where(wanted, np.minimum(length, pieces), 1)
    parent = np.repeat(np.arange(len(segments)), count)
    nth = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
    finer = segments[parent]
    finer[:, FIRST] = segments[parent, FIRST] + nth * length[parent] // count[parent]
    finer[:, LAST] = segments[parent, FIRST] + (nth + 1) * length[parent] // count[parent]
    return finer

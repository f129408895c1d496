"""Solves the linear programme of placement by column generation (Dantzig and Wolfe).

Tables are cut into blocks of pieces.  A *column* says where every piece of one block goes; the
master programme (``master.py``) mixes the columns that are there so that the slowest GPU waits
least, and prices what each memory and each way is worth.  At those prices every piece goes where it
costs least: that makes new columns, and proves what no placement can beat.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from dgl_mgpu.placement.linear_program import NOWHERE, LinearProgram, Proposal, RowRange
from dgl_mgpu.placement.restricted_master import Mixture, RestrictedMaster

#: Relative distance from the lower bound at which a placement is good enough.
GAP = 5e-3
# The same, of all the time scale, where memory is to count, too, which costs little beside time.
_EXACT = 1e-8
# Blocks of a table, or of what a ratio cuts it into.
_BLOCKS = 12
_MAX_ROUNDS = 200
# How often the cells that these leave mixed are cut, and into how many.
_MAX_CUTS = 6
_PARTS = 4
# Prices are asked between those that proved most so far and the newest, which swing.
_DAMPING = 0.5
# Prices to begin with: a byte of GPU memory against all ways alike, host memory and disk for less.
_FIRST_PRICES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
_FIRST_WEIGHTS = (0.3, 0.1)


@dataclass(frozen=True)
class Solution:
    """Shares found, and how good they are.

    Attributes
    ----------
    runs : list of RowRange
        By table and position.
    overflow : int
        Bytes that fit nowhere.
    seconds, lower_bound : float
        Time of the slowest GPU, and what no placement by these candidates can beat.
    """

    row_ranges: list[RowRange]
    overflow: int
    seconds: float
    lower_bound: float


def best_placement(linear_program: LinearProgram, exact: bool, cell_rows: int) -> Solution:
    """Where the pieces go.

    Parameters
    ----------
    linear_program : LinearProgram
    exact : bool
        Go on until nothing is better, not even by the memory that it takes.  Else stop within
        :data:`GAP` of the best: where GPUs are not all alike, the last steps gain next to nothing
        and take the longest.
    cell_rows : int
        Rows that are mixed together, at least: fewer cannot be dealt out as shares ask.
    """
    if not len(linear_program.tables):
        return Solution([], 0, 0.0, 0.0)
    columns = _Columns(linear_program)
    for proposal in _first_proposals(linear_program):
        columns.add(proposal)
    bound, damped = -np.inf, None
    for _ in range(_MAX_ROUNDS):
        mixture = columns.mixed()
        fresh = False
        asked = [mixture.prices]
        if damped is not None:
            asked.insert(0, _DAMPING * damped + (1 - _DAMPING) * mixture.prices)
        for prices in asked:
            proposal = linear_program.cheapest(prices)
            fresh |= columns.add(proposal)
            if proposal.least > bound:
                bound, damped = proposal.least, prices
        gap = _EXACT if exact else GAP * mixture.objective
        if mixture.objective - bound <= gap or not fresh:
            break
    seconds, row_ranges = _few_row_ranges(linear_program, columns.used(mixture), cell_rows)
    scale = linear_program.time_scale
    overflow = sum(
        row_range.end - row_range.begin for row_range in row_ranges if row_range.pattern == NOWHERE
    )
    return Solution(row_ranges, overflow, seconds * scale, max(bound, 0.0) * scale)


def _first_proposals(linear_program: LinearProgram) -> list[Proposal]:
    """Everything in host memory, everything on disk, and what a few guessed prices make of it."""
    times, memories = len(linear_program.times), len(linear_program.budget)
    weights = np.ones(memories)
    weights[-2:] = _FIRST_WEIGHTS
    guesses = [
        np.concatenate([np.full(times, -1.0 / times), -price * weights]) for price in _FIRST_PRICES
    ]
    return [
        linear_program.off_gpu(-2),
        linear_program.off_gpu(-1),
        *map(linear_program.cheapest, guesses),
    ]


class _Columns:
    """What was proposed so far, by block."""

    def __init__(self, linear_program: LinearProgram) -> None:
        ends = linear_program.ranges.tolist()
        self._starts = np.unique([
            start + step * (stop - start) // _BLOCKS
            for start, stop in itertools.pairwise(ends)
            for step in range(_BLOCKS)
        ])  # fmt: skip
        self._stops = [*self._starts[1:].tolist(), len(linear_program.tables)]
        self._known: set[tuple[int, bytes]] = set()
        self._block: list[int] = []
        self._patterns: list[np.ndarray] = []
        self._master = RestrictedMaster(
            linear_program, np.add.reduceat(linear_program.nowhere_costs, self._starts)
        )

    def add(self, proposal: Proposal) -> bool:
        """Let blocks be kept as proposed; whether any of it is new."""
        taken = np.add.reduceat(proposal.taken, self._starts)
        costs = np.add.reduceat(proposal.costs, self._starts)
        fresh = []
        for block, (start, stop) in enumerate(zip(self._starts.tolist(), self._stops, strict=True)):
            patterns = proposal.patterns[start:stop]
            tag = (block, patterns.tobytes())
            if tag not in self._known:
                self._known.add(tag)
                self._block.append(block)
                self._patterns.append(patterns)
                fresh.append(block)
        if fresh:
            self._master.add(fresh, taken[fresh], costs[fresh])
        return bool(fresh)

    def mixed(self) -> Mixture:
        """The best of what is there."""
        return self._master.mixed()

    def used(self, mixture: Mixture) -> np.ndarray:
        """Patterns of each piece in the columns that a mixture uses, in no order that matters.

        Returns
        -------
        ndarray of int, shape (pieces, k)
        """
        chosen = [
            [self._patterns[column] for column in mixture.shares.nonzero()[0].tolist()
             if self._block[column] == block]
            for block in range(len(self._starts))
        ]  # fmt: skip
        for block, columns in enumerate(chosen):
            if mixture.nowhere[block] or not columns:
                size = self._stops[block] - int(self._starts[block])
                columns.append(np.full(size, NOWHERE))
        width = max(map(len, chosen))
        return np.concatenate([
            np.stack([*columns, *columns[:1] * (width - len(columns))], axis=1)
            for columns in chosen
        ])  # fmt: skip


def _few_row_ranges(
    linear_program: LinearProgram, used: np.ndarray, cell_rows: int
) -> tuple[float, list[RowRange]]:
    """The time, and few runs of patterns that are used, beside each other in the order of rows.

    Pieces beside each other that all columns keep alike are one *cell*.  Cells are mixed once
    more, each of the patterns used in it and beside it, which leaves few of them mixed; those
    whose rows are too different to be mixed are cut until shares are what they were taken for.
    """
    changes = (used[1:] != used[:-1]).any(1).nonzero()[0] + 1
    starts = _of_enough_rows(linear_program, changes, cell_rows)
    best: tuple[float, list[RowRange]] = (np.inf, [])
    for _ in range(_MAX_CUTS):
        block, patterns = _cell_patterns(linear_program, used, starts)
        taken, costs = linear_program.columns(starts, block, patterns)
        master = RestrictedMaster(
            linear_program, np.add.reduceat(linear_program.nowhere_costs, starts)
        )
        master.add(block, taken, costs)
        mixture = master.mixed()
        shares: list[dict[int, int]] = [{} for _ in starts]
        for column in mixture.shares.nonzero()[0].tolist():
            shares[block[column]][int(patterns[column])] = int(mixture.shares[column])
        for cell in mixture.nowhere.nonzero()[0].tolist():
            shares[cell][NOWHERE] = int(mixture.nowhere[cell])
        row_ranges = linear_program.row_ranges(starts, shares)
        best = min(
            best, (linear_program.seconds(row_ranges), row_ranges), key=lambda found: found[0]
        )
        stops = np.append(starts[1:], len(used))
        mixed = np.array([len(each) > 1 for each in shares]) & (stops > starts + 1)
        if best[0] <= mixture.objective * (1 + GAP / 2) or not mixed.any():
            break
        parts = np.arange(_PARTS)[:, None]
        cut = starts[mixed] + parts * (stops[mixed] - starts[mixed]) // _PARTS
        finer = _of_enough_rows(linear_program, np.union1d(starts, cut), cell_rows)
        if np.array_equal(finer, starts):
            break
        starts = finer
    return best


def _of_enough_rows(
    linear_program: LinearProgram, starts: np.ndarray, cell_rows: int
) -> np.ndarray:
    """Starts of cells, those of ranges among them, so far apart that rows can be dealt out."""
    kept = []
    rows = linear_program.rows
    for first, last in itertools.pairwise(linear_program.ranges.tolist()):
        kept.append(first)
        for start in starts[(starts > first) & (starts < last)].tolist():
            if min(rows[start] - rows[kept[-1]], rows[last] - rows[start]) >= cell_rows:
                kept.append(start)
    return np.array(kept)


def _cell_patterns(
    linear_program: LinearProgram, used: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Cells, and the patterns used in each and in those beside it in its range."""
    stops = [*starts[1:].tolist(), len(used)]
    here = [
        set(used[start:stop].ravel().tolist()) - {NOWHERE}
        for start, stop in zip(starts.tolist(), stops, strict=True)
    ]
    ranges = np.searchsorted(linear_program.ranges, starts, side="right")
    block, patterns = [], []
    for cell, kind in enumerate(ranges.tolist()):
        beside = range(max(cell - 1, 0), min(cell + 2, len(here)))
        near = {each for other in beside if ranges[other] == kind for each in here[other]}
        block.extend([cell] * len(near))
        patterns.extend(sorted(near))
    return np.array(block, np.int64), np.array(patterns, np.int64)

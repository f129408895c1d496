"""Solves the linear program of placement by column generation (Dantzig and Wolfe).

Tables are cut into blocks of pieces.  A *column* says where every piece of one block goes.  The
restricted master program, which HiGHS solves, mixes the columns that are there so that the
slowest GPU waits least, and prices each memory and each link.  At these prices every piece goes
where it costs least: that makes new columns, and a lower bound that no placement can beat.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from dgl_mgpu.placement.linear_program import NOWHERE, LinearProgram, Proposal, RowRange

# Relative distance from the lower bound at which a placement is good enough.
_GAP = 5e-3
# The same, relative to the time scale, where memory, which costs little beside time, counts too.
_EXACT_GAP = 1e-8
# Blocks of a table, or of what a ratio cuts it into.
_BLOCKS = 12
_MAX_ROUNDS = 200
# How often the cells that are left mixed are cut, and into how many.
_MAX_CUTS = 6
_PARTS = 4
# The newest prices swing: those between them and the ones of the best bound are tried as well.
_DAMPING = 0.5
# Initial prices: a byte of GPU memory against all links alike, host memory and disk for less.
_FIRST_PRICES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
_FIRST_WEIGHTS = (0.3, 0.1)

# Tolerance of HiGHS in shares and in costs; with a smaller one it gives up at times.
# Costs are given in thousandths, so that those of memory are well above that.
_TOLERANCE = 1e-8
_COST_SCALE = 1e3
# Columns that are added leave the last solution feasible, from which the primal simplex goes on.
_PRIMAL = 4
_OPTIONS: dict[str, bool | int | float | str] = {
    "output_flag": False,
    "presolve": "off",
    "solver": "simplex",
    "simplex_strategy": _PRIMAL,
    "primal_feasibility_tolerance": _TOLERANCE,
    "dual_feasibility_tolerance": _TOLERANCE,
}
# Digits behind the point that prices are kept to, and the whole of which shares are integer
# parts: what is finer is rounding.
_PRICE_DIGITS = 12
_SHARES = 1 << 26


@dataclass(frozen=True)
class Solution:
    """Row ranges by table and position, and the bytes of them that fit nowhere.

    No placement by these candidates takes less than ``lower_bound`` seconds of the slowest GPU.
    """

    row_ranges: list[RowRange]
    overflow: int
    lower_bound: float


def best_placement(program: LinearProgram, exact: bool, cell_rows: int) -> Solution:
    """Where the pieces go.

    ``exact`` goes on until nothing is better, not even by the memory that it takes.  Else it
    stops close to the best: where GPUs are not all alike, the last steps gain next to nothing and
    take the longest.  At least ``cell_rows`` rows are mixed together: fewer cannot be dealt out
    as the shares demand.
    """
    if not len(program.tables):
        return Solution([], 0, 0.0)
    columns = _Columns(program)
    for proposal in _first_proposals(program):
        columns.add(proposal)
    bound, damped = -np.inf, None
    for _ in range(_MAX_ROUNDS):
        mixture = columns.master.solve()
        fresh = False
        trials = [mixture.prices]
        if damped is not None:
            trials.insert(0, _DAMPING * damped + (1 - _DAMPING) * mixture.prices)
        for prices in trials:
            proposal = program.cheapest(prices)
            fresh |= columns.add(proposal)
            if proposal.lower_bound > bound:
                bound, damped = proposal.lower_bound, prices
        gap = _EXACT_GAP if exact else _GAP * mixture.objective
        if mixture.objective - bound <= gap or not fresh:
            break
    row_ranges = _few_row_ranges(program, columns.used(mixture), cell_rows)
    overflow = sum(
        row_range.end - row_range.begin for row_range in row_ranges if row_range.pattern == NOWHERE
    )
    return Solution(row_ranges, overflow, max(bound, 0.0) * program.time_scale)


def _first_proposals(program: LinearProgram) -> list[Proposal]:
    """Everything in host memory, everything on disk, and the cheapest at a few guessed prices."""
    times, memories = len(program.times), len(program.budget)
    weights = np.ones(memories)
    weights[-2:] = _FIRST_WEIGHTS
    guesses = [
        np.concatenate([np.full(times, -1.0 / times), -price * weights]) for price in _FIRST_PRICES
    ]
    return [program.off_gpu(-2), program.off_gpu(-1), *map(program.cheapest, guesses)]


class _Columns:
    """What was proposed so far, by block."""

    def __init__(self, program: LinearProgram) -> None:
        self._starts = np.unique([
            start + step * (stop - start) // _BLOCKS
            for start, stop in itertools.pairwise(program.ranges.tolist())
            for step in range(_BLOCKS)
        ])  # fmt: skip
        self._bounds = [*self._starts.tolist(), len(program.tables)]
        self._known: set[tuple[int, bytes]] = set()
        # Block and patterns of each column.
        self._columns: list[tuple[int, np.ndarray]] = []
        self.master = _RestrictedMaster(program, self._starts)

    def add(self, proposal: Proposal) -> bool:
        """Add the columns of a proposal; returns whether any is new."""
        usage = np.add.reduceat(proposal.usage, self._starts)
        costs = np.add.reduceat(proposal.costs, self._starts)
        fresh = []
        for block, (start, stop) in enumerate(itertools.pairwise(self._bounds)):
            patterns = proposal.patterns[start:stop]
            tag = (block, patterns.tobytes())
            if tag not in self._known:
                self._known.add(tag)
                self._columns.append((block, patterns))
                fresh.append(block)
        if fresh:
            self.master.add(fresh, usage[fresh], costs[fresh])
        return bool(fresh)

    def used(self, mixture: _Mixture) -> np.ndarray:
        """Patterns of each piece in the columns that a mixture uses: int, shape (pieces, k)."""
        chosen: list[list[np.ndarray]] = [[] for _ in self._starts]
        for column in mixture.shares.nonzero()[0].tolist():
            block, patterns = self._columns[column]
            chosen[block].append(patterns)
        for block, columns in enumerate(chosen):
            if mixture.nowhere[block] or not columns:
                size = self._bounds[block + 1] - self._bounds[block]
                columns.append(np.full(size, NOWHERE))
        width = max(map(len, chosen))
        return np.concatenate([
            np.stack([*columns, *columns[:1] * (width - len(columns))], axis=1)
            for columns in chosen
        ])  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Mixture:
    """The best shares of columns."""

    objective: float  # time of the slowest GPU, and the small costs of memory
    prices: np.ndarray  # of the time and memory rows
    shares: np.ndarray  # of each column, in parts of _SHARES
    nowhere: np.ndarray  # of each block, the share that is kept nowhere


class _RestrictedMaster:
    """Mixes columns, each of one block, so that the slowest GPU waits least.

    Rows are the program's time rows and memory rows, then one for each block: the shares of its
    columns, and what of it is kept nowhere, add up to 1.  Each solution goes on from the last.
    """

    def __init__(self, program: LinearProgram, starts: np.ndarray) -> None:
        nowhere_costs = np.add.reduceat(program.nowhere_costs, starts)
        times, waits = program.times.shape
        self._waits, self._blocks = waits, len(nowhere_costs)
        whole = np.ones(self._blocks)
        most = np.concatenate([np.zeros(times), program.budget, whole])
        least = np.concatenate([np.full(len(most) - self._blocks, -highspy.kHighsInf), whole])
        self._highs = highspy.Highs()
        for option, value in _OPTIONS.items():
            self._highs.setOptionValue(option, value)
        self._highs.addRows(len(most), least, most, 0, [], [], [])
        fixed = np.zeros((waits + self._blocks, len(most)))
        fixed[:waits, :times] = program.times.T
        fixed[waits:, -self._blocks :] = np.eye(self._blocks)
        slowest = np.zeros(waits)
        slowest[-1] = 1.0
        self._add(fixed, np.concatenate([slowest, nowhere_costs]))

    def add(self, blocks: Sequence[int] | np.ndarray, usage: np.ndarray, costs: np.ndarray) -> None:
        """Add columns: the block of each, its usage of the time and memory rows, its cost."""
        whole = np.zeros((len(usage), self._blocks))
        whole[np.arange(len(usage)), blocks] = 1.0
        self._add(np.concatenate([usage, whole], axis=1), costs)

    def _add(self, columns: np.ndarray, costs: np.ndarray) -> None:
        count = len(columns)
        at, rows = columns.nonzero()
        self._highs.addCols(
            count, _COST_SCALE * costs, np.zeros(count), np.full(count, highspy.kHighsInf),
            len(at), np.searchsorted(at, np.arange(count)), rows, columns[at, rows],
        )  # fmt: skip

    def solve(self) -> _Mixture:
        """The best mixture of the columns added so far."""
        highs = self._highs
        highs.run()
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            # From the start and with presolve takes longer, but solves what HiGHS gave up.
            highs.clearSolver()
            highs.setOptionValue("presolve", "on")
            highs.run()
            highs.setOptionValue("presolve", "off")
        status = highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise ArithmeticError(
                f"the linear program of a placement: {highs.modelStatusToString(status)}"
            )
        solution = highs.getSolution()
        shares = np.rint(_SHARES * np.array(solution.col_value)).astype(np.int64)
        first = self._waits + self._blocks
        return _Mixture(
            highs.getObjectiveValue() / _COST_SCALE,
            np.round(np.array(solution.row_dual)[: -self._blocks] / _COST_SCALE, _PRICE_DIGITS),
            shares[first:],
            shares[self._waits : first],
        )


def _few_row_ranges(program: LinearProgram, used: np.ndarray, cell_rows: int) -> list[RowRange]:
    """Few ranges of the patterns that are used, beside each other in the order of rows.

    Pieces beside each other that all columns keep alike are one *cell*.  Cells are mixed once
    more, each of the patterns used in it and beside it, which leaves few of them mixed.  Those
    whose rows are too different to be mixed are cut until their shares load what they should.
    """
    changes = (used[1:] != used[:-1]).any(1).nonzero()[0] + 1
    starts = _with_enough_rows(program, changes, cell_rows)
    best: list[RowRange] = []
    best_seconds = np.inf
    for _ in range(_MAX_CUTS):
        cells, patterns = _cell_patterns(program, used, starts)
        master = _RestrictedMaster(program, starts)
        master.add(cells, *program.columns(starts, cells, patterns))
        mixture = master.solve()
        shares: list[dict[int, int]] = [{} for _ in starts]
        for column in mixture.shares.nonzero()[0].tolist():
            shares[cells[column]][int(patterns[column])] = int(mixture.shares[column])
        for cell in mixture.nowhere.nonzero()[0].tolist():
            shares[cell][NOWHERE] = int(mixture.nowhere[cell])
        row_ranges = program.row_ranges(starts, shares)
        seconds = program.seconds(row_ranges)
        if seconds < best_seconds:
            best, best_seconds = row_ranges, seconds
        stops = np.append(starts[1:], len(used))
        mixed = np.array([len(share) > 1 for share in shares]) & (stops > starts + 1)
        if best_seconds <= mixture.objective * (1 + _GAP / 2) or not mixed.any():
            break
        parts = np.arange(_PARTS)[:, None]
        cut = starts[mixed] + parts * (stops[mixed] - starts[mixed]) // _PARTS
        finer = _with_enough_rows(program, np.union1d(starts, cut), cell_rows)
        if np.array_equal(finer, starts):
            break
        starts = finer
    return best


def _with_enough_rows(program: LinearProgram, starts: np.ndarray, cell_rows: int) -> np.ndarray:
    """Starts of cells, those of ranges among them, so far apart that rows can be dealt out."""
    result: list[int] = []
    rows = program.rows
    for first, last in itertools.pairwise(program.ranges.tolist()):
        result.append(first)
        for start in starts[(starts > first) & (starts < last)].tolist():
            if min(rows[start] - rows[result[-1]], rows[last] - rows[start]) >= cell_rows:
                result.append(start)
    return np.array(result)


def _cell_patterns(
    program: LinearProgram, used: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Cells, and the patterns used in each and in those beside it in its range."""
    here = [set(used[start:stop].ravel().tolist()) - {NOWHERE}
            for start, stop in itertools.pairwise([*starts.tolist(), len(used)])]  # fmt: skip
    ranges = np.searchsorted(program.ranges, starts, side="right")
    cells, patterns = [], []
    for cell, kind in enumerate(ranges.tolist()):
        beside = range(max(cell - 1, 0), min(cell + 2, len(here)))
        near = set().union(*(here[other] for other in beside if ranges[other] == kind))
        cells.extend([cell] * len(near))
        patterns.extend(sorted(near))
    return np.array(cells, np.int64), np.array(patterns, np.int64)

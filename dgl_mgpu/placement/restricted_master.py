"""The master programme of column generation, which HiGHS solves.

It is asked again and again, with some columns more each time, and goes on from its last answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from dgl_mgpu.placement.linear_program import LinearProgram

# What HiGHS may be off by, in shares and in costs; where less is asked, it gives up at times.
# Costs are given in thousandths, so that those of memory are well above that.
_TOLERANCE = 1e-8
_COST_SCALE = 1e3
# Columns that are added leave the last answer possible, if no longer the best: the primal simplex
# can go on from there.
_PRIMAL = 4
_OPTIONS: dict[str, bool | int | float | str] = {
    "output_flag": False,
    "presolve": "off",
    "solver": "simplex",
    "simplex_strategy": _PRIMAL,
    "primal_feasibility_tolerance": _TOLERANCE,
    "dual_feasibility_tolerance": _TOLERANCE,
}
# Digits behind the point that prices are kept to, and what shares are whole numbers of: what is
# finer is rounding.
_PRICE_DIGITS = 12
_SHARES = 1 << 26


@dataclass(frozen=True, eq=False)
class Mixture:
    """The best shares of columns.

    Attributes
    ----------
    objective : float
        Time of the slowest GPU, and the small costs of memory.
    prices : ndarray
        Of the time and memory rows.
    shares : ndarray of int
        Of each column.
    nowhere : ndarray of int
        Of each block, what is kept nowhere.
    """

    objective: float
    prices: np.ndarray
    shares: np.ndarray
    nowhere: np.ndarray


class RestrictedMaster:
    """Mixes columns, each of one block, so that the slowest GPU waits least.

    Rows are the programme's time rows and memory rows, then one for each block: the shares of its
    columns, and what of it is kept nowhere, add up to 1.

    Parameters
    ----------
    linear_program : LinearProgram
    nowhere_costs : ndarray, shape (blocks,)
        What it costs to keep each block nowhere.
    """

    def __init__(self, linear_program: LinearProgram, nowhere_costs: np.ndarray) -> None:
        times, waits = linear_program.times.shape
        self._waits, self._blocks = waits, len(nowhere_costs)
        whole = np.ones(self._blocks)
        most = np.concatenate([np.zeros(times), linear_program.budget, whole])
        least = np.concatenate([np.full(len(most) - self._blocks, -highspy.kHighsInf), whole])
        self._highs = highspy.Highs()
        for option, value in _OPTIONS.items():
            self._highs.setOptionValue(option, value)
        self._highs.addRows(len(most), least, most, 0, [], [], [])
        fixed = np.zeros((waits + self._blocks, len(most)))
        fixed[:waits, :times] = linear_program.times.T
        fixed[waits:, -self._blocks :] = np.eye(self._blocks)
        slowest = np.zeros(waits)
        slowest[-1] = 1.0
        self._add(fixed, np.concatenate([slowest, nowhere_costs]))

    def add(self, block: Sequence[int] | np.ndarray, taken: np.ndarray, costs: np.ndarray) -> None:
        """Columns more: the block of each, what it takes of the time and memory rows, its cost."""
        whole = np.zeros((len(taken), self._blocks))
        whole[np.arange(len(taken)), block] = 1.0
        self._add(np.concatenate([taken, whole], axis=1), costs)

    def _add(self, columns: np.ndarray, costs: np.ndarray) -> None:
        count = len(columns)
        at, rows = columns.nonzero()
        self._highs.addCols(
            count, _COST_SCALE * costs, np.zeros(count), np.full(count, highspy.kHighsInf),
            len(at), np.searchsorted(at, np.arange(count)), rows, columns[at, rows],
        )  # fmt: skip

    def mixed(self) -> Mixture:
        """The best of what is there."""
        highs = self._highs
        highs.run()
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            # From the beginning, and simplified first, takes longer, and solves what HiGHS gave up.
            highs.clearSolver()
            highs.setOptionValue("presolve", "on")
            highs.run()
            highs.setOptionValue("presolve", "off")
        status = highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise ArithmeticError(
                f"the linear programme of a placement: {highs.modelStatusToString(status)}"
            )
        found = highs.getSolution()
        shares = np.rint(_SHARES * np.array(found.col_value)).astype(np.int64)
        first = self._waits + self._blocks
        return Mixture(
            highs.getObjectiveValue() / _COST_SCALE,
            np.round(np.array(found.row_dual)[: -self._blocks] / _COST_SCALE, _PRICE_DIGITS),
            shares[first:],
            shares[self._waits : first],
        )

"""A small revised simplex with columns generated on demand.

Solves ``min c x  with  A x = b, x >= 0`` for the few dozen rows that placements lead to.  Most
columns of A are not listed but generated, given prices of the rows, and kept in a pool from
then on.  Dense and plain: a pivot costs a product with the pool and a rank-one update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Reduced costs above minus this are taken for zero; costs are of order one.
_TOLERANCE = 1e-11
_PIVOT_TOLERANCE = 1e-9
_REFACTOR_EVERY = 256
_MAX_PIVOTS = 20_000
# Products larger than this BLAS hands to threads, which takes longer than the product.
_MOST_ENTRIES = 8192


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of A.

    Attributes
    ----------
    entries : ndarray, shape (k, m)
        One column of A a row.
    costs : ndarray, shape (k,)
    tags : sequence of length k
        What each stands for, to the caller.
    """

    entries: np.ndarray
    costs: np.ndarray
    tags: Sequence[Any]


class Simplex:
    """A pool of columns, a basis of it, and what follows from that.

    Parameters
    ----------
    rhs : ndarray, shape (m,)
    columns : Columns
        The pool to begin with.
    basis : sequence of int, length m
        A feasible start: numbers of columns in the pool.
    top : int
        Rows after the first ``top`` have a basic column each, in their order, that is 1 there
        and 0 in the other such rows; the basic columns before those are 0 in all of them.
    """

    def __init__(self, rhs: np.ndarray, columns: Columns, basis: Sequence[int], top: int) -> None:
        self._rhs = rhs
        self._pool, self._costs = columns.entries, columns.costs
        self._tags = list(columns.tags)
        self._basis = np.array(basis)
        self.pivots = 0
        matrix = self._pool[self._basis].T
        self._inverse = np.eye(len(rhs))
        corner = self._inverse[:top, :top] = np.linalg.inv(matrix[:top, :top])
        self._inverse[:top, top:] = -corner @ matrix[:top, top:]
        self._evaluate()

    def _factor(self) -> None:
        self._inverse = np.linalg.inv(self._pool[self._basis].T)
        self._evaluate()

    def _evaluate(self) -> None:
        self._values = np.maximum(self._inverse @ self._rhs, 0.0)
        self.prices = self._costs[self._basis] @ self._inverse

    @property
    def objective(self) -> float:
        return float(self._costs[self._basis] @ self._values)

    def solution(self) -> list[tuple[Any, float]]:
        """Tags and values of the basic columns."""
        tags = (self._tags[column] for column in self._basis.tolist())
        return list(zip(tags, self._values.tolist(), strict=True))

    def minimise(self, generate: Callable[[np.ndarray], tuple[Columns, float]], gap: float) -> None:
        """Pivot until no column lowers the objective, or none can by much.

        Parameters
        ----------
        generate : callable
            Prices of the rows → columns worth adding, among them one of negative reduced cost
            if there is any; and a lower bound of the optimum.
        gap : float
            Relative distance from the lower bound to stop at.
        """
        while True:
            self._use_pool()
            columns, bound = generate(self.prices)
            if self.objective - bound <= gap * self.objective:
                return
            worth = columns.costs - _product(columns.entries, self.prices) < -_TOLERANCE
            if not worth.any():
                return
            self._pool = np.concatenate([self._pool, columns.entries[worth]])
            self._costs = np.concatenate([self._costs, columns.costs[worth]])
            self._tags.extend(columns.tags[index] for index in worth.nonzero()[0].tolist())

    def _use_pool(self) -> None:
        while True:
            reduced = self._costs - _product(self._pool, self.prices)
            best = int(reduced.argmin())
            if reduced[best] >= -_TOLERANCE:
                return
            self._enter(best, reduced[best])

    def _enter(self, column: int, reduced_cost: float) -> None:
        """Bring a column into the basis."""
        direction = _product(self._inverse, self._pool[column])
        positive = (direction > _PIVOT_TOLERANCE).nonzero()[0]
        if not len(positive) or self.pivots == _MAX_PIVOTS:
            raise ArithmeticError(f"linear programme unbounded or stuck at {self.pivots} pivots")
        ratios = self._values[positive] / direction[positive]
        step = ratios.min()
        # Among the rows that tie, the largest pivot is the most exact.
        ties = positive[ratios <= step + 1e-12]
        row = int(ties[direction[ties].argmax()])
        self._values -= step * direction
        np.maximum(self._values, 0.0, out=self._values)
        self._values[row] = step
        self._inverse[row] /= direction[row]
        pivot = self._inverse[row].copy()
        direction[row] = 0.0
        self._inverse -= direction[:, None] * pivot
        self.prices = self.prices + reduced_cost * pivot
        self._basis[row] = column
        self.pivots += 1
        if self.pivots % _REFACTOR_EVERY == 0:
            self._factor()


def _product(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Matrix times vector, in this thread."""
    if matrix.size <= _MOST_ENTRIES:
        return matrix @ vector
    return np.einsum("ij,j->i", matrix, vector)

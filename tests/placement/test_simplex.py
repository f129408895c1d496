"""The simplex against SciPy's, on random programmes with columns made on demand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from dgl_mgpu.placement.simplex import Columns, Simplex


@pytest.mark.parametrize("seed", range(20))
def test_optimum_is_scipys(seed):
    """min c x, A x <= b, x >= 0, with b >= 0: the slacks are a feasible start."""
    rng = np.random.default_rng(seed)
    rows, count = rng.integers(2, 25), rng.integers(2, 60)
    matrix = rng.uniform(-0.2, 1.0, (rows, count)) * (rng.random((rows, count)) < 0.6)
    matrix = np.vstack([matrix, np.ones(count)])  # bounded
    cost = rng.normal(size=count)
    rhs = np.append(rng.random(rows), 5.0)
    m = rows + 1

    def generate(prices):
        reduced = cost - matrix.T @ prices
        best = np.argsort(reduced)[:3]
        entries = np.ascontiguousarray(matrix.T[best])
        return Columns(entries, cost[best], [("x", i) for i in best]), -np.inf

    simplex = Simplex(rhs, Columns(np.eye(m), np.zeros(m), [None] * m), range(m), m)
    simplex.minimise(generate, 0.0)
    expected = linprog(cost, matrix, rhs)
    assert simplex.objective == pytest.approx(expected.fun, abs=1e-8)
    found = np.zeros(count)
    for tag, value in simplex.solution():
        if tag is not None:
            found[tag[1]] += value
    assert (matrix @ found <= rhs + 1e-8).all() and (found >= 0).all()
    assert cost @ found == pytest.approx(expected.fun, abs=1e-8)


def test_an_unbounded_programme_is_an_error():
    def generate(prices):
        return Columns(np.array([[-1.0]]), np.array([-1.0]), ["x"]), -np.inf

    simplex = Simplex(np.ones(1), Columns(np.eye(1), np.zeros(1), [None]), [0], 1)
    with pytest.raises(ArithmeticError):
        simplex.minimise(generate, 0.0)

"""Curves at a few points stand for tables of any size."""

from __future__ import annotations

import numpy as np
import pytest

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.placement import TableSpec
from dgl_mgpu.placement.table import MAX_BREAKPOINTS


def power_law(rows):
    rng = np.random.default_rng(0)
    return np.sort((rng.pareto(1.3, rows) * 5 + 1).astype(np.int64))[::-1]


@pytest.mark.parametrize("rows", [0, 1, 2, 255, 256, 5_000, 300_000])
def test_curves_follow_the_sums_they_stand_for(rows):
    degrees = power_law(rows)
    spec = TableSpec.topology("graph", degrees, accesses_per_step=1e4, stored_eids=True)
    assert len(spec.positions) <= MAX_BREAKPOINTS + 2
    assert spec.num_rows == rows
    at = np.arange(rows + 1)
    nbytes = np.concatenate([[0], np.cumsum(8 + 16 * degrees)])
    accesses = np.concatenate([[0], np.cumsum(degrees)]) * (1e4 / max(degrees.sum(), 1))
    assert np.abs(spec.bytes_before(at) - nbytes).max() <= 0.01 * nbytes[-1]
    assert np.abs(spec.accesses_before(at) - accesses).max() <= 0.01 * max(accesses[-1], 1)
    # At the breakpoints they are exact.
    np.testing.assert_allclose(spec.nbytes, nbytes[spec.positions])
    np.testing.assert_allclose(spec.accesses, accesses[spec.positions], atol=1e-9)


def test_features_without_hotness_are_equally_hot():
    spec = TableSpec.features("x", 1000, 400, accesses_per_step=50)
    assert spec.accesses_before(250) == pytest.approx(12.5)
    assert spec.total_bytes == 400_000


def test_rows_that_were_never_read_are_equally_hot():
    spec = TableSpec.features("x", 10, 4, np.zeros(10), accesses_per_step=5)
    assert spec.accesses_before(4) == pytest.approx(2.0)


@pytest.mark.parametrize("stored", [False, True])
def test_sampling_reads_bounds_neighbours_and_edge_ids(stored):
    spec = TableSpec.topology("g", np.array([3, 1]), fanout=15, id_bytes=4, stored_eids=stored)
    # Two bounds and 15 ids; the ids of edges follow from that of the first one or are read too.
    assert spec.access_bytes == (16 + 15 * 8 if stored else 24 + 15 * 4)
    assert spec.request_bytes == 4


def test_one_more_breakpoint_changes_no_curve():
    spec = TableSpec.features("x", 100_000, 400, power_law(100_000))
    more = spec.with_breakpoint(12_345)
    assert 12_345 in more.positions
    at = np.arange(0, 100_001, 77)
    np.testing.assert_allclose(more.accesses_before(at), spec.accesses_before(at))


@pytest.mark.parametrize(
    "arguments",
    [
        {"row_bytes": 0},
        {"row_bytes": 4, "hotness": np.ones(9)},
        {"row_bytes": 4, "hotness": np.full(10, np.nan)},
        {"row_bytes": 4, "hotness": np.array([1.0] * 9 + [-1.0])},
        {"row_bytes": 4, "accesses_per_step": -1.0},
        {"row_bytes": 4, "accesses_per_step": np.inf},
    ],
)
def test_what_describes_no_table_is_refused(arguments):
    with pytest.raises(InvalidInputError, match="table 'x'"):
        TableSpec.features("x", 10, **arguments)


@pytest.mark.parametrize("degrees", [np.array([1, -1]), np.ones((2, 2))])
def test_degrees_that_are_none_are_refused(degrees):
    with pytest.raises(InvalidInputError, match="degrees"):
        TableSpec.topology("g", degrees)

"""Curves at a few points stand for tables of any size."""

from __future__ import annotations

import numpy as np
import pytest

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.placement import TableSpec
from dgl_mgpu.placement.table_spec import MAX_BREAKPOINTS, SECTOR_BYTES


def power_law(rows):
    rng = np.random.default_rng(0)
    return np.sort((rng.pareto(1.3, rows) * 5 + 1).astype(np.int64))[::-1]


@pytest.mark.parametrize("kind", ["topology", "features"])
@pytest.mark.parametrize("rows", [0, 1, 2, 255, 256, 5_000, 300_000])
def test_curves_follow_the_sums_they_stand_for(rows, kind):
    degrees = power_law(rows)
    if kind == "topology":
        spec = TableSpec.topology("graph", degrees, accesses_per_step=1e4, stored_eids=True)
        sizes = 8 + 16 * degrees
    else:
        spec = TableSpec.features("feat", rows, 100, degrees, 1e4)
        sizes = np.full(rows, 100)
    assert len(spec.positions) <= MAX_BREAKPOINTS + 2
    assert spec.num_rows == rows
    at = np.arange(rows + 1)
    nbytes = np.concatenate([[0], np.cumsum(sizes)])
    accesses = np.concatenate([[0], np.cumsum(degrees)]) * (1e4 / max(degrees.sum(), 1))
    # Few rows of topology are kept together.
    close = 0.01 if kind == "features" or rows >= 5_000 else 0.3
    assert np.abs(spec.bytes_before(at) - nbytes).max() <= close * nbytes[-1]
    assert np.abs(spec.accesses_before(at) - accesses).max() <= close * max(accesses[-1], 1)
    # At the breakpoints they are exact.
    np.testing.assert_allclose(spec.nbytes, nbytes[spec.positions])
    np.testing.assert_allclose(spec.accesses, accesses[spec.positions], atol=1e-9)


def test_rows_of_topology_that_happen_to_be_short_are_not_told_apart():
    degrees = np.random.default_rng(0).integers(1, 100, 640)
    spec = TableSpec.topology("graph", degrees, np.ones(640))
    assert 3 <= len(spec.positions) <= 2 + 640 // 32 + 1


def test_features_without_hotness_are_equally_hot():
    spec = TableSpec.features("x", 1000, 400, accesses_per_step=50)
    assert spec.accesses_before(250) == pytest.approx(12.5)
    assert spec.total_bytes == 400_000


def test_rows_that_were_never_read_are_equally_hot():
    spec = TableSpec.features("x", 10, 4, np.zeros(10), accesses_per_step=5)
    assert spec.accesses_before(4) == pytest.approx(2.0)


def sectors_read(degree, fanout, id_bytes, draws=1000):
    """Mean number of sectors with neighbours drawn from a row, which begins anywhere."""
    random = np.random.default_rng(0)
    found = 0
    for _ in range(draws):
        drawn = random.permutation(degree)[:fanout]
        first = random.integers(SECTOR_BYTES // id_bytes)
        found += len(np.unique((first + drawn) * id_bytes // SECTOR_BYTES))
    return found / draws


@pytest.mark.parametrize("fanout", [1, 10, 1000])
@pytest.mark.parametrize("id_bytes", [4, 8])
def test_neighbours_are_read_with_the_sectors_that_they_lie_in(fanout, id_bytes):
    degrees = np.array([0, 1, 3, 12, 40, 700])
    hotness = np.array([1, 5, 4, 3, 2, 1])
    spec = TableSpec.topology("g", degrees, hotness, fanout=fanout, id_bytes=id_bytes)
    # Two bounds side by side, and the id of the first edge.
    sectors = [sectors_read(degree, fanout, id_bytes) for degree in degrees]
    mean = 2.25 + np.average(sectors, weights=hotness)
    assert spec.access_bytes / SECTOR_BYTES == pytest.approx(mean, rel=0.03)
    assert spec.request_bytes == SECTOR_BYTES


def test_stored_edge_ids_are_read_beside_the_neighbours():
    degrees = np.array([3, 100])
    without = TableSpec.topology("g", degrees, fanout=5, id_bytes=4)
    spec = TableSpec.topology("g", degrees, fanout=5, id_bytes=4, stored_eids=True)
    neighbours = without.access_bytes - 2.25 * SECTOR_BYTES
    assert spec.access_bytes == pytest.approx(1.25 * SECTOR_BYTES + 2 * neighbours)


def test_without_a_number_there_are_as_many_accesses_as_the_hotness_adds_up_to():
    hotness = np.array([4.0, 1.0, 0.5])
    assert TableSpec.features("x", 3, 8, hotness).total_accesses == pytest.approx(5.5)
    assert TableSpec.topology("g", np.ones(3), hotness).total_accesses == pytest.approx(5.5)
    assert TableSpec.features("x", 3, 8).total_accesses == 1
    assert TableSpec.topology("g", np.ones(3)).total_accesses == 1


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

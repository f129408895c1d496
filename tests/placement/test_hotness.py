"""The order of rows: hottest first, stable, a permutation both ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.placement import count_accesses, order_by_hotness


@given(arrays(np.int16, st.integers(0, 60), elements=st.integers(0, 5)))
def test_hottest_first_and_equal_ones_by_id(hotness):
    order, position = order_by_hotness(hotness)
    expected = sorted(range(len(hotness)), key=lambda row: (-int(hotness[row]), row))
    assert order.tolist() == expected
    assert position[order].tolist() == list(range(len(hotness)))
    assert order.dtype == position.dtype == np.int32


def test_unsigned_and_float_hotness():
    assert order_by_hotness(np.array([0, 255, 3], np.uint8)).order.tolist() == [1, 2, 0]
    assert order_by_hotness(np.array([0.5, -np.inf, 2.0])).order.tolist() == [2, 0, 1]


@pytest.mark.parametrize("bad", [np.ones((2, 2)), np.array(["a"]), np.array([1.0, np.nan])])
def test_what_is_no_hotness_is_refused(bad):
    with pytest.raises(InvalidInputError):
        order_by_hotness(bad)


def test_accesses_are_counted_over_batches():
    counts = count_accesses([np.array([0, 2, 2]), np.array([], np.int64), np.array([2])], 4)
    assert counts.tolist() == [1, 0, 3, 0]


@pytest.mark.parametrize("bad", [-1, 4])
def test_accesses_of_rows_that_are_not_are_refused(bad):
    with pytest.raises(IdOutOfRangeError):
        count_accesses([np.array([0, bad])], 4)

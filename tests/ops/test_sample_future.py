"""Samples in flight."""

from __future__ import annotations

import pytest

from dgl_mgpu.ops.sample_future import SampleFuture


def test_a_result_is_waited_for_once():
    waits = []
    future = SampleFuture(lambda: waits.append(1) or len(waits))
    assert waits == []
    assert future.result() == future.result() == 1 and waits == [1]


def test_what_follows_is_made_when_it_is_waited_for():
    calls = []
    future = SampleFuture(lambda: calls.append("wait") or 3)
    doubled = future.then(lambda value: calls.append("then") or 2 * value)
    assert calls == []
    assert doubled.result() == 6 and calls == ["wait", "then"]
    assert future.result() == 3 and doubled.result() == 6 and calls == ["wait", "then"]


def test_an_error_comes_out_where_the_result_is_waited_for():
    def fail():
        raise ValueError("no edges")

    future = SampleFuture(fail).then(str)
    with pytest.raises(ValueError, match="no edges"):
        future.result()

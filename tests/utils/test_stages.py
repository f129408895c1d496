from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dgl_mgpu.utils import stages
from dgl_mgpu.utils.stages import StageTimes, stage


@pytest.fixture
def nvtx(monkeypatch):
    """A GPU in use, whose ranges are noted here."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    return calls


def _names(profiler):
    return [event.name for event in profiler.events()]


def test_a_profiler_sees_the_stages_and_what_is_in_them():
    with profile(activities=[ProfilerActivity.CPU]) as profiler, stage("forward"):
        with stage("exchange"):
            torch.ones(3)
        torch.zeros(3)
    found = {event.name: event for event in profiler.events()}
    outer, inner = found["stage forward"].time_range, found["stage exchange"].time_range
    assert outer.start <= inner.start <= found["aten::ones"].time_range.start <= inner.end
    assert inner.end <= found["aten::zeros"].time_range.start <= outer.end


def test_without_a_profiler_or_a_gpu_nothing_is_ranged(monkeypatch):
    def never(*arguments):
        raise AssertionError

    monkeypatch.setattr(torch.profiler, "record_function", never)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", never)
    with stage("sample"):
        pass


def test_a_gpu_in_use_has_nvtx_ranges(nvtx):
    with stage("forward"), stage("exchange"):
        nvtx.append("work")
    assert nvtx == ["stage forward", "stage exchange", "work", "end", "end"]


def test_an_error_ends_the_stage_and_passes(nvtx):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(ZeroDivisionError), stage("sample"):
            raise ZeroDivisionError
        torch.ones(3)
    assert nvtx == ["stage sample", "end"]
    assert "stage sample" in _names(profiler)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the host's clock shows, in a list of one."""
    now = [10.0]
    monkeypatch.setattr(stages.time, "perf_counter", lambda: now[0])
    return now


def test_times_add_up_and_those_within_others_count_in_both(clock):
    with stage("sample"):
        clock[0] += 100  # nobody listens
    with StageTimes(torch.device("cpu")) as times, StageTimes(torch.device("cpu")) as others:
        for _ in range(2):
            with stage("load"):
                clock[0] += 1
                with stage("sample"):
                    clock[0] += 2
            clock[0] += 4
    with stage("sample"):
        clock[0] += 100
    assert times.seconds() == others.seconds() == {"load": 6, "sample": 4}


def test_a_stage_that_fails_does_not_count_and_nobody_listens_after_an_error(clock):
    times = StageTimes(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), times:
        with stage("sample"):
            clock[0] += 1
        with stage("gather"):
            clock[0] += 1
            raise ZeroDivisionError
    with stage("sample"):
        clock[0] += 1
    assert times.seconds() == {"sample": 1}
    assert not stages._listening


class _Event:
    """A GPU's event: it comes when it is waited for, or is told to."""

    def __init__(self, seconds):
        self.seconds, self.has_come = seconds, False

    def query(self):
        return self.has_come

    def synchronize(self):
        self.has_come = True

    def elapsed_time(self, end):
        assert self.has_come and end.has_come
        return 1000 * (end.seconds - self.seconds)


def test_stages_of_a_gpu_are_read_when_they_have_come(clock, monkeypatch):
    events = []

    def mark(device):
        events.append(_Event(clock[0]))
        return events[-1]

    monkeypatch.setattr(stages, "_mark", mark)
    with StageTimes(torch.device("cuda")) as times:
        with stage("forward"):
            clock[0] += 1
        with stage("backward"):
            clock[0] += 2
        assert len(times._under_way) == 2
        for event in events[:3]:  # not the end of the second stage
            event.has_come = True
        with stage("forward"):
            clock[0] += 4
        # What has come does not pile up.
        assert [name for name, _, _ in times._under_way] == ["backward", "forward"]
    events[4].has_come = True  # its end is waited for
    assert times.seconds() == {"forward": 5, "backward": 2}
    assert times.seconds() == {"forward": 5, "backward": 2}


def test_a_listener_that_fails_leaves_no_stage_open(nvtx, monkeypatch):
    times = StageTimes(torch.device("cpu"))
    with StageTimes(torch.device("cpu")) as first, times:
        monkeypatch.setattr(times, "_measured", lambda name: 1 / 0)
        with pytest.raises(ZeroDivisionError), stage("forward"):
            raise AssertionError
    assert nvtx in ([], ["stage forward", "end"])
    assert not stages._listening and "forward" not in first.seconds()

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dgl_mgpu.pipeline.stage import stage


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

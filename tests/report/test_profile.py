from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest
import torch
from PIL import Image

from dgl_mgpu.errors import DataFormatError, InvalidInputError, OutputError
from dgl_mgpu.report import profile as profiling
from dgl_mgpu.report.profile import WARM_UP, Profile, StepProfile, read_profile
from dgl_mgpu.report.timeline import read_trace
from dgl_mgpu.train.launch.hangs import Heartbeats
from dgl_mgpu.utils.stages import StageTracker
from tests.report.traces import gpu_events, train, write_trace


def test_the_steps_after_warm_up_are_traced(tmp_path):
    folder = tmp_path / "run"  # made with its parents
    with Profile(3, folder) as profile:
        train(WARM_UP + 2, profile.step)
        assert not folder.exists()
        train(1, profile.step)
        assert sorted(os.listdir(folder)) == ["profile.json", "timeline.png", "trace.json.gz"]
        written = (folder / "trace.json.gz").read_bytes()
        train(3, profile.step)
    assert (folder / "trace.json.gz").read_bytes() == written
    found = read_profile(folder)
    assert found is not None and (found.steps, found.busy_share) == (3, None)
    assert list(found.host_seconds) == ["sample", "forward", "backward", "update"]
    # Stages are within steps, one after the other.
    steps = read_trace(folder / "trace.json.gz").steps
    assert 0.0 < 3 * sum(found.host_seconds.values()) <= sum(step.seconds for step in steps)
    calls = {name: count for name, count, _ in found.operations}
    assert (calls["aten::randn"], calls["aten::linear"]) == (1.0, 1.0)
    with Image.open(folder / "timeline.png") as image:
        assert image.format == "PNG"


def test_a_profile_may_take_as_long_as_it_writes(tmp_path, monkeypatch):
    heartbeat, shown = Heartbeats(1).ranks[0], []
    monkeypatch.setattr(profiling, "draw_step", lambda *drawn: shown.append(heartbeat.in_step))
    with StageTracker(heartbeat), Profile(1, tmp_path) as profile:
        train(WARM_UP + 1, profile.step)
        assert (shown, heartbeat.in_step) == ([False], True)


def test_figures_of_a_gpu_by_hand(tmp_path):
    trace = read_trace(write_trace(tmp_path / "trace.json.gz", gpu_events()))
    found = StepProfile.from_trace(trace)
    assert (found.steps, found.step_seconds) == (2, pytest.approx(900e-6, abs=1e-8))
    assert found.busy_share == pytest.approx(1050 / 1800, abs=1e-5)
    # Means over both steps, of what lies within them.
    host = {"sample": 80, "forward": 200 + 200, "backward": 290 + 300}
    assert found.host_seconds == pytest.approx({k: v / 2e6 for k, v in host.items()}, abs=1e-8)
    work = {"": 50, "sample": 250, "forward": 300 + 400, "backward": 200}
    assert found.work_seconds == pytest.approx({k: v / 2e6 for k, v in work.items()}, abs=1e-8)
    gemm = ("gemm", 1.0, pytest.approx(350e-6, abs=1e-8))
    assert found.operations[0] == gemm
    assert "Memcpy DtoD" not in [name for name, *_ in found.operations]  # of the other GPU
    assert StepProfile.from_dict(json.loads(json.dumps(asdict(found)))) == found


def test_a_run_that_ends_early_has_fewer_steps(tmp_path):
    with Profile(10, tmp_path) as profile:
        train(WARM_UP + 2, profile.step)
        train(1, lambda: None)  # begun, but not a step that ended
        with pytest.warns(UserWarning, match="Of 10 steps, 2 were profiled: the run had 6, .* 14 "):
            profile.close()
        found = read_profile(tmp_path)
        train(2, profile.step)
    assert read_profile(tmp_path) == found
    assert found is not None and found.steps == 2


@pytest.mark.parametrize("steps", [1, WARM_UP - 1, WARM_UP])
def test_a_run_that_only_warms_up_is_told(tmp_path, steps):
    with (
        pytest.warns(UserWarning, match=f"the run had {steps}, .* 6 "),
        Profile(2, tmp_path) as profile,
    ):
        train(steps, profile.step)
    assert os.listdir(tmp_path) == [] and read_profile(tmp_path) is None


@pytest.mark.parametrize("done", [1, WARM_UP + 1])
def test_an_error_passes_and_the_profiler_stops(tmp_path, done):
    with pytest.raises(ZeroDivisionError), Profile(5, tmp_path) as profile:
        train(done, profile.step)
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    assert not torch.autograd.profiler._is_profiler_enabled


def test_no_steps_are_no_profile(tmp_path):
    with Profile(0, tmp_path) as profile:
        train(WARM_UP + 2, profile.step)
    assert os.listdir(tmp_path) == []
    with pytest.raises(InvalidInputError):
        Profile(-1, tmp_path)


def test_a_full_disk_is_a_typed_error(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiling, "draw_step", full)
    with pytest.raises(OutputError, match="No space left"), Profile(1, tmp_path) as profile:
        train(WARM_UP + 1, profile.step)
    assert not torch.autograd.profiler._is_profiler_enabled


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"steps": 1}'])
def test_a_damaged_profile_is_a_typed_error(tmp_path, text):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(DataFormatError):
        read_profile(tmp_path)

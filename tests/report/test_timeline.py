from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from dgl_mgpu.errors import DataFormatError, InvalidInputError
from dgl_mgpu.report.colours import BLUE, GREEN, ORANGE, PURPLE
from dgl_mgpu.report.profile import Profile
from dgl_mgpu.report.timeline import Span, Trace, busy_seconds, busy_share, draw_step, read_trace
from tests.report.traces import gpu_events, train, write_trace


@pytest.fixture
def gpu_trace(tmp_path):
    return read_trace(write_trace(tmp_path / "trace.json.gz", gpu_events()))


@pytest.fixture(scope="module")
def cpu_trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    with Profile(2, folder) as profile:
        train(8, profile.step)
    return read_trace(folder / "trace.json.gz")


def _pixels(path):
    with Image.open(path) as image:
        assert image.format == "PNG" and image.size[0] == 1500
        return np.asarray(image.convert("RGB"))


def _is(pixels, colour):
    return (pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=2)


def test_union_of_intervals_against_counting():
    draw = random.Random(0)
    for _ in range(200):
        begins = [draw.randrange(-20, 100) for _ in range(draw.randrange(12))]
        work = [Span("", begin, begin + draw.randrange(30)) for begin in begins]
        window = Span("", 10, 70)
        inside = sum(any(w.begin <= tick < w.end for w in work) for tick in range(10, 70))
        assert busy_seconds(work, window) == inside


def test_busy_share_by_hand(gpu_trace):
    assert gpu_trace.device == 0
    assert busy_share(gpu_trace) == pytest.approx((650 + 400) / (1000 + 800), abs=1e-5)
    assert busy_share(gpu_trace, device=1) == pytest.approx(10 / 1800, abs=1e-5)


def test_evaluation_is_in_no_step(gpu_trace):
    begins = [step.begin for step in gpu_trace.steps]
    ends = [step.end for step in gpu_trace.steps]
    assert begins == pytest.approx([0, 1300e-6], abs=1e-8)
    assert ends == pytest.approx([1000e-6, 2100e-6], abs=1e-8)
    assert gpu_trace.median_step == gpu_trace.steps[1]  # the shorter one of two


@pytest.mark.parametrize("name", ["checkpoint", "report"])
def test_what_follows_on_evaluation_is_in_no_step(tmp_path, name):
    events = gpu_events()
    evaluation = next(e for e in events if e["name"] == "stage evaluate")
    after = evaluation | {"name": f"stage {name}", "ts": evaluation["ts"] + 210, "dur": 90.0}
    evaluation["dur"] = 200.0
    trace = read_trace(write_trace(tmp_path / "trace.json", [*events, after]))
    assert trace.steps[1].begin == pytest.approx(1300e-6, abs=1e-8)


def test_work_belongs_to_the_stage_that_launched_it(gpu_trace):
    found = [(w.name, w.kind, w.device, w.lane, w.stage) for w in gpu_trace.work]
    assert found == [
        ("before", "kernel", 0, 7, None),
        ("sample_hops", "kernel", 0, 20, "sample"),  # by its operator: the launch is not there
        ("gemm", "kernel", 0, 7, "forward"),
        ("Memcpy HtoD (Pinned -> Device)", "copy", 0, 20, "sample"),
        ("gemm_backward", "kernel", 0, 7, "backward"),
        ("Memset (Device)", "copy", 0, 7, "backward"),
        ("gemm", "kernel", 0, 7, "evaluate"),
        ("gemm", "kernel", 0, 7, "forward"),
        ("Memcpy DtoD", "copy", 1, 7, None),
    ]
    assert [wait.name for wait in gpu_trace.waits] == ["cudaStreamSynchronize"]


def test_the_innermost_stage_counts(tmp_path):
    events = gpu_events()
    backward = next(e for e in events if e["name"] == "stage backward")
    inner = backward | {"name": "stage exchange", "ts": backward["ts"] + 5, "dur": 10.0}
    trace = read_trace(write_trace(tmp_path / "trace.json", [*events, inner]))
    stages = {work.name: work.stage for work in trace.work}
    assert stages["gemm_backward"] == "exchange"  # launched at 320, of [315, 325)
    assert stages["Memset (Device)"] == "backward"  # at 330


def test_a_recorded_run_without_gpus(cpu_trace):
    assert len(cpu_trace.steps) == 2
    assert cpu_trace.device is None and busy_share(cpu_trace) is None
    assert {each.name for each in cpu_trace.stages} == {"sample", "forward", "backward", "update"}
    stages = {work.name: work.stage for work in cpu_trace.work}
    assert stages["aten::randn"] == "sample"
    assert stages["aten::linear"] == "forward"
    # What linear calls is within it.
    assert not {"aten::addmm", "aten::t"} & set(stages)
    for lane in {work.lane for work in cpu_trace.work}:
        queue = [work for work in cpu_trace.work if work.lane == lane]
        assert all(a.end <= b.begin for a, b in itertools.pairwise(queue))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"traceEvents": []}',
        b'{"traceEvents": [{"ph": "X", "cat": "kernel"}]}',
        b'{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1"}]}',
        b"\x1f\x8b\x08\x00",
    ],
)
def test_what_is_no_trace_is_a_typed_error(tmp_path, content):
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(DataFormatError):
        read_trace(tmp_path / "trace.json")


def test_the_picture_shows_work_and_gaps(tmp_path, gpu_trace):
    draw_step(gpu_trace, tmp_path / "step.png", 0)
    pixels = _pixels(tmp_path / "step.png")
    columns = np.flatnonzero(_is(pixels, BLUE).any(axis=0))  # backward: [310, 600) on the host
    rows = np.flatnonzero(_is(pixels, "#000000").mean(axis=1) > 0.3)
    # The lowest lane, above the axis' line: black where the GPU was busy.
    busy = _is(pixels, "#000000")[rows[rows < rows[-1] - 10][-1]]
    # Step and picture have the same scale: from where forward begins to where backward ends.
    green = np.flatnonzero(_is(pixels, GREEN).any(axis=0))
    scale = (np.flatnonzero(busy)[-1] - green[0]) / 900  # pixels of a us: [100, 1000)
    assert busy.sum() / scale == pytest.approx(650, rel=0.03)
    # Launched in [320, 330), run at [600, 700) and [900, 1000): idle in between.
    gaps = np.flatnonzero(np.diff(columns) > 100 * scale)
    assert len(gaps) == 1
    assert _is(pixels, ORANGE).any() and not _is(pixels, PURPLE).any()


def test_a_stage_around_others_leaves_its_room_to_their_names(tmp_path, monkeypatch):
    """Names are drawn in the middle of a stage."""
    drawn = []
    monkeypatch.setattr(Axes, "text", lambda self, x, y, text, **options: drawn.append(text))
    window = Span("ProfilerStep#1", 0.0, 1.0)
    inner = (Span("sample", 0.1, 0.4), Span("gather", 0.4, 0.5))
    stages = (Span("load", 0.0, 0.5), *inner, Span("forward", 0.5, 1.0))
    trace = Trace(steps=(window,), stages=stages, work=(), waits=())
    draw_step(trace, tmp_path / "step.png")
    assert sorted(drawn) == ["forward", "gather", "sample"]


def test_stages_without_a_colour_of_their_own_share_a_word(tmp_path, monkeypatch):
    legends = []
    monkeypatch.setattr(Figure, "legend", lambda self, handles, **options: legends.append(handles))
    inner = (Span("exchange", 0.1, 0.4), Span("waiting", 0.4, 0.5))
    window = Span("ProfilerStep#1", 0.0, 1.0)
    trace = Trace(steps=(window,), stages=(Span("forward", 0.0, 1.0), *inner), work=(), waits=())
    draw_step(trace, tmp_path / "step.png")
    assert [each.get_label() for each in legends[0]] == ["forward", "exchange, waiting"]


def test_another_step_is_another_picture(tmp_path, gpu_trace):
    draw_step(gpu_trace, tmp_path / "second.png", 1)
    draw_step(gpu_trace, tmp_path / "median.png")
    second = _pixels(tmp_path / "second.png")
    assert (second == _pixels(tmp_path / "median.png")).all()
    assert not _is(second, ORANGE).any()  # it sampled nothing
    with pytest.raises(InvalidInputError):
        draw_step(gpu_trace, tmp_path / "third.png", 2)


def test_threads_are_drawn_without_gpus(tmp_path, cpu_trace):
    draw_step(cpu_trace, tmp_path / "step.png")
    assert all(_is(_pixels(tmp_path / "step.png"), c).any() for c in (ORANGE, GREEN, BLUE))

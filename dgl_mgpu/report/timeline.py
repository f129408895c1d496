"""Timelines of steps, of a GPU or, without one, the CPU: read from a trace, measured and drawn."""

from __future__ import annotations

import bisect
import gzip
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dgl_mgpu.errors import DataFormatError, InvalidInputError
from dgl_mgpu.report.colours import BLACK, GREY, STAGE_COLOURS, YELLOW
from dgl_mgpu.utils import safe_json
from dgl_mgpu.utils.extras import required
from dgl_mgpu.utils.stages import PREFIX
from dgl_mgpu.utils.units import human_seconds, human_share

#: Stages between epochs, which belong to no step.
BETWEEN_EPOCHS = frozenset({"evaluate", "checkpoint", "report"})

_STEP = "ProfilerStep#"
_GPU_WORK = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_MAX_LANES = 12


@dataclass(frozen=True)
class Span:
    """An interval, in seconds since the trace began."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Work(Span):
    """A kernel, a copy, or an operator of the CPU that is not called by another operator."""

    kind: str  # "kernel", "copy" or "operator"
    device: int | None  # the GPU; None for the CPU
    lane: int  # number of the stream, or of the thread
    stage: str | None  # the innermost stage that launched it, whenever it ran


@dataclass(frozen=True)
class Trace:
    """Steps of a run, and what was done meanwhile."""

    steps: tuple[Span, ...]  # on the host, without what stands between epochs
    stages: tuple[Span, ...]  # on the host, in the order of their beginnings
    work: tuple[Work, ...]  # of GPUs; of the CPU, where no GPU did anything
    waits: tuple[Span, ...]  # calls in which the host waits for a GPU

    @property
    def device(self) -> int | None:
        """The GPU that was busy for the longest; None without any."""
        seconds: dict[int, float] = {}
        for work in self.work:
            if work.device is not None:
                seconds[work.device] = seconds.get(work.device, 0.0) + work.seconds
        return max(seconds, key=seconds.__getitem__, default=None)

    @property
    def median_step(self) -> Span:
        """The step of median duration, of two the shorter."""
        return sorted(self.steps, key=lambda step: step.seconds)[(len(self.steps) - 1) // 2]


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace of torch's profiler in Chrome's format, compressed with gzip or not.

    Raises DataFormatError if it is not such a trace, or holds no step.
    """
    try:
        raw = Path(path).read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        events = [e for e in safe_json.loads(raw)["traceEvents"] if e.get("ph") == "X"]
        return _trace(events)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataFormatError):
            raise
        raise DataFormatError(
            f"read the trace {path}",
            f"it is not a trace, or it is damaged ({type(error).__name__}: {error})",
            "pass what torch.profiler's export_chrome_trace wrote",
        ) from error


def _trace(events: Sequence[Mapping[str, Any]]) -> Trace:
    ranges = [e for e in events if e.get("cat") == "user_annotation"]
    windows = [e for e in ranges if str(e["name"]).startswith(_STEP)]
    if not windows:
        raise DataFormatError(
            "find the steps in a trace",
            f"there is no range that begins with {_STEP}",
            "call the profiler's step() after each step",
        )
    origin = min(float(e["ts"]) for e in windows)

    def span(event: Mapping[str, Any]) -> Span:
        begin = (float(event["ts"]) - origin) * 1e-6
        return Span(str(event["name"]), begin, begin + float(event.get("dur", 0.0)) * 1e-6)

    stages = _Stages(
        replace(stage, name=stage.name.removeprefix(PREFIX))
        for stage in map(span, ranges)
        if stage.name.startswith(PREFIX)
    )
    launched = _launch_times(events, span)
    work = []
    for event in events:
        kind = _GPU_WORK.get(str(event.get("cat", "")).lower())
        if kind is None:
            continue
        args, run = event.get("args", {}), span(event)
        launch = launched.get(("correlation", args.get("correlation")))
        if launch is None:
            # Some launches are not recorded; the operators that made them are.
            launch = launched.get(("External id", args.get("External id")))
        stage = None if launch is None else stages.at(launch)
        device, stream = args.get("device", event["pid"]), args.get("stream", event["tid"])
        work.append(Work(run.name, run.begin, run.end, kind, int(device), int(stream), stage))
    steps = [_without_evaluation(span(window), stages.spans) for window in windows]
    return Trace(
        steps=tuple(sorted(steps, key=_begin)),
        stages=tuple(stages.spans),
        work=tuple(sorted(work or _operators(events, span, stages), key=_begin)),
        waits=tuple(
            span(e) for e in events if e.get("cat") in _LAUNCHES and "Synchronize" in e["name"]
        ),
    )


def _begin(span: Span) -> float:
    return span.begin


def _outer_first(span: Span) -> tuple[float, float]:
    """Sort key: of two that begin together, the longer one is the outer one."""
    return span.begin, -span.end


def _launch_times(events: Iterable[Mapping[str, Any]], span: Any) -> dict[tuple[str, Any], float]:
    """Times of the host's launches, by the kind and value of the number that the work shares."""
    times: dict[tuple[str, Any], float] = {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") in _LAUNCHES and "correlation" in args:
            times["correlation", args["correlation"]] = span(event).begin
        elif event.get("cat") == "cpu_op" and "External id" in args:
            times["External id", args["External id"]] = span(event).begin
    return times


def _operators(events: Iterable[Mapping[str, Any]], span: Any, stages: _Stages) -> list[Work]:
    """The CPU's operators that are not within another one of their thread."""
    threads: dict[int, list[Span]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            threads.setdefault(int(event["tid"]), []).append(span(event))
    outer = []
    for thread, spans in threads.items():
        end = float("-inf")
        for operator in sorted(spans, key=_outer_first):
            if operator.begin >= end:
                begin, end = operator.begin, operator.end
                stage = stages.at(begin)
                outer.append(Work(operator.name, begin, end, "operator", None, thread, stage))
    return outer


def _without_evaluation(step: Span, stages: Sequence[Span]) -> Span:
    """The step without the end of the last epoch: it begins with its own first stage."""
    within = [stage for stage in stages if step.begin <= stage.begin < step.end]
    end = max((stage.end for stage in within if stage.name in BETWEEN_EPOCHS), default=step.end)
    if end >= step.end:
        return step
    return replace(
        step, begin=min((stage.begin for stage in within if stage.begin >= end), default=end)
    )


class _Stages:
    """Nested stages, in the order of their beginnings."""

    def __init__(self, stages: Iterable[Span]) -> None:
        self.spans = sorted(stages, key=_outer_first)
        self._begins = [span.begin for span in self.spans]
        self._outer: list[int] = []  # the stage around each, -1 for none
        self.depths: list[int] = []  # how many stages are around each
        around: list[int] = []
        for number, span in enumerate(self.spans):
            while around and self.spans[around[-1]].end <= span.begin:
                around.pop()
            self._outer.append(around[-1] if around else -1)
            self.depths.append(len(around))
            around.append(number)

    def has_inner(self, number: int) -> bool:
        return number in self._outer

    def at(self, time: float) -> str | None:
        """The name of the innermost stage at a time."""
        number = bisect.bisect_right(self._begins, time) - 1
        while number >= 0 and self.spans[number].end <= time:
            number = self._outer[number]
        return None if number < 0 else self.spans[number].name


def busy_seconds(work: Iterable[Span], window: Span) -> float:
    """Seconds of a window in which at least one item of the work ran."""
    busy, done = 0.0, window.begin
    for item in sorted(work, key=_begin):
        begin, end = max(item.begin, done), min(item.end, window.end)
        if end > begin:
            busy += end - begin
            done = end
    return busy


def busy_share(trace: Trace, device: int | None = None) -> float | None:
    """Share, in 0..1, of the steps' time in which a GPU ran a kernel or a copy; None without GPUs.

    The union of the intervals that CUPTI recorded in all streams, as in WholeGraph's figure 12.
    Recording slows the host down, so the share may be larger without it.  The default GPU is the
    one that was busy for the longest.
    """
    device = trace.device if device is None else device
    if device is None:
        return None
    work = [item for item in trace.work if item.device == device]
    busy = sum(busy_seconds(work, step) for step in trace.steps)
    return busy / sum(step.seconds for step in trace.steps)


def draw_step(
    trace: Trace,
    path_png: str | os.PathLike[str],
    step: int | None = None,
    title: str = "One step",
) -> None:
    """Draw the timeline of a step, 1500 pixels wide: stages, streams or threads, and busy times.

    Bars have the colour of the stage that launched them; kernels and operators have the full height
    of their lane, copies half of it.  The default is the step of median duration.

    Raises InvalidInputError if there is no such step.
    """
    # Matplotlib takes a second to import, and reading a trace does not need it.
    with required("draw a step"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

    if step is not None and not 0 <= step < len(trace.steps):
        raise InvalidInputError(
            f"draw step {step}", f"the trace has {len(trace.steps)} steps", "count them from 0"
        )
    window = trace.median_step if step is None else trace.steps[step]
    lanes = _lanes(trace, window)
    figure = Figure(figsize=(10.0, 1.7 + 0.42 * len(lanes)), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    for height, lane in enumerate(reversed(lanes.values())):
        _draw_lane(axes, lane, height, window)
    axes.set_yticks(range(len(lanes)), list(reversed(lanes)))
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set_xlim(0.0, 1e3 * window.seconds)
    axes.set_xlabel("ms")
    axes.grid(True, axis="x", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    share = busy_share(replace(trace, steps=(window,)))
    busy = "" if share is None else f", GPU {trace.device} busy {human_share(share)}"
    axes.set_title(f"{title}: {human_seconds(window.seconds)}{busy}", fontweight="bold")
    shown = dict.fromkeys(bar.colour for lane in lanes.values() for bar in lane)
    names = {GREY: ["no stage"]}
    for name in _stage_names(trace, window):
        names.setdefault(_colour(name), []).append(name)
    figure.legend(
        handles=[Patch(color=c, label=", ".join(names[c])) for c in shown if c in names],
        loc="outside lower center",
        ncols=8,
        frameon=False,
    )
    canvas.print_png(os.fspath(path_png))


@dataclass(frozen=True)
class _Bar:
    span: Span
    colour: str
    height: float = 0.8
    label: str = ""


def _lanes(trace: Trace, window: Span) -> dict[str, list[_Bar]]:
    """Bars of each lane by its name, from top to bottom."""
    stages = _Stages(_within(trace.stages, window))
    lanes = {
        "stages": [
            _Bar(
                stage,
                _colour(stage.name),
                0.8 * 0.6**depth,
                # The names of inner stages would cover an outer one's.
                "" if stages.has_inner(number) else stage.name,
            )
            for number, (stage, depth) in enumerate(zip(stages.spans, stages.depths, strict=True))
        ]
    }
    if trace.device is not None:
        lanes["host waits"] = [_Bar(wait, BLACK, 0.4) for wait in _within(trace.waits, window)]
    work = _within(trace.work, window)
    queues: dict[tuple[int, int], list[Work]] = {}
    for item in work:
        queues.setdefault((-1 if item.device is None else item.device, item.lane), []).append(item)
    busiest = sorted(queues, key=lambda queue: sum(item.seconds for item in queues[queue]))
    for number, (device, stream) in enumerate(sorted(busiest[-_MAX_LANES:]), start=1):
        name = f"thread {number}" if device < 0 else f"GPU {device}, stream {stream}"
        lanes[name] = [
            _Bar(item, _colour(item.stage), 0.4 if item.kind == "copy" else 0.8)
            for item in queues[device, stream]
        ]
    if trace.device is not None:
        lanes[f"GPU {trace.device} busy"] = [
            _Bar(item, BLACK, 0.4) for item in work if item.device == trace.device
        ]
    return lanes


def _draw_lane(axes: Any, bars: Sequence[_Bar], y: int, window: Span) -> None:
    from matplotlib.colors import to_rgb

    for height in sorted({bar.height for bar in bars}, reverse=True):
        of_height = [bar for bar in bars if bar.height == height]
        axes.broken_barh(
            [(1e3 * (b.span.begin - window.begin), 1e3 * b.span.seconds) for b in of_height],
            (y - height / 2, height),
            facecolors=[bar.colour for bar in of_height],
            # Edges would hide gaps and widen short kernels.
            linewidth=0,
        )
    for bar in bars:
        room = bar.span.seconds / window.seconds
        if bar.label and room > 0.012 * len(bar.label):
            middle = 1e3 * ((bar.span.begin + bar.span.end) / 2 - window.begin)
            ink = "white" if sum(to_rgb(bar.colour)) < 1.5 else "black"
            axes.text(middle, y, bar.label, ha="center", va="center", fontsize=8, color=ink)


def _within(spans: Iterable[Any], window: Span) -> list[Any]:
    """The parts of spans that lie in a window."""
    return [
        replace(span, begin=max(span.begin, window.begin), end=min(span.end, window.end))
        for span in spans
        if span.end > window.begin and span.begin < window.end
    ]


def _stage_names(trace: Trace, window: Span) -> list[str]:
    launchers = [work.stage for work in _within(trace.work, window) if work.stage is not None]
    return list(dict.fromkeys([s.name for s in _within(trace.stages, window)] + launchers))


def _colour(stage: str | None) -> str:
    return GREY if stage is None else STAGE_COLOURS.get(stage, YELLOW)

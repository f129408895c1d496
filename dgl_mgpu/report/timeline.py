"""What a GPU (or, without one, the CPU) does in a step: read from a trace, measured and drawn."""

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
from dgl_mgpu.utils.stages import PREFIX
from dgl_mgpu.utils.units import human_seconds, human_share

#: Stages that stand between epochs, and belong to no step.
BETWEEN_EPOCHS = frozenset({"evaluate", "checkpoint", "report"})

_STEP = "ProfilerStep#"
_GPU_WORK = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_MOST_LANES = 12


@dataclass(frozen=True)
class Span:
    """Something that takes its time.

    Attributes
    ----------
    name : str
    begin, end : float
        Seconds since the trace began.
    """

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Work(Span):
    """A kernel, a copy, or an operator of the CPU that is within no other.

    Attributes
    ----------
    kind : {'kernel', 'copy', 'operator'}
    device : int or None
        The GPU; None for the CPU.
    lane : int
        Number of the stream, or of the thread.
    stage : str or None
        The innermost stage in which it was launched, whenever it ran.
    """

    kind: str
    device: int | None
    lane: int
    stage: str | None


@dataclass(frozen=True)
class Trace:
    """Steps of a run, and what was done meanwhile.

    Attributes
    ----------
    steps : tuple of Span
        As the host went through them.  What stands between epochs is not in them.
    stages : tuple of Span
        Stages, on the host.
    work : tuple of Work
        Of GPUs; of the CPU, where no GPU did anything.
    waits : tuple of Span
        Calls in which the host waits for a GPU.
    """

    steps: tuple[Span, ...]
    stages: tuple[Span, ...]
    work: tuple[Work, ...]
    waits: tuple[Span, ...]

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
    """Read what torch's profiler wrote in Chrome's format, compressed or not.

    Raises
    ------
    DataFormatError
        If it is no such trace, or holds no step.
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
        replace(each, name=each.name.removeprefix(PREFIX))
        for each in map(span, ranges)
        if each.name.startswith(PREFIX)
    )
    launched = _launch_times(events, span)
    work = []
    for event in events:
        kind = _GPU_WORK.get(str(event.get("cat", "")).lower())
        if kind is None:
            continue
        args, when = event.get("args", {}), span(event)
        at = launched.get(("correlation", args.get("correlation")))
        if at is None:
            # Not every way to launch is recorded; the operator that did is.
            at = launched.get(("External id", args.get("External id")))
        stage = None if at is None else stages.at(at)
        device, stream = args.get("device", event["pid"]), args.get("stream", event["tid"])
        work.append(Work(when.name, when.begin, when.end, kind, int(device), int(stream), stage))
    return Trace(
        steps=tuple(sorted(map(_without_evaluation(stages), map(span, windows)), key=_begin)),
        stages=tuple(stages),
        work=tuple(sorted(work or _operators(events, span, stages), key=_begin)),
        waits=tuple(
            span(e) for e in events if e.get("cat") in _LAUNCHES and "Synchronize" in e["name"]
        ),
    )


def _begin(span: Span) -> float:
    return span.begin


def _launch_times(events: Iterable[Mapping[str, Any]], span: Any) -> dict[tuple[str, Any], float]:
    """When the host called what launched, by the number it shares with what was launched."""
    times: dict[tuple[str, Any], float] = {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") in _LAUNCHES and "correlation" in args:
            times["correlation", args["correlation"]] = span(event).begin
        elif event.get("cat") == "cpu_op" and "External id" in args:
            times["External id", args["External id"]] = span(event).begin
    return times


def _operators(events: Iterable[Mapping[str, Any]], span: Any, stages: _Stages) -> list[Work]:
    """The CPU's operators that are within no other of their thread."""
    threads: dict[int, list[Span]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            threads.setdefault(int(event["tid"]), []).append(span(event))
    outer = []
    for thread, spans in threads.items():
        end = float("-inf")
        # Of two that begin together the longer one is the outer one.
        for each in sorted(spans, key=lambda span: (span.begin, -span.end)):
            if each.begin < end:
                continue
            end = each.end
            stage = stages.at(each.begin)
            outer.append(Work(each.name, each.begin, end, "operator", None, thread, stage))
    return outer


def _without_evaluation(stages: _Stages) -> Any:
    """Has a step that begins with the last epoch's end begin with its own first stage."""

    def trimmed(step: Span) -> Span:
        within = [each for each in stages if step.begin <= each.begin < step.end]
        between = [each.end for each in within if each.name in BETWEEN_EPOCHS]
        if not between or max(between) >= step.end:
            return step
        own = (each.begin for each in within if each.begin >= max(between))
        return replace(step, begin=min(own, default=max(between)))

    return trimmed


class _Stages(tuple[Span, ...]):
    """Stages in the order in which they begin, to be asked for the innermost at some time."""

    def __new__(cls, stages: Iterable[Span]) -> _Stages:
        made = super().__new__(cls, sorted(stages, key=lambda each: (each.begin, -each.end)))
        made._begins = [each.begin for each in made]
        made._outer = []
        open_: list[int] = []
        for number, each in enumerate(made):
            while open_ and made[open_[-1]].end <= each.begin:
                open_.pop()
            made._outer.append(open_[-1] if open_ else -1)
            open_.append(number)
        return made

    _begins: list[float]
    #: The stage around each, -1 for none.
    _outer: list[int]

    def depth(self, number: int) -> int:
        """How many stages are around a stage."""
        return 0 if self._outer[number] < 0 else 1 + self.depth(self._outer[number])

    def has_inner(self, number: int) -> bool:
        """Whether other stages are within a stage."""
        return number in self._outer

    def at(self, time: float) -> str | None:
        number = bisect.bisect_right(self._begins, time) - 1
        while number >= 0 and self[number].end <= time:
            number = self._outer[number]
        return None if number < 0 else self[number].name


def busy_seconds(work: Iterable[Span], window: Span) -> float:
    """Seconds of a window in which any of the work was done, however much at a time."""
    busy, done = 0.0, window.begin
    for each in sorted(work, key=_begin):
        begin, end = max(each.begin, done), min(each.end, window.end)
        if end > begin:
            busy += end - begin
            done = end
    return busy


def busy_share(trace: Trace, device: int | None = None) -> float | None:
    """Share of its steps' time in which a GPU ran a kernel or a copy.

    It is what CUPTI recorded: the union of the intervals of all streams, over time, as WholeGraph's
    figure 12 has it.  Recording slows the host down, so without it a share may be larger.

    Parameters
    ----------
    trace : Trace
    device : int, optional
        By default the one that was busy for the longest.

    Returns
    -------
    float or None
        In 0..1; None without GPUs.
    """
    device = trace.device if device is None else device
    if device is None:
        return None
    work = [each for each in trace.work if each.device == device]
    busy = sum(busy_seconds(work, step) for step in trace.steps)
    return busy / sum(step.seconds for step in trace.steps)


def draw_step(
    trace: Trace,
    path_png: str | os.PathLike[str],
    step: int | None = None,
    title: str = "One step",
) -> None:
    """Draw the timeline of a step: stages, streams or threads, and when a GPU was busy.

    Bars have the colour of the stage that launched them, kernels and operators the full height of
    their lane and copies half of it.  What is white was idle.

    Parameters
    ----------
    trace : Trace
    path_png : path
        Picture to write, 1500 pixels wide.
    step : int, optional
        Which of the trace's steps; by default the one of median duration.
    title : str

    Raises
    ------
    InvalidInputError
        If there is no such step.
    """
    # Matplotlib takes a second to import, which who reads a trace need not wait for.
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
                each,
                _colour(each.name),
                0.8 * 0.6 ** stages.depth(number),
                # Where others lie on it, its name would lie on theirs.
                "" if stages.has_inner(number) else each.name,
            )
            for number, each in enumerate(stages)
        ]
    }
    if trace.device is not None:
        lanes["host waits"] = [_Bar(each, BLACK, 0.4) for each in _within(trace.waits, window)]
    work = _within(trace.work, window)
    queues: dict[tuple[int, int], list[Work]] = {}
    for each in work:
        queues.setdefault((-1 if each.device is None else each.device, each.lane), []).append(each)
    busiest = sorted(queues, key=lambda queue: sum(each.seconds for each in queues[queue]))
    for number, queue in enumerate(sorted(busiest[-_MOST_LANES:]), start=1):
        on_cpu, (device, stream) = queue[0] < 0, queue
        lanes[f"thread {number}" if on_cpu else f"GPU {device}, stream {stream}"] = [
            _Bar(each, _colour(each.stage), 0.4 if each.kind == "copy" else 0.8)
            for each in queues[queue]
        ]
    if trace.device is not None:
        lanes[f"GPU {trace.device} busy"] = [
            _Bar(each, BLACK, 0.4) for each in work if each.device == trace.device
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
            # An edge would hide the gaps, and make more of short kernels than they are.
            linewidth=0,
        )
    for bar in bars:
        room = bar.span.seconds / window.seconds
        if bar.label and room > 0.012 * len(bar.label):
            middle = 1e3 * ((bar.span.begin + bar.span.end) / 2 - window.begin)
            ink = "white" if sum(to_rgb(bar.colour)) < 1.5 else "black"
            axes.text(middle, y, bar.label, ha="center", va="center", fontsize=8, color=ink)


def _within(spans: Iterable[Any], window: Span) -> list[Any]:
    """What overlaps a window, cut to it."""
    return [
        replace(each, begin=max(each.begin, window.begin), end=min(each.end, window.end))
        for each in spans
        if each.end > window.begin and each.begin < window.end
    ]


def _stage_names(trace: Trace, window: Span) -> list[str]:
    work = [each.stage for each in _within(trace.work, window) if each.stage is not None]
    return list(dict.fromkeys([each.name for each in _within(trace.stages, window)] + work))


def _colour(stage: str | None) -> str:
    return GREY if stage is None else STAGE_COLOURS.get(stage, YELLOW)

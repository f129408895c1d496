"""Tracing a few steps of a run: the trace, a picture of one step, how busy the GPU was."""

from __future__ import annotations

import json
import os
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from dgl_mgpu.errors import DataFormatError, InvalidInputError
from dgl_mgpu.report.timeline import Span, Trace, busy_seconds, busy_share, draw_step, read_trace
from dgl_mgpu.utils import safe_json
from dgl_mgpu.utils.atomic_write import typed_output
from dgl_mgpu.utils.checksums import with_sum, without_sum
from dgl_mgpu.utils.extras import is_installed
from dgl_mgpu.utils.stages import stage

TRACE_FILE = "trace.json.gz"
TIMELINE_FILE = "timeline.png"
PROFILE_FILE = "profile.json"

#: Steps before the first that is traced, which compile kernels and allocate buffers.
WARM_UP = 4
_MAX_OPERATIONS = 12


@dataclass(frozen=True)
class StepProfile:
    """Measurements of the traced steps."""

    steps: int
    step_seconds: float  # median
    #: Share of the steps' time in which the GPU ran a kernel or a copy; None without GPUs.
    busy_share: float | None
    #: Mean per step on the host, by stage.
    host_seconds: dict[str, float]
    #: Mean per step on the GPU (without one, in the CPU's operators), by the stage that launched
    #: it, "" for none.  Stages whose work overlaps count in full.
    work_seconds: dict[str, float]
    #: The kernels, copies or operators that took longest: name, calls and seconds per step.
    operations: list[tuple[str, float, float]]

    @classmethod
    def from_trace(cls, trace: Trace) -> StepProfile:
        """Measure a trace."""
        count = len(trace.steps)
        work = [item for item in trace.work if item.device == trace.device]
        host: dict[str, list[Span]] = {}
        for span in trace.stages:
            host.setdefault(span.name, []).append(span)
        launched: dict[str, list[Span]] = {name: [] for name in host}
        calls: Counter[str] = Counter()
        seconds: dict[str, float] = {}
        for item in work:
            launched.setdefault(item.stage or "", []).append(item)
            inside = sum(busy_seconds([item], step) for step in trace.steps)
            if inside > 0.0:
                calls[item.name] += 1
                seconds[item.name] = seconds.get(item.name, 0.0) + inside

        def means(spans_of: Mapping[str, list[Span]]) -> dict[str, float]:
            sums = {
                name: sum(busy_seconds(spans, step) for step in trace.steps)
                for name, spans in spans_of.items()
            }
            return {name: total / count for name, total in sums.items() if total}

        longest = sorted(seconds.items(), key=lambda item: -item[1])[:_MAX_OPERATIONS]
        return cls(
            steps=count,
            step_seconds=statistics.median(step.seconds for step in trace.steps),
            busy_share=busy_share(trace),
            host_seconds=means(host),
            work_seconds=means(launched),
            operations=[(name, calls[name] / count, total / count) for name, total in longest],
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepProfile:
        """Read what ``asdict`` gave and JSON kept; DataFormatError if a key is missing."""
        try:
            fields_there = {field.name: values[field.name] for field in fields(cls)}
            operations = [tuple(operation) for operation in values["operations"]]
            return cls(**fields_there | {"operations": operations})
        except (KeyError, TypeError) as error:
            raise DataFormatError(
                "read a profile",
                f"it is damaged ({type(error).__name__}: {error})",
                "profile the run again",
            ) from error


class Profile:
    """Traces some steps of a run (0: none), after a few that warm it up.

    Used as a context manager around all epochs.  As soon as the steps are done, the folder has
    ``trace.json.gz`` (for ui.perfetto.dev or chrome://tracing), ``profile.json`` (`StepProfile`)
    and, with Matplotlib, ``timeline.png`` (the step of median duration).  Tracing slows the host
    down.
    """

    def __init__(self, steps: int, folder: str | os.PathLike[str]) -> None:
        if steps < 0:
            raise InvalidInputError(
                f"profile {steps} steps", "that is below 0", "ask for 0 (none) or more"
            )
        self._steps, self._folder = steps, Path(folder)
        self._profiler: torch.profiler.profile | None = None
        self._failed = False

    def __enter__(self) -> Profile:
        if self._steps:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(
                activities=kinds,
                # The last step of the warm-up is traced and dropped: the start takes its time.
                schedule=torch.profiler.schedule(
                    wait=WARM_UP - 1, warmup=1, active=self._steps, repeat=1
                ),
                on_trace_ready=self._write,
            )
            self._profiler.__enter__()
        return self

    def step(self) -> None:
        """Mark the end of a step and the start of the next one."""
        if self._profiler is None:
            return
        self._profiler.step()
        if self._profiler.step_num >= WARM_UP + self._steps:
            self.close()

    def close(self) -> None:
        """Stop tracing, and write the trace if that was not done."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.__exit__(None, None, None)
        traced, needed = max(0, profiler.step_num - WARM_UP), WARM_UP + self._steps
        if traced < self._steps and not self._failed:
            warnings.warn(
                f"Of {self._steps} steps, {traced} were profiled: the run had {profiler.step_num}, "
                f"the first {WARM_UP} are not traced, and {needed} are needed. "
                "Train for more epochs.",
                stacklevel=2,
            )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._failed = kind is not None
        self.close()

    def _write(self, profiler: torch.profiler.profile) -> None:
        # The step that the end of the run interrupts does not count.
        complete = profiler.step_num - WARM_UP
        if self._failed or not complete:
            return
        fix = "free space there, or choose another folder"
        with typed_output(f"write a profile to {self._folder}", fix), stage("report"):
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / TRACE_FILE))
            trace = read_trace(self._folder / TRACE_FILE)
            trace = replace(trace, steps=trace.steps[:complete])
            if is_installed("matplotlib"):
                draw_step(trace, self._folder / TIMELINE_FILE)
            text = json.dumps(with_sum(asdict(StepProfile.from_trace(trace))), indent=1)
            (self._folder / PROFILE_FILE).write_text(text + "\n", encoding="utf-8")


def read_profile(folder: str | os.PathLike[str]) -> StepProfile | None:
    """The profile of the run in a folder; None if it was not profiled.

    Raises DataFormatError if ``profile.json`` is damaged.
    """
    path = Path(folder) / PROFILE_FILE
    if not path.exists():
        return None
    try:
        return StepProfile.from_dict(without_sum(safe_json.loads(path.read_text(encoding="utf-8"))))
    except ValueError as error:
        problem = error.found if isinstance(error, DataFormatError) else str(error)
        raise DataFormatError(f"read {path}", problem, "profile the run again") from error

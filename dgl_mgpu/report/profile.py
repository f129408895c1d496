"""A look at a few steps of a run: their trace, a picture of one, how busy the GPU was."""

from __future__ import annotations

import json
import os
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from dgl_mgpu.errors import DataFormatError, InvalidInputError, OutputError
from dgl_mgpu.report.timeline import Trace, busy_seconds, busy_share, draw_step, read_trace
from dgl_mgpu.utils import safe_json
from dgl_mgpu.utils.checksums import with_sum, without_sum
from dgl_mgpu.utils.stages import stage

TRACE_FILE = "trace.json.gz"
TIMELINE_FILE = "timeline.png"
PROFILE_FILE = "profile.json"

#: Steps before the first that is traced: kernels are compiled and buffers found in them.
WARM_UP = 4
_MOST_OPERATIONS = 12


@dataclass(frozen=True)
class StepProfile:
    """What the traced steps came to.

    Attributes
    ----------
    steps : int
    step_seconds : float
        Median.
    busy_share : float or None
        Share of the steps' time in which the GPU ran a kernel or a copy; None without GPUs.
    host_seconds : dict of str to float
        Mean by stage, of a step, on the host.
    work_seconds : dict of str to float
        The same for what stages launched, on the GPU (on the CPU: in operators); ``""`` is what was
        launched in no stage.  Stages whose work overlaps count in full.
    operations : list of tuple (str, float, float)
        The kernels, copies or operators that took the longest: name, calls and seconds of a step.
    """

    steps: int
    step_seconds: float
    busy_share: float | None
    host_seconds: dict[str, float]
    work_seconds: dict[str, float]
    operations: list[tuple[str, float, float]]

    @classmethod
    def of(cls, trace: Trace) -> StepProfile:
        """Measure a trace."""
        count = len(trace.steps)
        work = [each for each in trace.work if each.device == trace.device]
        stages = dict.fromkeys(each.name for each in trace.stages)
        launchers = dict.fromkeys([*stages, *(each.stage or "" for each in work)])

        def mean(spans: list[Any]) -> float:
            return sum(busy_seconds(spans, step) for step in trace.steps) / count

        calls: Counter[str] = Counter()
        seconds: Counter[str] = Counter()
        for each in work:
            inside = sum(busy_seconds([each], step) for step in trace.steps)
            if inside > 0.0:
                calls[each.name] += 1
                seconds[each.name] += inside  # type: ignore[assignment]
        host = {name: mean([s for s in trace.stages if s.name == name]) for name in stages}
        launched = {
            name: mean([each for each in work if (each.stage or "") == name]) for name in launchers
        }
        return cls(
            steps=count,
            step_seconds=statistics.median(step.seconds for step in trace.steps),
            busy_share=busy_share(trace),
            host_seconds={name: value for name, value in host.items() if value},
            work_seconds={name: value for name, value in launched.items() if value},
            operations=[
                (name, calls[name] / count, total / count)
                for name, total in seconds.most_common(_MOST_OPERATIONS)
            ],
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepProfile:
        """Read back what ``asdict`` gave and JSON kept.

        Raises
        ------
        DataFormatError
            If a key is missing.
        """
        try:
            found = cls(**{field.name: values[field.name] for field in fields(cls)})
            return StepProfile(
                **{**vars(found), "operations": [tuple(each) for each in found.operations]}
            )
        except (KeyError, TypeError) as error:
            raise DataFormatError(
                "read a profile",
                f"it is damaged ({type(error).__name__}: {error})",
                "profile the run again",
            ) from error


class Profile:
    """Traces some steps of a run, after a few that warm it up.

    Used as a context manager around all epochs.  As soon as the steps are done, the folder has
    ``trace.json.gz`` (for ui.perfetto.dev or chrome://tracing), ``timeline.png`` (the step of
    median duration) and ``profile.json`` (:class:`StepProfile`).  Tracing slows the host down.

    Parameters
    ----------
    steps : int
        How many; 0 for none.
    folder : path

    Raises
    ------
    InvalidInputError
        If `steps` is negative.
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
                # The last step before is traced and thrown away: to begin takes its time.
                schedule=torch.profiler.schedule(
                    wait=WARM_UP - 1, warmup=1, active=self._steps, repeat=1
                ),
                on_trace_ready=self._write,
            )
            self._profiler.__enter__()
        return self

    def step(self) -> None:
        """Say that a step ends here, and the next one begins."""
        if self._profiler is None:
            return
        self._profiler.step()
        if self._profiler.step_num >= WARM_UP + self._steps:
            self.close()

    def close(self) -> None:
        """Trace no more; what was traced is written, if it was not."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._failed = kind is not None
        self.close()

    def _write(self, profiler: torch.profiler.profile) -> None:
        # The step that was begun when the run ended is none.
        complete = profiler.step_num - WARM_UP
        if self._failed or not complete:
            return
        try:
            with stage("report"):
                self._folder.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(str(self._folder / TRACE_FILE))
                trace = read_trace(self._folder / TRACE_FILE)
                trace = replace(trace, steps=trace.steps[:complete])
                draw_step(trace, self._folder / TIMELINE_FILE)
                text = json.dumps(with_sum(asdict(StepProfile.of(trace))), indent=1)
                (self._folder / PROFILE_FILE).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"write a profile to {self._folder}",
                str(error),
                "free space there, or choose another folder",
            ) from error


def read_profile(folder: str | os.PathLike[str]) -> StepProfile | None:
    """What :class:`Profile` measured of the run in a folder; None if it did not.

    Raises
    ------
    DataFormatError
        If ``profile.json`` is damaged.
    """
    path = Path(folder) / PROFILE_FILE
    if not path.exists():
        return None
    try:
        return StepProfile.from_dict(without_sum(safe_json.loads(path.read_text(encoding="utf-8"))))
    except ValueError as error:
        found = error.found if isinstance(error, DataFormatError) else str(error)
        raise DataFormatError(f"read {path}", found, "profile the run again") from error

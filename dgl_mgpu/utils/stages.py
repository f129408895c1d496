"""Stages of a step, for Nsight Systems, torch's profiler, reports and a job's watch for hangs."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

#: Prefix of the names of stages in a trace, which has other ranges as well.
PREFIX = "stage "
_NOTE = "in stage "
#: Makes a process write the stacks of its threads, also while it waits in C.
STACK_SIGNAL = signal.SIGRTMIN + 7
#: Around a step of a whole graph on CPUs, which has no bound.
WHOLE_GRAPH = "whole graph"
# Stages of any length, in which a rank need not enter another one to advance: it uses its cores,
# reads or writes.  So it is before its first stage.
_LONG_STAGES = {"build", "checkpoint", "report", WHOLE_GRAPH}
_STAGE_BYTES = 80


class stage:  # as a function in a ``with``
    """What is done within is stage ``name`` of a step; stages may stand within others.

    An NVTX range where a GPU is in use, which costs next to nothing while no tool listens, and a
    range of torch's profiler while that runs. ``name``: ``"sample"``, ``"gather"``, ``"forward"``,
    ``"backward"``, ``"update"``, ``"evaluate"``, ….
    """

    # Not a generator: several stages a step, in which a GPU may wait for the host.
    __slots__ = ("_is_ranged", "_listeners", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        # A range of the profiler takes microseconds, also while there is no profiler.
        is_profiled = torch.autograd.profiler._is_profiler_enabled
        self._listeners = self._enter_listeners(is_profiled) if is_profiled or _listening else None
        # Not `is_available`, which takes its time and keeps processes from being forked.
        self._is_ranged = torch.cuda.is_initialized()
        if self._is_ranged:
            torch.cuda.nvtx.range_push(PREFIX + self._name)

    def _enter_listeners(self, is_profiled: bool) -> contextlib.ExitStack:
        """Begin the stage for all listeners; leaving the result ends it."""
        with contextlib.ExitStack() as listeners:
            if is_profiled:
                listeners.enter_context(torch.profiler.record_function(PREFIX + self._name))
            for times in _listening:
                listeners.enter_context(times._measured(self._name))
            return listeners.pop_all()

    def __exit__(self, *exception: Any) -> None:
        if self._is_ranged:
            torch.cuda.nvtx.range_pop()
        if self._listeners is not None:
            self._listeners.__exit__(*exception)


_listening: list[StageTimes] = []


def somebody_listens() -> bool:
    """Whether stages are timed or followed now: if not, nothing need be done for their sake."""
    return bool(_listening)


class StageTimes:
    """How long stages take, without waiting for them: on a GPU what they queue, each on its own
    stream, elsewhere the host.

    Listens within ``with``.  Stages that overlap count in full, and so does the time in which a GPU
    waits for the host within one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._seconds: Counter[str] = Counter()
        #: Stages whose end the GPU has yet to reach.
        self._under_way: deque[tuple[str, Any, Any]] = deque()

    def __enter__(self) -> StageTimes:
        _listening.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _listening.remove(self)

    def seconds(self) -> dict[str, float]:
        """Of each stage so far, by name; waits for the GPU."""
        for _, _, end in self._under_way:
            end.synchronize()
        self._read()
        return dict(self._seconds)

    @contextlib.contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        begin = _mark(self._device)
        yield
        end = _mark(self._device)
        if self._on_gpu:
            self._under_way.append((name, begin, end))
            self._read()
        else:
            self._seconds[name] += end - begin

    def _read(self) -> None:
        while self._under_way and self._under_way[0][2].query():
            name, begin, end = self._under_way.popleft()
            self._seconds[name] += begin.elapsed_time(end) / 1000


class Heartbeat(ctypes.Structure):
    """A rank's stage and progress, in memory that other processes read."""

    _fields_ = (
        ("process", ctypes.c_int64),  # 0 before the rank has one
        # Descriptor of the file to which it writes its stacks at STACK_SIGNAL; 0 before and after.
        ("stacks", ctypes.c_int64),
        # Its thread that watches heartbeats, whose own work does not count; 0 without one.
        ("watcher", ctypes.c_int64),
        ("beats", ctypes.c_uint64),  # how often it has entered or left a stage
        # How often it has entered a stage of an epoch that is in no other; ranks enter the same.
        ("steps", ctypes.c_uint64),
        # Whether it enters a stage within seconds or minutes, as the steps of an epoch do.
        ("in_step", ctypes.c_bool),
        ("stage", ctypes.c_char * _STAGE_BYTES),
    )

    def last_stage(self) -> str:
        """The stage in the form of `stage_of`, also of a process that has ended."""
        stage = self.stage.decode(errors="replace")
        return f" {_NOTE}{stage}" if stage else ""

    def stacks_file(self) -> Path:
        """The path of its stacks for other processes of this user."""
        return Path(f"/proc/{self.process}/fd/{self.stacks}")


class StageTracker(StageTimes):
    """Follows the stages that this process is in, within ``with``.

    An exception that leaves a stage gets a note of it (`stage_of`); the heartbeat has the stage for
    other processes.
    """

    def __init__(self, heartbeat: Heartbeat | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._heartbeat = Heartbeat() if heartbeat is None else heartbeat
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._stage = threading.local()
        self._has_stepped = False

    def __enter__(self) -> StageTracker:
        super().__enter__()
        self._heartbeat.process = self._process
        self._stacks = os.memfd_create("stacks", os.MFD_CLOEXEC)
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True)
        self._heartbeat.stacks = self._stacks
        return self

    def __exit__(self, *exception: object) -> None:
        self._heartbeat.stacks = 0
        faulthandler.unregister(STACK_SIGNAL)
        os.close(self._stacks)
        super().__exit__(*exception)

    @contextlib.contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        if os.getpid() != self._process:  # a worker's stages are not this process's
            yield
            return
        around = getattr(self._stage, "name", "")
        self._show(f"{name} of {around}" if around else name, is_step=not around)
        try:
            yield
        except Exception as error:
            if not stage_of(error):
                error.add_note(_NOTE + self._stage.name)
            raise
        finally:
            self._show(around)

    def _show(self, stage: str, is_step: bool = False) -> None:
        self._stage.name = stage
        heartbeat = self._heartbeat
        if threading.get_ident() == self._thread:
            is_long = not _LONG_STAGES.isdisjoint(stage.split(" of "))
            self._has_stepped |= is_step and not is_long
            heartbeat.stage = stage.encode()[:_STAGE_BYTES]
            heartbeat.steps += is_step and not is_long
            heartbeat.in_step = self._has_stepped and not is_long
        heartbeat.beats += 1


def stage_of(error: BaseException) -> str:
    """The stage of an error, as the end of a sentence: ``" in stage gather of load"``, or ""."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE))
    return next((f" {note}" for note in notes), "")


class StageClock:
    """How long stages take that follow on each other, without waiting for them.

    On a GPU what its current stream does is timed, elsewhere the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stages: list[str] = []
        self._marks = [_mark(device)]

    def ends(self, stage: str) -> None:
        """Say that a stage, which began where the last one ended, ends here."""
        self._stages.append(stage)
        self._marks.append(_mark(self._device))

    def seconds(self) -> dict[str, float]:
        """Of each stage; waits until the GPU is done with the last."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            self._marks[-1].synchronize()
        return {
            stage: begin.elapsed_time(end) / 1000 if on_gpu else end - begin
            for stage, (begin, end) in zip(
                self._stages, itertools.pairwise(self._marks), strict=True
            )
        }


def _mark(device: torch.device) -> Any:
    """This moment: of a GPU's current stream, or the host's."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event

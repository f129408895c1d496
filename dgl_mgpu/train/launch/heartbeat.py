"""What a rank shows of itself while it runs: its stage, and that it advances."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.utils.stages import StageTimes

_NOTE = "in stage "
#: Has a process write the stacks of its threads, also while it waits in C.
STACK_SIGNAL = signal.SIGRTMIN + 7
#: Around a step of a whole graph on CPUs, which has no bound.
WHOLE_GRAPH = "whole graph"
# Stages of any length, in which a rank need not enter another one to advance: it uses its cores,
# reads or writes.  So it is before its first stage.
_LONG_STAGES = {"build", "checkpoint", "report", WHOLE_GRAPH}
_STAGE_BYTES = 80


class Heartbeat(ctypes.Structure):
    """One rank's, in memory that others read."""

    _fields_ = (
        ("process", ctypes.c_int64),  # 0 before the rank has one
        # Descriptor of the file to which it writes its stacks at STACK_SIGNAL; 0 before and after.
        ("stacks", ctypes.c_int64),
        # Its thread that looks at heartbeats, whose own work is no advance; 0 without one.
        ("watcher", ctypes.c_int64),
        ("beats", ctypes.c_uint64),  # how often it has entered or left a stage
        # How often it has entered a stage of an epoch that is in no other; ranks enter the same.
        ("steps", ctypes.c_uint64),
        # Whether it enters a stage within seconds or minutes, as the steps of an epoch do.
        ("in_step", ctypes.c_bool),
        ("stage", ctypes.c_char * _STAGE_BYTES),
    )

    def last_stage(self) -> str:
        """As `stage_of` tells it, also of a process that has ended."""
        stage = self.stage.decode(errors="replace")
        return f" {_NOTE}{stage}" if stage else ""

    def stacks_file(self) -> Path:
        """Where other processes of this user find its stacks."""
        return Path(f"/proc/{self.process}/fd/{self.stacks}")


class Heartbeats:
    """Those of all ranks of a machine, in memory that they share.

    Without the ``path`` of those of another process of this user they are made.
    """

    def __init__(self, count: int, path: Path | None = None) -> None:
        size = ctypes.sizeof(Heartbeat)
        if path is None:
            # No file of /dev/shm, which may be full, or of 64 MiB.
            file = os.memfd_create("heartbeats", os.MFD_CLOEXEC)
            os.ftruncate(file, count * size)
            self._segment = Segment(file, count * size)
        else:
            self._segment = Segment.attach(path, count * size)
        self.path = self._segment.path
        self.ranks = [
            Heartbeat.from_buffer(self._segment.bytes, number * size)  # type: ignore[arg-type]
            for number in range(count)
        ]


class StageTracker(StageTimes):
    """Follows the stages that this process is in, within ``with``.

    An exception that leaves a stage has a note of it (`stage_of`).  The heartbeat shows them to
    others as well.
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
        shown = self._heartbeat
        if threading.get_ident() == self._thread:
            is_long = not _LONG_STAGES.isdisjoint(stage.split(" of "))
            self._has_stepped |= is_step and not is_long
            shown.stage = stage.encode()[:_STAGE_BYTES]
            shown.steps += is_step and not is_long
            shown.in_step = self._has_stepped and not is_long
        shown.beats += 1


def stage_of(error: BaseException) -> str:
    """``" in stage gather of evaluate"``, say, for the end of a sentence; "" if in none."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE))
    return next((f" {note}" for note in notes), "")

"""Ends a job in which nothing advances, and names the rank that the others wait for.

Every rank writes its stage, and the number of its changes, to shared memory (`Heartbeat`).  A rank
that waits for another looks like one that hangs; their stacks, which ``faulthandler`` writes also
while a process waits in C, differ.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dgl_mgpu.errors import RankFailedError
from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.train.launch.process_group import children_of, cpu_seconds, runs, state_of, threads_of
from dgl_mgpu.utils.stages import STACK_SIGNAL, Heartbeat

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
# A check that comes later than this was delayed, as the ranks may have been: a suspended job, a
# machine that slept.
_LATE_SECONDS = 2.0
# A rank that uses less of a core than this and neither reads nor writes does not advance, in a
# stage of any length.
_IDLE_SHARE = 0.02
# How long a process may take to write its stacks, and for which it writes nothing more then.
_STACKS_SECONDS, _STACKS_END_SECONDS = 2.0, 0.05
# Frames of a stack that an error quotes.
_QUOTED_FRAMES = 3
# Files in whose functions a rank waits for others, for its DataLoader's workers, and a worker for
# work; and files that they wait through.  A stack that ends in other files hangs itself: a
# checkpoint that is written while others wait, for example.
_WAITING = (
    "/torch/distributed/",
    "/dgl_mgpu/comm/communicator.py",
    "/dgl_mgpu/comm/signing.py",
    "/dgl_mgpu/train/launch/preemption.py",
    "/dgl_mgpu/distributed/exchange/",
)
_THROUGH = ("/torch/",)
_LOADING = "/torch/utils/data/dataloader.py"
_IDLE_WORKER = ("/torch/utils/data/_utils/worker.py",)
_STANDARD_LIBRARY = f"{Path(os.__file__).parent}/"
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_STOPPED = "is stopped (by SIGSTOP or a debugger)"


class Heartbeats:
    """Heartbeats of all ranks of a machine, in shared memory.

    With a ``path``, that of another process of this user is attached; else it is created.
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


class HangMonitor:
    """Watches the heartbeats of a machine's ranks.

    When no rank advances for ``hang_after`` seconds, all are taken to hang.  ``ranks`` are their
    numbers in the job, by default from 0 on.
    """

    def __init__(
        self, heartbeats: Sequence[Heartbeat], hang_after: float, ranks: Sequence[int] | None = None
    ) -> None:
        numbers = range(len(heartbeats)) if ranks is None else ranks
        self._ranks = [
            _Watched(rank, heartbeat) for rank, heartbeat in zip(numbers, heartbeats, strict=True)
        ]
        self._hang_after = hang_after
        self._looked = time.monotonic()
        self._idle_seconds = 0.0
        #: Whether all ranks that were found to hang wait for others.
        self.all_wait = False

    def look(self) -> RankFailedError | None:
        """An error that names the rank that hangs, if nothing has advanced for too long.

        May be called often; it checks at most once a second.
        """
        now = time.monotonic()
        seconds = now - self._looked
        if seconds < _LOOK_SECONDS:
            return None
        self._looked = now
        # All of them, so that each is compared with the last look.
        if any([rank.advanced(seconds) for rank in self._ranks]):
            self._idle_seconds = 0.0
            return None
        self._idle_seconds += min(seconds, _LATE_SECONDS)
        return self._hang() if self._idle_seconds >= self._hang_after else None

    def _hang(self) -> RankFailedError:
        # Others are done, or did not begin; if that is so of all, the error is of all.
        there = [rank for rank in self._ranks if runs(rank.heartbeat.process)] or self._ranks
        states = [rank.state() for rank in there]
        for state in states:
            log.error("rank %d%s:\n%s", state.rank, state.stage, state.stacks or state.reason)
        suspects = [state for state in states if state.is_stopped]
        suspects = suspects or [state for state in states if not state.is_waiting]
        self.all_wait = not suspects
        fewest = min((state.steps for state in suspects), default=0)
        suspects = [state for state in suspects if state.steps == fewest]
        reasons = [
            (f"rank {s.rank}: " if len(suspects) > 1 else "") + s.reason + s.stage + s.quoted
            for s in suspects
        ] or ["all ranks wait for each other"]
        reasons += [f"rank {s.rank} waits{s.stage}" for s in states if s not in suspects]
        return RankFailedError(
            "run rank " + " and ".join(str(state.rank) for state in suspects or states),
            f"nothing has advanced for {self._hang_after:g} s: {'; '.join(reasons)}",
            "fix the cause; training continues from its last checkpoint with trainer.resume; if a "
            "step may take longer, raise trainer.hang_after (of dgl-mgpu predict: hang_after)",
        )


class HangWatch:
    """Checks heartbeats on a thread of its own, while it is used as a context manager.

    ``own`` is this process's; ``on_hang`` is called with the error, on that thread.
    """

    def __init__(
        self, monitor: HangMonitor, own: Heartbeat, on_hang: Callable[[RankFailedError], None]
    ) -> None:
        self._monitor, self._own, self._on_hang = monitor, own, on_hang
        self._done = threading.Event()

    def __enter__(self) -> HangWatch:
        threading.Thread(target=self._look, name="hang watch", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()

    def _look(self) -> None:
        self._own.watcher = threading.get_native_id()
        while not self._done.wait(_LOOK_SECONDS):
            error = self._monitor.look()
            if error is not None and not self._done.is_set():
                self._on_hang(error)
                return


@dataclass
class _State:
    """What a rank does at the time of a look."""

    rank: int
    stage: str
    steps: int
    is_stopped: bool = False
    is_waiting: bool = False
    reason: str = "it hangs"
    stacks: str = ""  # Of all its threads, and of a worker that it waits for
    quoted: str = ""  # The innermost frames of where it is, for the end of a sentence


@dataclass
class _Watched:
    """A rank, and what it showed at the last look."""

    rank: int
    heartbeat: Heartbeat
    _beats: int = -1
    _work: tuple[float, str] = field(default=(0.0, ""))

    def advanced(self, seconds: float) -> bool:
        """Whether the rank has advanced since the last call, so many seconds ago."""
        heartbeat = self.heartbeat
        beats, self._beats = self._beats, heartbeat.beats
        if heartbeat.in_step:
            return beats != heartbeat.beats
        before, self._work = self._work, _work_of(heartbeat)
        used = self._work[0] - before[0]
        return (
            beats != heartbeat.beats or self._work[1] != before[1] or used > _IDLE_SHARE * seconds
        )

    def state(self) -> _State:
        heartbeat = self.heartbeat
        state = _State(self.rank, heartbeat.last_stage(), heartbeat.steps)
        workers = children_of(heartbeat.process)
        state.is_stopped = state_of(heartbeat.process) in ("T", "t")
        if state.is_stopped:
            state.reason = f"it {_STOPPED}"
        state.stacks = stacks_of(heartbeat.process, heartbeat)
        frames = _main_frames(state.stacks)
        state.quoted = _quote(frames)
        if not heartbeat.stacks:
            state.reason = "it has not begun"
        elif not state.stacks:
            state.reason += f" and does not answer (its state is {state_of(heartbeat.process)})"
        elif not state.is_stopped:
            state.is_waiting = _is_in(frames, _WAITING, _THROUGH)
            if not state.is_waiting and any(_LOADING in file for file, _, _ in frames):
                self._look_at_workers(state, workers)
        return state

    def _look_at_workers(self, state: _State, workers: list[int]) -> None:
        for worker in workers:
            is_stopped = state_of(worker) in ("T", "t")
            stacks = stacks_of(worker, self.heartbeat)
            frames = _main_frames(stacks)
            if is_stopped or (frames and not _is_in(frames, _IDLE_WORKER)):
                how = _STOPPED if is_stopped else "hangs"
                state.is_stopped |= is_stopped
                state.reason = f"its DataLoader worker (process {worker}) {how}"
                state.quoted = _quote(frames)
                state.stacks += f"\nits DataLoader worker, process {worker}:\n{stacks}"
                return


def stacks_of(process: int, heartbeat: Heartbeat) -> str:
    """The stacks of a process's threads, of a rank or one that it has forked; "" if it is silent.

    One that is stopped is continued for that.
    """
    if not heartbeat.stacks:  # the signal would end it
        return ""
    file = heartbeat.stacks_file()
    with contextlib.suppress(OSError):
        before = size = file.stat().st_size
        is_stopped = state_of(process) == "T"
        os.kill(process, STACK_SIGNAL)
        if is_stopped:
            os.kill(process, signal.SIGCONT)
        deadline = time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_STACKS_END_SECONDS)
            last, size = size, file.stat().st_size
            if size == last > before:
                break
        with file.open("rb") as content:
            content.seek(before)
            return content.read().decode(errors="replace").strip()
    return ""


def _main_frames(stacks: str) -> list[tuple[str, str, str]]:
    """File, line and function of each frame of the first thread, innermost first.

    ``faulthandler`` writes that one last.
    """
    return _FRAME.findall(stacks[stacks.rfind("hread 0x") :])


def _is_in(
    frames: list[tuple[str, str, str]], files: tuple[str, ...], through: tuple[str, ...] = ()
) -> bool:
    """Whether a stack is in one of the files, or in others or the standard library called there."""
    for file, _, _ in frames:
        if any(part in file for part in files):
            return True
        is_standard = file.startswith(_STANDARD_LIBRARY) and "/site-packages/" not in file
        if not is_standard and not any(part in file for part in through):
            return False
    return False


def _quote(frames: list[tuple[str, str, str]]) -> str:
    quoted = [f"{file}:{line} in {name}" for file, line, name in frames[:_QUOTED_FRAMES]]
    return f", at {', called from '.join(quoted)}" if quoted else ""


def _work_of(rank: Heartbeat) -> tuple[float, str]:
    """Seconds of cores that a rank and its children have used, and what it has read and written.

    Not by its watcher, which reads ``/proc`` all the time.
    """
    if not rank.process:
        return 0.0, ""
    used = sum(map(cpu_seconds, children_of(rank.process)))
    moved = ""
    for thread in threads_of(rank.process):
        if thread != rank.watcher:
            used += cpu_seconds(rank.process, thread)
            with contextlib.suppress(OSError):  # it has ended
                moved += Path(f"/proc/{rank.process}/task/{thread}/io").read_text()
    return used, moved

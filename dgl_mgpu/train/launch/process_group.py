"""A rank and its DataLoader workers, one process group, ended without a trace."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator
from multiprocessing import process as processes
from pathlib import Path
from typing import Any

from dgl_mgpu.machine.shared_memory import SHARED_MEMORY
from dgl_mgpu.utils import timeouts

log = logging.getLogger(__name__)

# A killed process ends as soon as it leaves the kernel; in more than this, a device keeps it there.
_END_SECONDS = 5.0
_LOOK_SECONDS = 0.005


def kill_group(leader: int) -> list[int]:
    """Kill the process group that a process leads; the members it had, the leader among them.

    Raises ProcessLookupError if the process leads no group.
    """
    # Stopped, they make no more processes that the list would lack.
    os.killpg(leader, signal.SIGSTOP)
    try:
        return _members(leader)
    finally:
        os.killpg(leader, signal.SIGKILL)


def wait_for_killed(process: Any, name: str, deadline: float) -> None:
    """Wait until a killed process of multiprocessing has ended; at the deadline, warn and go on.

    ``deadline`` is `time.monotonic` of `timeouts.END` seconds after it was killed.
    """
    process.join(max(deadline - time.monotonic(), 0.0))
    if process.exitcode is None:
        log.warning(
            "%s (process %d) was killed and has not ended within %g s: a device or a file system "
            "keeps it",
            name, process.pid, timeouts.END,
        )  # fmt: skip
        # Python would wait for it at its own end, without a limit.
        processes._children.discard(process)  # type: ignore[attr-defined]


def remove_shared(killed: Iterable[int]) -> None:
    """Remove the files in ``/dev/shm`` that killed processes left, once they have ended.

    torch names the memory of a tensor that a worker hands over ``torch_<pid>_…`` and takes the
    name away again: of 25 busy workers that are killed, one is killed in between.
    """
    deadline = time.monotonic() + _END_SECONDS
    for process in killed:
        while runs(process) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        for file in SHARED_MEMORY.glob(f"torch_{process}_*"):
            with contextlib.suppress(OSError):  # of another user's process of that number
                file.unlink()


def children_of(process: int) -> list[int]:
    """The processes that a process has started and that have not ended, such as its workers."""
    try:
        started = [
            Path(f"/proc/{process}/task/{thread}/children").read_text()
            for thread in threads_of(process)
        ]
    except OSError:  # a kernel without these files; or a thread that has just ended
        return [child for child, status in _all_statuses() if int(status[1]) == process]
    return [int(child) for of_thread in started for child in of_thread.split()]


def state_of(process: int) -> str:
    """The state, as of ``ps``: R runs, S sleeps, D waits for a device, T is stopped; "" if gone."""
    status = _status(process)
    return "" if status is None else status[0]


def threads_of(process: int) -> list[int]:
    """The numbers of a process's threads; none of one that is gone."""
    try:
        return sorted(map(int, os.listdir(f"/proc/{process}/task")))
    except OSError:
        return []


def cpu_seconds(process: int, thread: int | None = None) -> float:
    """Seconds for which a process, or one thread of it, has used a core; 0 of one that is gone."""
    status = _status(process if thread is None else f"{process}/task/{thread}")
    ticks = 0 if status is None else int(status[11]) + int(status[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _members(leader: int) -> list[int]:
    return [member for member, status in _all_statuses() if int(status[2]) == leader]


def _all_statuses() -> Iterator[tuple[int, list[str]]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (status := _status(int(folder.name))):
            yield int(folder.name), status


def runs(process: int) -> bool:
    """Whether a process is alive."""
    return state_of(process) not in ("", "Z", "X")


def _status(process: int | str) -> list[str] | None:
    """Its state, parent, group and so on, as ``/proc`` has them.

    None of one that is gone, or another user's where these are hidden.
    """
    try:
        line = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return None
    return line.rpartition(")")[2].split()

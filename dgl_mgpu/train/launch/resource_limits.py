"""The limits that a shell sets for its processes (``ulimit``), told where one may be the reason."""

from __future__ import annotations

import errno
import logging
import resource

from dgl_mgpu.utils.units import human_bytes

log = logging.getLogger(__name__)

# Other limits of processes than these are the system's own, which nobody has set.
_FEW_PROCESSES = 1000


def _soft(limit: int) -> int | None:
    value, _ = resource.getrlimit(limit)
    return None if value == resource.RLIM_INFINITY else value


def memory_limit() -> str:
    """The end of what is said of too little memory: the limit that there is, if any."""
    most = _soft(resource.RLIMIT_AS)
    return "" if most is None else f" (and ulimit -v allows a process {human_bytes(most)})"


def kill_reasons() -> str:
    """What SIGKILL mostly is of."""
    seconds = _soft(resource.RLIMIT_CPU)
    return "out of memory?" if seconds is None else f"out of memory, or ulimit -t {seconds} s?"


def crash_reasons() -> str:
    """The end of what is said of a crash: the limits at which libraries end a process, if any."""
    memory, processes = _soft(resource.RLIMIT_AS), _soft(resource.RLIMIT_NPROC)
    told = [] if memory is None else [f"ulimit -v allows a process {human_bytes(memory)}"]
    if processes is not None and processes < _FEW_PROCESSES:
        told.append(f"ulimit -u allows a user {processes} processes and threads")
    return f" ({', and '.join(told)})" if told else ""


def is_of_files(error: BaseException) -> bool:
    """Whether a process has as many files open as it may."""
    # torch's own errors have no number.
    return getattr(error, "errno", None) == errno.EMFILE or "Too many open files" in str(error)


def files_limit() -> str:
    """How many these are."""
    return f"ulimit -n allows a process {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} of them"


def is_of_processes(error: BaseException) -> bool:
    """Whether no process or thread more can be started, of which a user may have so many."""
    # A thread takes address space for its stack as well.
    return getattr(error, "errno", None) == errno.EAGAIN or any(
        each in str(error)
        for each in ("can't start new thread", "Resource temporarily unavailable")
    )


def processes_limit() -> str:
    """How many these are, and what else there may be too little of for one."""
    most = _soft(resource.RLIMIT_NPROC)
    told = "" if most is None else f"ulimit -u allows a user {most} processes and threads"
    return told + memory_limit()


def warn_of_time() -> None:
    """Tell of a limit of processor time before it ends this process, which cannot tell then."""
    seconds = _soft(resource.RLIMIT_CPU)
    if seconds is not None:
        log.warning(
            "ulimit -t is %d: the system ends a process after so many seconds of processor time",
            seconds,
        )

"""Typed errors in place of those of the system and torch: limits, memory, lost processes."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import time
import traceback
from collections.abc import Iterator
from multiprocessing import connection, reduction

import torch
import torch.distributed as dist

from dgl_mgpu.errors import (
    DeviceMemoryError,
    DGLMGPUError,
    LimitError,
    RankFailedError,
    SharedMemoryError,
    WorkerFailedError,
)
from dgl_mgpu.machine.shared_memory import lacks_shared_memory, unusable_shared_memory
from dgl_mgpu.utils.stages import stage_of
from dgl_mgpu.utils.units import human_bytes

log = logging.getLogger(__name__)

# Other limits of processes than these are the system's own, which nobody has set.
_FEW_PROCESSES = 1000
# How long after a worker's connection is lost a busy system may take to report its end.
_SIGNAL_SECONDS = 5.0
# torch's messages of a worker that is lost.  Errors that a worker raised have another text: «in
# DataLoader worker process 0».
_LOST_WORKER = "DataLoader worker (pid", "Too many open files. Communication with the workers"
# Errors that already name the cause.
_KNOWN_CAUSES = WorkerFailedError, LimitError, SharedMemoryError


# -- limits of processes (ulimit) ------------------------------------------------------------------


def _soft(limit: int) -> int | None:
    value, _ = resource.getrlimit(limit)
    return None if value == resource.RLIM_INFINITY else value


def _memory_limit() -> str:
    most = _soft(resource.RLIMIT_AS)
    return "" if most is None else f"ulimit -v allows a process {human_bytes(most)}"


def kill_reasons() -> str:
    """The likely reasons for SIGKILL."""
    seconds = _soft(resource.RLIMIT_CPU)
    return "out of memory?" if seconds is None else f"out of memory, or ulimit -t {seconds} s?"


def crash_reasons() -> str:
    """Limits at which libraries end a process, if any are set, as the end of a sentence."""
    reasons, processes = [_memory_limit()], _soft(resource.RLIMIT_NPROC)
    if processes is not None and processes < _FEW_PROCESSES:
        reasons.append(f"ulimit -u allows a user {processes} processes and threads")
    reasons = [reason for reason in reasons if reason]
    return f" ({', and '.join(reasons)})" if reasons else ""


def processes_limit() -> str:
    """The limits of a user's processes and threads, and of the memory for their stacks."""
    most, memory = _soft(resource.RLIMIT_NPROC), _memory_limit()
    processes = "" if most is None else f"ulimit -u allows a user {most} processes and threads"
    return processes + (f" (and {memory})" if memory else "")


def is_of_processes(error: BaseException) -> bool:
    """Whether no further process or thread can be started."""
    # A thread takes address space for its stack as well.
    return getattr(error, "errno", None) == errno.EAGAIN or any(
        text in str(error)
        for text in ("can't start new thread", "Resource temporarily unavailable")
    )


def warn_of_time() -> None:
    """Warn of a limit of processor time, at which the system ends a process silently."""
    seconds = _soft(resource.RLIMIT_CPU)
    if seconds is not None:
        log.warning(
            "ulimit -t is %d: the system ends a process after so many seconds of processor time",
            seconds,
        )


@contextlib.contextmanager
def typed_memory(action: str, fix: str) -> Iterator[None]:
    """Raise typed errors that say what to do where memory, open files or processes run out.

    Raises DeviceMemoryError, LimitError or SharedMemoryError.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, DGLMGPUError):
            raise
        action = f"{action} on rank {dist.get_rank() if dist.is_initialized() else 0}"
        problem = (str(error).splitlines() or ["too little memory"])[0] + stage_of(error)
        # torch's own errors have no number.
        if getattr(error, "errno", None) == errno.EMFILE or "Too many open files" in str(error):
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise LimitError(
                action,
                f"{problem}; ulimit -n allows a process {most} of them",
                "raise it (ulimit -n 65536), or use fewer ranks and sampler.num_workers",
            ) from error
        if is_of_processes(error):
            raise LimitError(
                action,
                f"{problem}; {processes_limit()}",
                "raise it (ulimit -u, ulimit -v), or use fewer ranks and sampler.num_workers",
            ) from error
        if lacks_shared_memory(error):
            raise unusable_shared_memory(problem) from error
        if not _is_of_memory(error):
            raise
        limit = f" (and {_memory_limit()})" if _memory_limit() else ""
        raise DeviceMemoryError(action, problem + limit, fix) from error


def _is_of_memory(error: Exception) -> bool:
    # torch has a type for this only where it is a GPU's, and none for maps of files.
    kinds = MemoryError, torch.OutOfMemoryError
    texts = "DefaultCPUAllocator", "std::bad_alloc", "Cannot allocate memory"
    return isinstance(error, kinds) or any(text in str(error) for text in texts)


# -- other processes -------------------------------------------------------------------------------


@contextlib.contextmanager
def typed_rank_losses() -> Iterator[None]:
    """Raise RankFailedError where gloo or NCCL raises because a rank is gone."""
    try:
        yield
    except RuntimeError as error:
        # gloo's have no type of their own, but name the file they are of.
        is_of_communication = isinstance(error, dist.DistError) or "/gloo/" in str(error)
        if isinstance(error, DGLMGPUError) or not is_of_communication:
            raise
        raise RankFailedError(
            "exchange with the other ranks",
            f"one of them is gone, or does not answer ({str(error).partition(chr(10))[0]}"
            f"{stage_of(error)})",
            "see why it ended, and start the run again",
        ) from error


@contextlib.contextmanager
def typed_worker_losses() -> Iterator[None]:
    """Raise WorkerFailedError where torch raises because a DataLoader's worker was killed."""
    try:
        yield
    except Exception as error:
        # Torch's handler of SIGCHLD raises wherever this process is: also while it waits for other
        # ranks or writes a checkpoint, whose errors then blame these.
        lost = None if isinstance(error, _KNOWN_CAUSES) else _lost_worker_or_connection(error)
        if lost is None:
            raise
        raise WorkerFailedError(
            "sample mini-batches in sampler.num_workers processes",
            lost + stage_of(error),
            "see why it ended: mostly the system has run out of memory, which fewer workers or a "
            "smaller trainer.batch_size leave more of",
        ) from error


def _lost_worker_or_connection(error: BaseException) -> str | None:
    """What is lost of a worker, in words; None if the error is of something else."""
    try:
        lost = _lost_worker(error)
        if lost is not None or not _is_of_connection(error):
            return lost
        # Its connection closes first, and what torch does at its end would interrupt what follows.
        time.sleep(_SIGNAL_SECONDS)
    except RuntimeError as late:
        # The handler may raise at each of these lines; it does so once for each end.
        return _lost_worker(late)
    return f"the connection to one was lost ({error!r})"


def _lost_worker(error: BaseException) -> str | None:
    """torch's message of a lost worker; None if the error is of something else."""
    cause: BaseException | None = error
    while cause is not None:
        is_torchs = isinstance(cause, RuntimeError) and not isinstance(cause, DGLMGPUError)
        if is_torchs and any(text in str(cause) for text in _LOST_WORKER):
            return str(cause).strip().removesuffix(".")
        cause = cause.__cause__ or cause.__context__
    return None


def _is_of_connection(error: BaseException) -> bool:
    """Whether an error is of a connection between processes; a rank has those to workers only."""
    if not isinstance(error, ConnectionError | EOFError):
        return False
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    # Tensors come by descriptors of files, which another module receives.
    return innermost.f_globals.get("__name__") in (connection.__name__, reduction.__name__)

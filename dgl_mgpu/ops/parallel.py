"""Run a kernel over ranges of its input on the threads that torch uses.

Kernels are scalar Numba functions without the interpreter lock, so they run in parallel on
any threads.  The threads are torch's own OpenMP team: after each of torch's operators its
workers spin for some milliseconds waiting for more, and threads of another pool would compete
with them for the cores (on two cores that costs all of the second one).

A forked child (a DataLoader worker) inherits the team's state but none of its threads, so it
uses a pool of its own.  Numba's ``parallel=True`` is not used: its OpenMP layer dies in such
a child, and its work queue is not safe when two threads of one process call it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

#: Ranges per thread: enough that a slow one (hub nodes) does not keep the others waiting.
_RANGES_PER_THREAD = 4

#: ``void fn(void *data)``, what GOMP_parallel runs on each thread of the team.
_TeamFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_team() -> Callable[..., None] | None:
    """``GOMP_parallel(fn, data, threads, flags)`` of the OpenMP runtime that torch loaded.

    GNU's, LLVM's and Intel's runtimes all export it.  None if torch was built without OpenMP.
    """
    if not torch.backends.openmp.is_available():
        return None
    try:
        team = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    team.argtypes = [_TeamFunction, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    team.restype = None
    return team


_team = _find_team()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _after_fork() -> None:
    global _team, _pool, _pool_size
    _team, _pool, _pool_size = None, None, 0


os.register_at_fork(after_in_child=_after_fork)


def _on_pool(work: Callable[[], None], threads: int) -> None:
    global _pool, _pool_size
    if _pool is None or _pool_size < threads:
        _pool, _pool_size = ThreadPoolExecutor(threads, thread_name_prefix="dgl_mgpu"), threads
    helpers = [_pool.submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        helper.result()


def _on_team(team: Callable[..., None], work: Callable[[], None], threads: int) -> None:
    errors: list[BaseException] = []

    def call(_: int | None) -> None:
        try:
            work()
        except BaseException as error:  # must not unwind through the OpenMP runtime
            errors.append(error)

    team(_TeamFunction(call), None, threads, 0)
    if errors:
        raise errors[0]


def split(total: int, grain: int) -> list[int]:
    """Bounds of near-equal ranges of at least ``grain`` items that cover ``[0, total)``."""
    ranges = max(1, min(total // grain, _RANGES_PER_THREAD * torch.get_num_threads()))
    return [total * index // ranges for index in range(ranges + 1)]


def run(kernel: Callable[..., Any], total: int, grain: int, *arguments: Any) -> list[Any]:
    """Call ``kernel(begin, end, *arguments)`` on ranges that cover ``[0, total)``.

    Returns the kernel's results in the order of the ranges.  The kernel is compiled with
    ``nogil=True``.  What it writes must depend on the items alone and not on how they fall into
    ranges.  ``grain`` is the smallest range worth a thread: fewer than twice as many items run
    inline.
    """
    bounds = split(total, grain)
    count = len(bounds) - 1
    threads = min(torch.get_num_threads(), count)
    if threads == 1:
        return [kernel(0, total, *arguments)]
    results: list[Any] = [None] * count
    tickets = itertools.count()

    def work() -> None:
        while (ticket := next(tickets)) < count:
            results[ticket] = kernel(bounds[ticket], bounds[ticket + 1], *arguments)

    if _team is None:
        _on_pool(work, threads)
    else:
        _on_team(_team, work, threads)
    return results

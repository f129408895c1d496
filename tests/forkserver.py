"""Processes forked from one that has imported what takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

from tests.pictures import nothing_drawn

_IMPORTED = ["tests.preload"]
#: Variable that tells ranks to draw nothing.
WITHOUT_PICTURES = "DGL_MGPU_TESTS_WITHOUT_PICTURES"


def forkserver() -> Any:
    """The context of multiprocessing that starts them."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    # Now, and not when the first one starts: a launcher blocks signals meanwhile.
    ensure_running()
    return context


def launchers_multiprocessing() -> Any:
    """What `dgl_mgpu.train.launch.launch` uses of multiprocessing, with ranks that are forked."""
    forkserver()
    context = SimpleNamespace(Pipe=mp.Pipe, Process=_rank)
    return SimpleNamespace(get_context=lambda method: context)


def _rank(target: Any, args: tuple[Any, ...], name: str) -> BaseProcess:
    return forkserver().Process(target=_run, args=(dict(os.environ), target, args), name=name)


def _run(environment: dict[str, str], rank_main: Any, args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    work, rank, num_ranks, meeting_point, _, *rest = args
    # A rank is not to outlive its parent: here the server, which ends with the test's process.
    with nothing_drawn() if WITHOUT_PICTURES in environment else contextlib.nullcontext():
        rank_main(work, rank, num_ranks, meeting_point, os.getppid(), *rest)

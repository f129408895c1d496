"""Ranks that live as long as a test session and run one check after the other.

To start a process costs seconds, a check on a small graph milliseconds.
"""

from __future__ import annotations

import datetime
import multiprocessing as mp
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dgl_mgpu  # noqa: F401  (lets dgl import in every rank)

#: How long ranks may take over a check, and how long others than the first to fail.
_SECONDS = 60.0
_SECONDS_AFTER_FAILURE = 3.0


class RankProcesses:
    """Processes joined by gloo, one a rank.

    Parameters
    ----------
    size : int
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, check: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``check(*args)`` on every rank; what each returned.

        The test fails if a rank raises, or does not answer.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((check, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + _SECONDS
        while len(answers) < self.size:
            waiting = {self._pipes[r]: r for r in range(self.size) if r not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    answers[rank] = False, "it ended"
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_FAILURE)
        silent = sorted(set(range(self.size)) - set(answers))
        failures = [f"rank {r}: {text}" for r, (well, text) in answers.items() if not well]
        if silent:
            failures.append(f"no answer from ranks {silent}")
        if failures:
            if len(failures) < self.size:  # ranks are no longer at the same place
                self.close()
            pytest.fail("\n".join(failures), pytrace=False)
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        # Ranks are forked from one process that has imported what takes seconds.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["dgl_mgpu", "dgl", "torch._dynamo"])
        folder = tempfile.mkdtemp(prefix="ranks-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, folder, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'ranks'}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=_SECONDS),
    )
    while True:
        try:
            check, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, check(*args)
        except BaseException:  # pytest's own are no Exceptions
            answer = False, traceback.format_exc()
        pipe.send(answer)

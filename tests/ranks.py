"""Ranks that live as long as a test session and run one check after the other.

To start a process costs seconds, a check on a small graph milliseconds.
"""

from __future__ import annotations

import datetime
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dgl_mgpu  # noqa: F401  (lets dgl import in every rank)
from benchmarks.ranks_as_machines import take_gpu
from dgl_mgpu.comm import communicator, network
from tests.forkserver import forkserver
from tests.seeds import seed_everything

#: What a test's fixture `ranks` is told by this mark: to be on the CPU and then, where there are
#: two or more, on GPUs.
on_gpus_too = pytest.mark.parametrize("ranks", ["cpu", "cuda"], indirect=True)

#: The same for stores over machines of one rank each, which may be ranks on one GPU.
machines_on_gpus_too = pytest.mark.parametrize(
    "ranks", ["cpu", pytest.param("machines", id="cuda")], indirect=True
)

#: How long ranks may take over a check, and how long others than the first to fail.  The first
#: checks import what they need, and compile kernels.
_SECONDS = 200.0
_SECONDS_AFTER_FAILURE = 3.0


def on_machines(machines: str, check: Callable[..., Any], *args: Any) -> Any:
    """What a check returns on ranks of machines by these names, a letter for each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "_groups", None)
        patch.setattr(communicator, "_across", None)
        patch.setattr(communicator, "_machine_id", lambda: machines[dist.get_rank()])
        # What this host's network is found to be is nobody else's.
        patch.setattr(network, "FOUND", SimpleNamespace(read=dict, keep=lambda found: None))
        return check(*args)


class RankProcesses:
    """Processes joined by torch.distributed, one a rank.

    Parameters
    ----------
    size : int
    device : {'cpu', 'cuda'}
        On the CPU they see no GPU.  Else each has one of its own, by its number; where there are
        too few, ranks share them, and NCCL takes each for a machine of its own.
    """

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size = size
        self._device = device
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @cached_property
    def exchanges(self) -> tuple[str, ...]:
        """The ways to exchange rows that a graph can be partitioned with here."""
        if self._device == "cpu":
            return "halo", "broadcast"
        linked = all(self.run(_reach_each_other))
        return ("halo", "broadcast", "auto", *(["remote"] if linked else []))

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
            # Ranks are no longer at the same place, or their GPUs may not work any more.
            if silent or len(failures) < self.size or self._device == "cuda":
                self.close()
            of = ", ".join(map(repr, args))
            pytest.fail("\n".join([f"{check.__name__}({of})", *failures]), pytrace=False)
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        if self._device == "cpu":
            context: Any = forkserver()
        else:
            # CUDA does not work in a process whose parent has so much as counted GPUs.  Each rank
            # has other hashes than the rest, as torchrun's do: sets of names have other orders.
            context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.size, self._device, self._folder.name, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, size: int, device: str, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    # Which exchange was the fastest is not to be known from another session.
    os.environ["XDG_CACHE_HOME"] = folder
    if device == "cuda":
        take_gpu(rank, size)
    else:  # where a part would be put
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
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
        seed_everything()
        try:
            answer = True, check(*args)
            if device == "cuda":
                torch.cuda.synchronize()  # its errors are to be this check's
        except BaseException:  # pytest's own are no Exceptions
            answer = False, traceback.format_exc()
        pipe.send(answer)


def _reach_each_other() -> bool:
    from dgl_mgpu.distributed.exchange.window import reaches_all

    return reaches_all(dist.group.WORLD, torch.device("cuda"))

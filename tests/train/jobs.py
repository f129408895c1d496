"""Small runs on ranks that are forked, which do something to themselves somewhere."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import dgl_mgpu.train.fullgraph.run
import dgl_mgpu.train.minibatch.run
from dgl_mgpu.cli import main
from dgl_mgpu.config.schema import Config
from dgl_mgpu.report import EpochReport, read_metrics
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.launch import launch as launching
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.run import _run_rank
from dgl_mgpu.train.trainer import Trainer
from tests.forkserver import forkserver
from tests.pictures import nothing_drawn

SMALL = [
    "data.options.num_nodes=600",
    "data.options.num_edges=4000",
    "trainer.batch_size=64",
    "sampler.fanouts=[3,3]",
    "sampler.eval_fanouts=[3,3]",
    "model.hidden=8",
    "trainer.epochs=3",
    "store.device=cpu",
]

#: What happens to a trainer before its run.
Hook = Callable[[Trainer], None]


def train(folder: Path, num_ranks: int, *overrides: str, hook: Hook | None = None) -> Path:
    """Run a job to its end in ``folder``, which is returned."""
    gpus = torch.cuda.device_count()
    if "mode=fullgraph" in overrides and 0 < gpus < num_ranks:
        pytest.skip(f"{num_ranks} ranks of a whole graph need a GPU each, and there are {gpus}")
    config = compose([*SMALL, f"trainer.ranks={num_ranks}", *overrides])
    launch(_work, num_ranks, config, folder, hook, hang_after=config.trainer.hang_after)
    return folder


def torchrun(folder: Path, num_ranks: int, *overrides: str, hook: Hook | None = None) -> list[str]:
    """Run a job in ``folder``, on ranks of torchrun's agent; with what each of them ended."""
    if torch.cuda.is_available():
        pytest.skip("the agent counts GPUs, which ranks forked from it cannot use then")
    config = compose([*SMALL, f"trainer.ranks={num_ranks}", *overrides])
    agent = forkserver().Process(target=_agent, args=(num_ranks, config, folder, hook))
    agent.start()
    agent.join()
    return [(folder / f"rank-{rank}").read_text() for rank in range(num_ranks)]


def _agent(num_ranks: int, config: Config, folder: Path, hook: Hook | None) -> None:
    job = LaunchConfig(
        1, 1, num_ranks, DefaultLogsSpecs(str(folder / "logs")), run_id="job", max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(ChildFailedError):
        elastic_launch(job, _rank_of_torchrun)(config, folder, hook)


def _rank_of_torchrun(config: Config, folder: Path, hook: Hook | None) -> None:
    end = folder / f"rank-{os.environ['RANK']}"
    end.touch()
    # The agent's, when another rank has failed, comes at any moment: also while this rank unwinds
    # of its own error, which is what is to be seen.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        hang_after = config.trainer.hang_after
        launch(_work, config.trainer.ranks, config, folder, hook, hang_after=hang_after)
    except BaseException as error:
        end.write_text(f"{type(error).__name__}: {error}")
        raise


def _work(config: Config, folder: Path, hook: Hook | None) -> None:
    with nothing_drawn():
        _run_rank(partial(make_trainer, hook), config, folder)


def start_command(folder: Path, *overrides: str) -> BaseProcess:
    """Start ``dgl-mgpu train`` in ``folder``, which draws nothing and whose ranks are forked.

    What it writes to stdout and stderr is in ``folder / "shown"`` and ``folder / "errors"``.
    """
    folder.mkdir()
    command = forkserver().Process(target=_command, args=(folder, overrides))
    command.start()
    return command


def _command(folder: Path, overrides: tuple[str, ...]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs that a process has counted its forks cannot use
    fork_ranks()
    mp.set_start_method("fork", force=True)  # of workers, as in a process that a shell has started
    with (
        (folder / "shown").open("w") as sys.stdout,
        (folder / "errors").open("w") as sys.stderr,
        nothing_drawn(),
    ):
        sys.exit(main(["train", *overrides, f"hydra.run.dir={folder}"]))


def fork_ranks() -> None:
    """Have this process, which nothing else uses, fork the ranks it launches, in no time."""
    context = SimpleNamespace(Pipe=mp.Pipe, Process=_ForkedRank)
    launching.mp = SimpleNamespace(
        get_context=lambda method: context, set_start_method=mp.set_start_method
    )


class _ForkedRank(mp.get_context("fork").Process):
    """Has started when SIGTERM ends it, as one that is spawned has.

    Before, it has its parent's handler, which would drop one.
    """

    def start(self) -> None:
        started, self._started = os.pipe()
        super().start()
        os.close(self._started)
        os.read(started, 1)  # until it has, or has ended
        os.close(started)

    def run(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self._started)
        super().run()


def make_trainer(hook: Hook | None, config: Config) -> Trainer:
    module = (
        dgl_mgpu.train.fullgraph.run if config.mode == "fullgraph" else dgl_mgpu.train.minibatch.run
    )
    trainer = module.make_trainer(config)
    if hook is not None:
        hook(trainer)
    return trainer


def at_step(step: int, rank: int, act: Callable[[], None], trainer: Trainer) -> None:
    """Hook: call ``act`` on one rank just before one of its optimizer's steps, counted from 1."""
    steps = 0

    def count(*arguments: object) -> None:
        nonlocal steps
        steps += 1
        if steps == step and (dist.get_rank() if dist.is_initialized() else 0) == rank:
            act()

    trainer.optimizer.register_step_pre_hook(count)


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def reports_of(folder: Path) -> list[EpochReport]:
    return read_metrics(folder / "metrics.jsonl")[0]


def until(condition: Callable[[], bool]) -> None:
    """Wait for something, however slow the machine is; the test's own time limit ends it."""
    while not condition():
        time.sleep(0.02)


def shared_memory() -> set[str]:
    """What is in shared memory, but for semaphores: those of other tests stay for long."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def equal_states(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)

"""Small runs on ranks that are forked, which do something to themselves at some step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import dgl_mgpu.fullgraph.run
import dgl_mgpu.minibatch.run
from dgl_mgpu.cli import compose
from dgl_mgpu.report import EpochReport, plots, read_metrics
from dgl_mgpu.training.config import Config
from dgl_mgpu.training.launch import launch
from dgl_mgpu.training.run import _run_rank
from dgl_mgpu.training.trainer import Trainer

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
    config = compose([*SMALL, f"trainer.ranks={num_ranks}", *overrides])
    launch(_work, num_ranks, config, folder, hook)
    return folder


def _work(config: Config, folder: Path, hook: Hook | None) -> None:
    plots.plot_curves = lambda *figures: None  # takes longer than such a small run
    _run_rank(partial(_make_trainer, hook), config, folder)


def _make_trainer(hook: Hook | None, config: Config) -> Trainer:
    module = dgl_mgpu.fullgraph if config.mode == "fullgraph" else dgl_mgpu.minibatch
    trainer = module.run._make_trainer(config)
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


def equal_states(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)

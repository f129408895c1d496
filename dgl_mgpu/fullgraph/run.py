"""Training on a whole graph, from a configuration."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import dgl
import torch

from dgl_mgpu.errors import ConfigError
from dgl_mgpu.fullgraph.graph import partition_graph
from dgl_mgpu.fullgraph.models import build_model
from dgl_mgpu.fullgraph.trainer import FullGraphTrainer
from dgl_mgpu.store import Ranks
from dgl_mgpu.training.config import Config
from dgl_mgpu.training.run import load_dataset, ranks_of_job, run, seeded_model


def train(config: Config, folder: Path) -> None:
    """Train as configured; metrics, curves and checkpoints go to ``folder``.

    Raises
    ------
    DGLMGPUError
        Whatever is wrong, before work starts where that can be known.
    """
    config = ranks_of_job(config)
    config.check()
    _check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", config.trainer.ranks)))
    run(_make_trainer, config, folder)


def _check_gpus(num_ranks: int) -> None:
    """Raise unless each rank of this machine has a GPU of its own, or none has."""
    gpus = torch.cuda.device_count()
    if 0 < gpus < num_ranks:
        raise ConfigError(
            f"train on a whole graph with {num_ranks} ranks",
            f"{gpus} GPUs, of which each rank takes one",
            f"use at most {gpus} ranks, or the CPU alone (CUDA_VISIBLE_DEVICES=)",
        )


def _make_trainer(config: Config) -> FullGraphTrainer:
    ranks = Ranks.of_all_machines()
    whole, num_classes = ranks.together(
        "load the data", lambda: _load(config) if ranks.rank == 0 else (None, 0)
    )
    num_classes = ranks.from_first("count the classes", lambda: num_classes)
    graph = partition_graph(
        whole,
        by=config.fullgraph.by,
        exchange=config.fullgraph.exchange,
        seed=config.trainer.seed,
    )
    del whole  # each rank has its part
    features = graph.ndata.pop("feat")
    build = partial(build_model, keep_input_sums=config.fullgraph.keep_input_sums)
    model, optimizer = seeded_model(config, build, features.shape[1], num_classes, graph.device)
    return FullGraphTrainer(
        model,
        optimizer,
        graph,
        {"feat": features.float()},
        graph.ndata.pop("label"),
        {
            "train": graph.ndata.pop("train_mask"),
            "valid": graph.ndata.pop("val_mask"),
            "test": graph.ndata.pop("test_mask"),
        },
        eval_every=config.trainer.eval_every,
    )


def _load(config: Config) -> tuple[dgl.DGLGraph | None, int]:
    """The whole graph, and the number of classes."""
    dataset = load_dataset(config)
    return dataset.to_dgl(), dataset.num_classes

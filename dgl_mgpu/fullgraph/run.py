"""Training on a whole graph, from a configuration."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

from dgl_mgpu.data import Dataset
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.fullgraph.graph import partition_graph
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
    dataset = ranks.together(
        "load the data", lambda: load_dataset(config) if ranks.rank == 0 else None
    )
    num_classes = ranks.from_first("read the classes", partial(_num_classes, dataset))
    graph = partition_graph(
        None if dataset is None else dataset.to_dgl(),
        by=config.fullgraph.by,
        exchange=config.fullgraph.exchange,
        seed=config.trainer.seed,
    )
    del dataset  # each rank has its part
    features = graph.ndata.pop("feat")
    model, optimizer = seeded_model(config, features.shape[1], num_classes, graph.device)
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


def _num_classes(dataset: Dataset | None) -> int:
    assert dataset is not None  # the first rank has it
    return dataset.num_classes

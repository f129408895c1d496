"""Training on a whole graph, from a configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import dgl
import torch

from dgl_mgpu.errors import ConfigError
from dgl_mgpu.fullgraph.features import HostRows
from dgl_mgpu.fullgraph.features.placement import are_for_host
from dgl_mgpu.fullgraph.graph import PartitionedGraph, partition_graph
from dgl_mgpu.fullgraph.models import build_model
from dgl_mgpu.fullgraph.trainer import FullGraphTrainer
from dgl_mgpu.store import Ranks
from dgl_mgpu.training.config import Config
from dgl_mgpu.training.run import (
    load_dataset,
    ranks_of_job,
    ranks_of_this_machine,
    run,
    seeded_model,
)


def train(config: Config, folder: Path) -> None:
    """Train as configured; metrics, curves and checkpoints go to ``folder``.

    Raises
    ------
    DGLMGPUError
        Whatever is wrong, before work starts where that can be known.
    """
    config = ranks_of_job(config)
    config.check()
    _check_gpus(ranks_of_this_machine(config))
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
    features = None if whole is None else whole.ndata.pop("feat")
    graph = partition_graph(
        whole,
        by=config.fullgraph.by,
        exchange=config.fullgraph.exchange,
        seed=config.trainer.seed,
    )
    del whole  # each rank has its part
    features = _dealt(config, graph, features)
    build = partial(build_model, options=config.fullgraph)
    model, optimizer = seeded_model(config, build, features.shape[1], num_classes, graph.device)
    return FullGraphTrainer(
        model,
        optimizer,
        graph,
        {"feat": features},
        graph.ndata.pop("label"),
        {
            "train": graph.ndata.pop("train_mask"),
            "valid": graph.ndata.pop("val_mask"),
            "test": graph.ndata.pop("test_mask"),
        },
        eval_every=config.trainer.eval_every,
    )


def _dealt(
    config: Config, graph: PartitionedGraph, features: torch.Tensor | None
) -> torch.Tensor | HostRows:
    """This rank's features, from those of all nodes, which the first rank has; float32."""
    width = Ranks.of_all_machines().from_first(
        "count the features",
        lambda: features.shape[1],  # type: ignore[union-attr]
    )
    nbytes = graph.num_nodes() * width * torch.float32.itemsize
    if are_for_host(config.fullgraph.features, nbytes, graph.device):
        return HostRows.of_nodes(graph, graph.scatter(features, device="cpu").float())
    return graph.scatter(features).float()


def _load(config: Config) -> tuple[dgl.DGLGraph | None, int]:
    """The whole graph, and the number of classes."""
    dataset = load_dataset(config)
    return dataset.to_dgl(), dataset.num_classes

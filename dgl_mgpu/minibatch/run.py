"""Training on mini-batches, from a configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from dgl.dataloading import NeighborSampler, Sampler

from dgl_mgpu.backend.global_store.store import GlobalStore, machine
from dgl_mgpu.data import Dataset
from dgl_mgpu.minibatch.seeds import SeedBatches
from dgl_mgpu.minibatch.trainer import MiniBatchTrainer, Split
from dgl_mgpu.minibatch.walks import RandomWalkSampler
from dgl_mgpu.store import Ranks
from dgl_mgpu.training.config import Config
from dgl_mgpu.training.models import INV_SQRT_DEGREES, NodeModel, build_model
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
    machine(config.topology, ranks_of_this_machine(config))  # raises if it has fewer GPUs
    run(_make_trainer, config, folder)


def _make_trainer(config: Config) -> MiniBatchTrainer:
    ranks = Ranks.of_this_machine()
    dataset = ranks.together("load the data", lambda: _load(config) if ranks.rank == 0 else None)
    splits, num_classes = ranks.from_first("read the split", partial(_splits, dataset))
    store = GlobalStore.from_dataset(
        dataset,
        seed=config.trainer.seed,
        topology=config.topology,
        batch_size=config.trainer.batch_size,
        fanouts=config.sampler.fanouts,
        **asdict(config.store),
    )
    del dataset  # all of it is in the store
    num_features = store.graph.get_node_storage("feat").shape[1]
    model, optimizer = seeded_model(config, build_model, num_features, num_classes, store.device)
    return MiniBatchTrainer(
        model,
        optimizer,
        store,
        *(_split(config, model, name, splits[name]) for name in ("train", "valid", "test")),
        num_workers=config.sampler.num_workers,
        eval_every=config.trainer.eval_every,
        count_accesses=config.trainer.count_accesses,
        precision=getattr(torch, config.trainer.precision),
    )


def _load(config: Config) -> Dataset:
    dataset = load_dataset(config)
    features = dict(dataset.node_features)
    if config.model.name == "gcn":
        features[INV_SQRT_DEGREES] = _inv_sqrt_degrees(dataset)
    return dataclasses.replace(dataset, node_features=features, checked=True)


def _inv_sqrt_degrees(dataset: Dataset) -> np.ndarray:
    """1 / sqrt of every node's out-degree and in-degree, float32, shape (num_nodes, 2)."""
    outgoing = np.bincount(dataset.indices, minlength=dataset.num_nodes)
    degrees = np.stack([outgoing, np.diff(dataset.indptr)], 1)
    return (1 / np.sqrt(np.maximum(degrees, 1))).astype(np.float32)


def _splits(dataset: Dataset | None) -> tuple[dict[str, torch.Tensor], int]:
    """Seed nodes of each split, in the graph's id type, and the number of classes."""
    assert dataset is not None  # the first rank has it
    dtype = dataset.indices.dtype
    seeds = {
        name: torch.from_numpy(np.asarray(getattr(dataset, name)).astype(dtype))
        for name in ("train", "valid", "test")
    }
    return seeds, dataset.num_classes


def _split(config: Config, model: NodeModel, name: str, seeds: torch.Tensor) -> Split:
    sampler = config.sampler
    training = name == "train"
    everyone = Ranks.of_all_machines()
    batches = SeedBatches(
        seeds,
        config.trainer.batch_size,
        shuffle=training,
        seed=config.trainer.seed,
        rank=everyone.rank,
        num_ranks=everyone.size,
    )
    fanouts = list(sampler.fanouts if training else sampler.eval_fanouts)
    return Split(batches, _make_sampler(config, model, fanouts))


def _make_sampler(config: Config, model: NodeModel, fanouts: list[int]) -> Sampler:
    prefetch = {"prefetch_node_feats": list(model.inputs), "prefetch_labels": ["label"]}
    if config.sampler.name == "random_walk":
        return RandomWalkSampler(
            len(fanouts),
            config.sampler.num_neighbors,
            config.sampler.num_walks,
            config.sampler.walk_length,
            **prefetch,
        )
    return NeighborSampler(fanouts, replace=config.sampler.replace, **prefetch)

"""The data set, model and optimizer of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.config.schema import Config, ModelConfig
from dgl_mgpu.data import (
    HETEROGENEOUS,
    Dataset,
    HeteroDataset,
    load,
    load_hetero,
    require_labelled_split,
    without_inputs,
)
from dgl_mgpu.data.hetero import with_self_loops
from dgl_mgpu.train.optimizer import make_optimizer
from dgl_mgpu.utils.torchrun import under_torchrun

Model = TypeVar("Model", bound=nn.Module)


def ranks_of_this_machine(config: Config) -> int:
    """The number of the job's ranks on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else config.trainer.ranks


def load_dataset(config: Config) -> Dataset | HeteroDataset:
    """The configured data set, with the self-loops and input features that the model needs.

    Raises as :func:`dgl_mgpu.data.load`, and if a node of its split has no class that is learned.
    """
    options = dict(config.data.options)
    dataset: Dataset | HeteroDataset
    if config.data.name in HETEROGENEOUS:
        dataset = load_hetero(config.data.name, config.data.root, **options)
    else:
        if config.model.self_loops:
            options["self_loops"] = True
        dataset = load(config.data.name, config.data.root, **options)
    if config.task == "node_classification":
        require_labelled_split(dataset)
    return adapt_to_model(config, dataset)


def adapt_to_model(config: Config, dataset: Dataset | HeteroDataset) -> Dataset | HeteroDataset:
    """A data set with the self-loop relations and input features that the model needs."""
    if isinstance(dataset, HeteroDataset) and config.model.self_loops:
        dataset = with_self_loops(dataset)
    return without_inputs(dataset) if config.model.inputs == "learned" else dataset


def seeded_model(
    config: Config,
    build_model: Callable[[ModelConfig, int, int, int], Model],
    num_features: int,
    num_classes: int,
    device: torch.device | str = "cpu",
) -> tuple[Model, torch.optim.Optimizer]:
    """The configured model, the same on every rank, and its optimizer.

    ``build_model`` gets the model's configuration and the numbers of features, classes and layers.
    Afterwards ranks draw random numbers of their own, for dropout.
    """
    trainer = config.trainer
    torch.manual_seed(trainer.seed)
    # Fanouts also give the number of layers of PinSAGE and on a full graph.
    model = build_model(config.model, num_features, num_classes, len(config.sampler.fanouts))
    model = model.to(device)
    torch.manual_seed(trainer.seed * 1_000_003 + Communicator.of_all_machines().rank)
    return model, make_optimizer(trainer, model.parameters(), device)

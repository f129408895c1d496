"""Training on mini-batches, from a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from dgl.dataloading import NeighborSampler, Sampler

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import choose_runtime
from dgl_mgpu.config.schema import Config, ModelConfig
from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.data.links import hold_out
from dgl_mgpu.models.heterogeneous import HeteroInputs, RelationalModel, build_relational_model
from dgl_mgpu.models.homogeneous import INV_SQRT_DEGREES, NodeModel, build_model
from dgl_mgpu.store.embedding.optimizers import SparseAdam
from dgl_mgpu.store.global_store import GlobalStore
from dgl_mgpu.store.memory.machine import machine
from dgl_mgpu.train.minibatch.evaluation import AllNodes, is_cheaper_for_all_nodes
from dgl_mgpu.train.minibatch.links import LinkTask
from dgl_mgpu.train.minibatch.samplers import RandomWalkSampler, SeedBatches
from dgl_mgpu.train.minibatch.task import LEARNED, SPLITS, LearnedRows, Task
from dgl_mgpu.train.minibatch.trainer import MiniBatchTrainer, Split
from dgl_mgpu.train.setup import load_dataset, ranks_of_this_machine, seeded_model


def check_machine(config: Config) -> None:
    """Raise if the machine that is named has fewer GPUs than ranks."""
    machine(config.topology, ranks_of_this_machine(config))


def make_trainer(config: Config) -> MiniBatchTrainer:
    """The trainer of a run that begins; collective."""
    ranks = Communicator.of_this_machine()
    if config.store.device == "cuda":
        choose_runtime("cuda", ranks)  # raises without GPUs, before data is read or generated
    dataset: Dataset | HeteroDataset | None = None

    def read() -> Task:
        nonlocal dataset
        dataset, task = load(config)
        return task

    task = ranks.broadcast_from_rank0("load the data", read)
    store = GlobalStore.from_dataset(
        dataset,
        seed=config.trainer.seed,
        embeddings=task.embeddings,
        topology=config.topology,
        batch_size=config.planned_seeds(),
        fanouts=config.sampler.planned_fanouts(),
        **asdict(config.store),
    )
    del dataset  # all of it is in the store
    model, optimizer = _make_model(config, store, task)
    learned = [store.embedding(LEARNED, ntype) for ntype in task.learned]
    return MiniBatchTrainer(
        config,
        model,
        optimizer,
        store,
        [_split(config, task, store, model, name) for name in SPLITS],
        task.objective(store.graph),
        SparseAdam(learned, config.trainer.lr) if learned else None,
    )


def load(config: Config) -> tuple[Dataset | HeteroDataset, Task]:
    """The data set, with the features and self-loops that its model wants, and the task.

    For link prediction without the edges that are held out.
    """
    dataset = load_dataset(config)
    if isinstance(dataset, HeteroDataset):
        return dataset, Task.from_dataset(config, dataset)
    if config.task == "link_prediction":
        held_out = hold_out(dataset, config.links.valid, config.links.test, config.trainer.seed)
        # Mini-batches start from all nodes, which the store may count reads by.
        dataset = dataclasses.replace(
            held_out.dataset, train=np.arange(dataset.num_nodes), checked=True
        )
        task: Task = LinkTask.from_links(config, held_out)
    else:
        task = Task.from_dataset(config, dataset)
    if config.model.name == "gcn":
        degrees = {INV_SQRT_DEGREES: _inv_sqrt_degrees(dataset)}
        features = {**dataset.node_features, **degrees}
        dataset = dataclasses.replace(dataset, node_features=features, checked=True)
    return dataset, task


def _inv_sqrt_degrees(dataset: Dataset) -> np.ndarray:
    """1 / sqrt of every node's out-degree and in-degree, float32, shape (num_nodes, 2)."""
    outgoing = np.bincount(dataset.indices, minlength=dataset.num_nodes)
    degrees = np.stack([outgoing, np.diff(dataset.indptr)], 1)
    return (1 / np.sqrt(np.maximum(degrees, 1))).astype(np.float32)


def _make_model(
    config: Config, store: GlobalStore, task: Task
) -> tuple[NodeModel | RelationalModel, torch.optim.Optimizer]:
    graph = store.graph
    learned = {ntype: LearnedRows(store.embedding(LEARNED, ntype)) for ntype in task.learned}
    build: Callable[[ModelConfig, int, int, int], NodeModel | RelationalModel]
    if task.target is None:
        build = partial(build_model, embedding=learned.get(graph.ntypes[0]))
    else:
        inputs = HeteroInputs(
            graph.ntypes, graph.canonical_etypes, task.target, task.widths, learned
        )
        build = partial(build_relational_model, inputs=inputs)
    return seeded_model(config, build, task.width, task.num_outputs, store.device)


def _split(
    config: Config, task: Task, store: GlobalStore, model: NodeModel | RelationalModel, name: str
) -> Split:
    sampler = config.sampler
    training = name == "train"
    everyone = Communicator.of_all_machines()
    batches = SeedBatches(
        task.seeds[name],
        config.trainer.batch_size,
        shuffle=training,
        seed=config.trainer.seed,
        rank=everyone.rank,
        num_ranks=everyone.size,
        ntype=task.target,
        # All ranks take part in what machines send each other.
        every_round=store.graph.spans_machines,
    )
    fanouts = list(sampler.fanouts if training else sampler.evaluated_fanouts())
    blocks = _make_sampler(config, fanouts, task.prefetch_options(model.inputs))
    all_nodes = None
    # Of a store over machines ranks would ask for rows of all nodes at different times.
    is_local = not store.graph.spans_machines
    classifies = is_local and not training and config.task == "node_classification"
    if classifies and isinstance(model, NodeModel) and sampler.evaluates_all_neighbors():
        sizes = len(task.seeds[name]), config.trainer.batch_size, len(fanouts)
        if is_cheaper_for_all_nodes(*sizes, store.graph.num_nodes(), store.graph.num_edges()):
            all_nodes = AllNodes(model, store.graph, len(fanouts))
    return Split(batches, task.sampler(name, blocks, store.graph), all_nodes)


def _make_sampler(config: Config, fanouts: list, prefetch: dict[str, Any]) -> Sampler:
    if config.sampler.name == "random_walk":
        return RandomWalkSampler(
            len(fanouts),
            config.sampler.num_neighbors,
            config.sampler.num_walks,
            config.sampler.walk_length,
            **prefetch,
        )
    return NeighborSampler(fanouts, replace=config.sampler.replace, **prefetch)

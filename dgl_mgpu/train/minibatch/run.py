"""Training on mini-batches, from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dgl.dataloading import NeighborSampler, Sampler

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import choose_runtime
from dgl_mgpu.config.schema import Config, ModelConfig
from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.models.heterogeneous import HeteroInputs, RelationalModel, build_relational_model
from dgl_mgpu.models.homogeneous import NodeModel, build_model
from dgl_mgpu.store.embedding.optimizers import SparseAdam
from dgl_mgpu.store.global_store import GlobalStore, machine
from dgl_mgpu.train.minibatch.evaluation import AllNodes, is_cheaper_for_all_nodes
from dgl_mgpu.train.minibatch.learned_inputs import LearnedRows
from dgl_mgpu.train.minibatch.load import load
from dgl_mgpu.train.minibatch.pinsage_sampler import RandomWalkSampler
from dgl_mgpu.train.minibatch.seeds import SeedBatches
from dgl_mgpu.train.minibatch.task import LEARNED, SPLITS, Task
from dgl_mgpu.train.minibatch.trainer import MiniBatchTrainer, Split
from dgl_mgpu.train.run import check_start, ranks_of_job, ranks_of_this_machine, run, seeded_model


def train(config: Config, folder: Path) -> None:
    """Train as configured; metrics, curves and checkpoints go to ``folder``.

    Raises DGLMGPUError whatever is wrong, before work starts where that can be known.
    """
    config = ranks_of_job(config)
    config.check()
    check_start(config)
    machine(config.topology, ranks_of_this_machine(config))  # raises if it has fewer GPUs
    run(_make_trainer, config, folder)


def untrained(config: Config) -> MiniBatchTrainer:
    """What trains a run's model, as it begins; collective."""
    return _make_trainer(config)


def _make_trainer(config: Config) -> MiniBatchTrainer:
    ranks = Communicator.of_this_machine()
    if config.store.device == "cuda":
        choose_runtime("cuda", ranks)  # raises without GPUs, before data is read or generated
    dataset: Dataset | HeteroDataset | None = None

    def read() -> Task:
        nonlocal dataset
        dataset, task = load(config)
        return task

    task = ranks.broadcast_from_rank0("load the data", read)
    store = _make_store(config, dataset, task)
    del dataset  # all of it is in the store
    model, optimizer = _make_model(config, store, task)
    learned = [store.embedding(LEARNED, ntype) for ntype in task.learned]
    return MiniBatchTrainer(
        model,
        optimizer,
        store,
        *(_split(config, task, store, model, name) for name in SPLITS),
        objective=task.objective(store.graph),
        embeddings=SparseAdam(learned, config.trainer.lr) if learned else None,
        num_workers=config.sampler.num_workers,
        eval_every=config.trainer.eval_every,
        count_accesses=config.trainer.count_accesses,
        precision=getattr(torch, config.trainer.precision),
        cuda_graphs=config.trainer.cuda_graphs,
    )


def _make_store(config: Config, dataset: Dataset | HeteroDataset | None, task: Task) -> GlobalStore:
    return GlobalStore.from_dataset(
        dataset,
        seed=config.trainer.seed,
        embeddings=task.embeddings,
        topology=config.topology,
        batch_size=config.planned_seeds(),
        fanouts=config.sampler.planned_fanouts(),
        **asdict(config.store),
    )


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
    )
    fanouts = list(sampler.fanouts if training else sampler.evaluated_fanouts())
    blocks = _make_sampler(config, fanouts, task.prefetched(model.inputs))
    all_nodes = None
    classifies = not training and config.task == "node_classification"
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

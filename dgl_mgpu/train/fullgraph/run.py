"""Runs on a whole graph, of which each rank has its part: from a configuration to a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import dgl
import torch
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.config.schema import Config, ModelConfig
from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.data.checks import SPLITS
from dgl_mgpu.data.links import hold_out
from dgl_mgpu.distributed.exchange.strategies import AUTO, ExchangeStrategy
from dgl_mgpu.distributed.graph import PartitionedGraph, partition_graph
from dgl_mgpu.distributed.host_features import HostRows, are_for_host
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.models.full_graph import build_model, build_whole_relational_model
from dgl_mgpu.models.heterogeneous import HeteroInputs, common_width
from dgl_mgpu.train.fullgraph.links import FullGraphLinkTrainer, edges_of_splits
from dgl_mgpu.train.fullgraph.trainer import FullGraphTrainer, WholeGraphTrainer
from dgl_mgpu.train.setup import load_dataset, ranks_of_this_machine, seeded_model
from dgl_mgpu.utils.types import NTYPE

_MASKS = "train_mask", "val_mask", "test_mask"


def check_machine(config: Config) -> None:
    """Raise if there is no such exchange, or fewer GPUs than ranks."""
    if config.fullgraph.exchange != AUTO:
        ExchangeStrategy.named(config.fullgraph.exchange)
    _check_gpus(ranks_of_this_machine(config))


def _check_gpus(num_ranks: int) -> None:
    """Raise unless each rank of this machine has a GPU of its own, or none has."""
    gpus = torch.cuda.device_count()
    if 0 < gpus < num_ranks:
        raise ConfigError(
            f"share a whole graph among {num_ranks} ranks",
            f"this machine has {gpus} GPUs, and each rank needs one of its own",
            f"use at most {gpus} ranks, or the CPU alone (CUDA_VISIBLE_DEVICES=)",
        )


@dataclass(frozen=True)
class _Content:
    """Sizes of a data set, which the first rank reads and sends to the others."""

    num_outputs: int  # Classes, or the width of embeddings
    num_nodes: Mapping[str, int]  # By node type
    widths: Mapping[str, int]  # Of features, of each node type that has some
    # The node type that is classified in a heterogeneous graph, None in one of one type
    target: str | None

    @classmethod
    def from_dataset(cls, config: Config, dataset: Dataset | HeteroDataset | None) -> _Content:
        assert dataset is not None  # the first rank has it
        classifies = config.task == "node_classification"
        num_outputs = dataset.num_classes if classifies else config.model.hidden
        if isinstance(dataset, HeteroDataset):
            return cls(num_outputs, dict(dataset.num_nodes), dataset.widths, dataset.target)
        features = dataset.node_features.get("feat")
        widths = {} if features is None else {NTYPE: features.shape[1]}
        return cls(num_outputs, {NTYPE: dataset.num_nodes}, widths, None)


def make_trainer(config: Config, device: torch.device | None = None) -> WholeGraphTrainer:
    """The trainer of a run that begins, by default on this rank's GPU, if any; collective."""
    if device is not None and device.type == "cuda":
        _check_gpus(Communicator.of_this_machine().size)
    ranks = Communicator.of_all_machines()
    dataset, edges = ranks.run_all(
        "load the data", lambda: _load(config) if ranks.rank == 0 else (None, None)
    )
    content = ranks.broadcast_from_rank0(
        "count features and classes", partial(_Content.from_dataset, config, dataset)
    )
    whole = None if dataset is None else dataset.to_dgl()
    del dataset
    features = {
        ntype: None if whole is None else whole.nodes[ntype].data.pop("feat")
        for ntype in content.widths
    }
    graph = partition_graph(
        whole,
        by=config.fullgraph.by,
        exchange=config.fullgraph.exchange,
        seed=config.trainer.seed,
        device=device,
    )
    del whole  # each rank has its part
    rows = _scatter_features(config, graph, content, features)
    model, optimizer = _make_model(config, graph, content)
    common = model, optimizer, graph, _inputs(graph, content, rows)
    how: dict[str, Any] = {
        "eval_every": config.trainer.eval_every,
        "precision": getattr(torch, config.trainer.precision),
    }
    data = graph.nodes[content.target or NTYPE].data
    labels = data.pop("label")
    masks = {name: data.pop(mask) for name, mask in zip(SPLITS, _MASKS, strict=True)}
    if config.task == "node_classification":
        return FullGraphTrainer(*common, labels, masks, target=content.target, **how)
    negatives, seed = config.links.negatives, config.trainer.seed
    return FullGraphLinkTrainer(*common, edges, negatives=negatives, seed=seed, **how)


def _load(config: Config) -> tuple[Dataset | HeteroDataset, dict[str, torch.Tensor] | None]:
    """The data set, for link prediction without the edges held out; and the edges of its splits."""
    dataset = load_dataset(config)
    if config.task == "node_classification" or isinstance(dataset, HeteroDataset):
        return dataset, None
    links = hold_out(dataset, config.links.valid, config.links.test, config.trainer.seed)
    return links.dataset, edges_of_splits(links)


def _scatter_features(
    config: Config,
    graph: PartitionedGraph,
    content: _Content,
    features: Mapping[str, torch.Tensor | None],
) -> dict[str, torch.Tensor | HostRows]:
    """This rank's features by node type, of those of all nodes, which the first has; float32."""
    columns = sum(graph.num_nodes(ntype) * width for ntype, width in content.widths.items())
    on_host = are_for_host(
        config.fullgraph.features, columns * torch.float32.itemsize, graph.device
    )
    features_here: dict[str, torch.Tensor | HostRows] = {}
    for ntype, of_all in features.items():
        rows = graph.scatter(of_all, ntype, "cpu" if on_host else None).float()
        features_here[ntype] = HostRows.of_nodes(graph, rows, ntype) if on_host else rows
    return features_here


def _make_model(
    config: Config, graph: dgl.DGLGraph, content: _Content
) -> tuple[nn.Module, torch.optim.Optimizer]:
    build: Callable[[ModelConfig, int, int, int], nn.Module]
    options = config.fullgraph
    if config.trainer.precision != "float32":  # of a GCN, which computes without autocast
        options = replace(options, activations=config.trainer.precision)
    if content.target is None:
        learned = 0 if content.widths else content.num_nodes[NTYPE]
        width = content.widths.get(NTYPE, config.model.hidden)
        build = partial(build_model, options=options, num_learned=learned)
    else:
        inputs = HeteroInputs(graph.ntypes, graph.canonical_etypes, content.target, content.widths)
        width = common_width(graph.ntypes, content.widths, config.model.hidden)
        build = partial(build_whole_relational_model, inputs=inputs, num_nodes=content.num_nodes)
    return seeded_model(config, build, width, content.num_outputs, graph.device)


def _inputs(
    graph: dgl.DGLGraph, content: _Content, rows: Mapping[str, torch.Tensor | HostRows]
) -> dict[str, Any]:
    """Inputs of the model, of this rank's nodes."""
    if content.target is None:
        return {"feat": rows[NTYPE]} if content.widths else {dgl.NID: graph.ndata[dgl.NID]}
    nodes = {ntype: graph.nodes[ntype].data[dgl.NID] for ntype in graph.ntypes}
    return {"feat": rows, dgl.NID: nodes}

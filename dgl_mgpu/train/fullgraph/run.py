"""Training on a whole graph, from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import dgl
import torch
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.config.schema import Config, ModelConfig
from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.data.checks import SPLITS
from dgl_mgpu.distributed.exchange.strategies import AUTO, ExchangeStrategy
from dgl_mgpu.distributed.graph import PartitionedGraph, partition_graph
from dgl_mgpu.distributed.host_features import HostRows, are_for_host
from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.models.full_graph import build_model, build_whole_relational_model
from dgl_mgpu.models.heterogeneous import HeteroInputs, common_width
from dgl_mgpu.train.fullgraph.trainer import FullGraphTrainer
from dgl_mgpu.train.setup import load_dataset, ranks_of_this_machine, seeded_model

#: DGL's name of the only type of nodes.
_NTYPE = "_N"
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
    """What all ranks know of a data set, which the first one reads."""

    num_classes: int
    num_nodes: Mapping[str, int]  # By node type
    widths: Mapping[str, int]  # Of features, of each node type that has some
    # The node type that is classified in a heterogeneous graph, None in one of one type
    target: str | None

    @classmethod
    def from_dataset(cls, dataset: Dataset | HeteroDataset | None) -> _Content:
        assert dataset is not None  # the first rank has it
        if isinstance(dataset, HeteroDataset):
            nodes = dict(dataset.num_nodes)
            return cls(dataset.num_classes, nodes, dataset.widths, dataset.target)
        if "feat" not in dataset.node_features:
            raise InvalidInputError(
                f"train on all of {dataset.name!r} at once",
                "it has no node feature 'feat'",
                "use mode=minibatch with model.inputs=learned, or for ogbn-proteins "
                "data.options.mean_edge_features=true",
            )
        width = dataset.node_features["feat"].shape[1]
        return cls(dataset.num_classes, {_NTYPE: dataset.num_nodes}, {_NTYPE: width}, None)


def make_trainer(config: Config, device: torch.device | None = None) -> FullGraphTrainer:
    """The trainer of a run that begins, by default on this rank's GPU, if any; collective."""
    if device is not None and device.type == "cuda":
        _check_gpus(Communicator.of_this_machine().size)
    ranks = Communicator.of_all_machines()
    dataset = ranks.run_all(
        "load the data", lambda: load_dataset(config) if ranks.rank == 0 else None
    )
    content = ranks.broadcast_from_rank0(
        "count features and classes", partial(_Content.from_dataset, dataset)
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
    rows = _dealt(config, graph, content, features)
    model, optimizer = _make_model(config, graph, content)
    data = graph.nodes[content.target or _NTYPE].data
    return FullGraphTrainer(
        model,
        optimizer,
        graph,
        _inputs(graph, content, rows),
        data.pop("label"),
        {name: data.pop(mask) for name, mask in zip(SPLITS, _MASKS, strict=True)},
        target=content.target,
        eval_every=config.trainer.eval_every,
    )


def _dealt(
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
    if content.target is None:
        (width,) = content.widths.values()
        build = partial(build_model, options=config.fullgraph)
    else:
        inputs = HeteroInputs(graph.ntypes, graph.canonical_etypes, content.target, content.widths)
        width = common_width(graph.ntypes, content.widths, config.model.hidden)
        build = partial(build_whole_relational_model, inputs=inputs, num_nodes=content.num_nodes)
    return seeded_model(config, build, width, content.num_classes, graph.device)


def _inputs(
    graph: dgl.DGLGraph, content: _Content, rows: Mapping[str, torch.Tensor | HostRows]
) -> dict[str, Any]:
    """What the model takes of this rank's nodes."""
    if content.target is None:
        return {"feat": rows[_NTYPE]}
    nodes = {ntype: graph.nodes[ntype].data[dgl.NID] for ntype in graph.ntypes}
    return {"feat": rows, dgl.NID: nodes}

"""Training on a whole graph, of which each rank has its part: every epoch is one step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping
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
from dgl_mgpu.distributed.exchange.strategies import AUTO, ExchangeStrategy
from dgl_mgpu.distributed.graph import PartitionedGraph, partition_graph
from dgl_mgpu.distributed.host_features import HostRows, are_for_host, offloaded_rows
from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.models.full_graph import build_model, build_whole_relational_model
from dgl_mgpu.models.heterogeneous import HeteroInputs, common_width
from dgl_mgpu.report import EpochReport, StageSeconds
from dgl_mgpu.train.objectives import MultiLabel, SingleLabel
from dgl_mgpu.train.optimizer import broadcast_from_first, sum_gradients
from dgl_mgpu.train.setup import load_dataset, ranks_of_this_machine, seeded_model
from dgl_mgpu.train.trainer import Progress, Trainer
from dgl_mgpu.utils.stages import WHOLE_GRAPH, StageTimes, stage
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
        features = dataset.node_features.get("feat")
        widths = {} if features is None else {NTYPE: features.shape[1]}
        return cls(dataset.num_classes, {NTYPE: dataset.num_nodes}, widths, None)


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
    rows = _scatter_features(config, graph, content, features)
    model, optimizer = _make_model(config, graph, content)
    data = graph.nodes[content.target or NTYPE].data
    return FullGraphTrainer(
        model,
        optimizer,
        graph,
        _inputs(graph, content, rows),
        data.pop("label"),
        {name: data.pop(mask) for name, mask in zip(SPLITS, _MASKS, strict=True)},
        target=content.target,
        eval_every=config.trainer.eval_every,
        precision=getattr(torch, config.trainer.precision),
    )


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
    return seeded_model(config, build, width, content.num_classes, graph.device)


def _inputs(
    graph: dgl.DGLGraph, content: _Content, rows: Mapping[str, torch.Tensor | HostRows]
) -> dict[str, Any]:
    """Inputs of the model, of this rank's nodes."""
    if content.target is None:
        return {"feat": rows[NTYPE]} if content.widths else {dgl.NID: graph.ndata[dgl.NID]}
    nodes = {ntype: graph.nodes[ntype].data[dgl.NID] for ntype in graph.ntypes}
    return {"feat": rows, dgl.NID: nodes}


class FullGraphTrainer(Trainer):
    """Trains a model on a partitioned graph, with the gradients of training on the whole graph.

    The loss is the mean over the training nodes of all ranks.  All ranks begin with the first one's
    parameters, and take the same steps.

    ``model`` is called with the graph and ``inputs``, and gives the logits of this rank's nodes, of
    type ``target`` where there are several.  ``graph`` is this rank's part
    (:func:`dgl_mgpu.partition_graph`), or the whole graph on a single rank.  ``inputs`` are
    features of this rank's nodes; in place of a tensor there may be `HostRows`, of which a model
    gets tensors unless it says of itself that it ``takes_host_rows``.  ``labels`` are int64, shape
    (num_nodes of this rank,), or, where a node may have several, int8 of shape (num_nodes of this
    rank, num_classes), as :class:`~dgl_mgpu.data.Dataset` has them.  ``masks``, bool and of shape
    (num_nodes of this rank,), say which nodes are ``"train"``, ``"valid"`` and ``"test"``. With
    another ``precision`` than float32 the model runs under autocast.

    Raises InvalidInputError if a part of the split is empty on all ranks together; and DGLError if
    a node has no in-edge and a convolution forbids that, on all ranks: one that raised in its first
    forward pass would leave the others waiting.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        graph: dgl.DGLGraph,
        inputs: Mapping[str, Any],
        labels: torch.Tensor,
        masks: Mapping[str, torch.Tensor],
        *,
        target: str | None = None,
        eval_every: int = 1,
        precision: torch.dtype = torch.float32,
    ) -> None:
        criterion = MultiLabel(labels.shape[1]) if labels.dim() == 2 else SingleLabel()
        super().__init__(model, optimizer, graph.device, eval_every, criterion)
        self._graph = graph
        self._precision = precision
        self._target = target
        self._inputs = inputs
        self._labels = labels
        self._nodes = {name: masks[name].nonzero().squeeze(1) for name in SPLITS}
        self._totals = self._count_nodes()
        self._check_in_degrees()
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        broadcast_from_first(model.state_dict().values())

    @property
    def steps_per_epoch(self) -> int:
        return 1

    def _run_epoch(self, number: int, validate: bool) -> Generator[Progress, None, EpochReport]:
        begin = time.perf_counter()
        with self._unbounded():
            loss, accuracy, stages = self._step()
        yield Progress(1, loss, accuracy, self._totals["train"])
        evaluate = time.perf_counter()
        with stage("evaluate"):
            accuracies = self.evaluate() if validate else {}
        end = time.perf_counter()
        return EpochReport(
            epoch=number,
            steps=1,
            seeds=len(self._nodes["train"]),
            loss=loss,
            train_accuracy=accuracy,
            valid_accuracy=accuracies.get("valid"),
            test_accuracy=accuracies.get("test"),
            seconds=StageSeconds(**stages, evaluate=end - evaluate, total=end - begin),
            tiers=(),
            ranks=1,
            metric_name=self.criterion.metric_name,
        )

    def _unbounded(self) -> contextlib.AbstractContextManager:
        """On CPUs a step of a large graph may take any time; it has no smaller stages."""
        is_slow = self._device.type == "cpu"
        return stage(WHOLE_GRAPH) if is_slow else contextlib.nullcontext()

    def _step(self) -> tuple[float, float, dict[str, float]]:
        """Change the model once; loss and accuracy before, and the seconds of each stage."""
        self.model.train()
        with StageTimes(self._device) as times:
            loss, accuracy = self._change_model()
        metrics = torch.stack([loss, accuracy]).tolist()
        return metrics[0], metrics[1], times.seconds()

    def _change_model(self) -> list[torch.Tensor]:
        """Loss and accuracy of all ranks, before the change."""
        nodes, total = self._nodes["train"], self._totals["train"]
        with stage("forward"):
            logits, labels = self._logits()[nodes], self._labels[nodes]
            # Also without a training node: others wait for this rank's part of the backward pass.
            loss = self.criterion.loss(logits, labels, "sum") / total
            accuracy = self.criterion.num_correct(logits.detach(), labels) / total
        self.optimizer.zero_grad()
        with stage("backward"):
            loss.backward()
        with stage("update"):
            metrics = sum_gradients(self._parameters, loss.detach(), accuracy.to(loss.dtype))
            self.optimizer.step()
        return metrics

    def _logits(self) -> torch.Tensor:
        """Outputs of the model for this rank's nodes."""
        with contextlib.ExitStack() as stack:
            inputs = self._inputs
            if not getattr(self.model, "takes_host_rows", False):
                inputs = stack.enter_context(offloaded_rows(inputs))
            if self._precision != torch.float32:
                stack.enter_context(torch.autocast(self._device.type, self._precision))
            rows = self.model(self._graph, inputs)
        return rows.float() if rows.dtype.itemsize < 4 else rows

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The metric of all ranks' validation and of their test nodes."""
        self.model.eval()
        with self._unbounded():
            logits = self._logits()
        nodes = {name: self._nodes[name] for name in SPLITS[1:]}
        return {
            name: self.criterion.score([(logits[ids], self._labels[ids])], self._device)
            for name, ids in nodes.items()
        }

    @torch.no_grad()
    def predict(self) -> torch.Tensor:
        self.model.eval()
        with self._unbounded():
            logits = self._logits().float()
        if isinstance(self._graph, PartitionedGraph):
            logits = self._graph.gather(logits, self._target)
        return logits.cpu()

    def _test(self) -> float:
        return self.evaluate()["test"]

    def _count_nodes(self) -> dict[str, int]:
        """Nodes of each part of the split, on all ranks together."""
        own = [len(self._nodes[name]) for name in SPLITS]
        counts = [sum(of_ranks) for of_ranks in zip(*self._ranks.all_gather(own), strict=True)]
        totals = dict(zip(SPLITS, counts, strict=True))
        for name, total in totals.items():
            if not total:
                raise InvalidInputError(
                    "train on a graph",
                    f"there are no {name} nodes",
                    "check the split of the data set",
                )
        return totals

    def _check_in_degrees(self) -> None:
        forbidding = next((m for m in self.model.modules() if _forbids_zero_in_degree(m)), None)
        if forbidding is None:
            return
        isolated = [
            int((self._graph.in_degrees(etype=etype) == 0).sum())
            for etype in self._graph.canonical_etypes
        ]
        total = sum(sum(of_rank) for of_rank in self._ranks.all_gather(isolated))
        if total:
            raise InvalidCallError(
                "train on a graph",
                f"{total} nodes have no in-edges, which {type(forbidding).__name__} does not allow",
                "add self-loops (dgl.add_self_loop, model.self_loops=true), or make it with"
                " allow_zero_in_degree=True",
            )


def _forbids_zero_in_degree(module: nn.Module) -> bool:
    return getattr(module, "_allow_zero_in_degree", None) is False

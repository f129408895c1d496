"""Training on a whole graph, of which each rank has its part: every epoch is one step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping
from typing import Any

import dgl
import torch
from torch import nn

from dgl_mgpu.data.checks import SPLITS
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.distributed.host_features import offloaded_rows
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.report import EpochReport, StageSeconds
from dgl_mgpu.train.objectives import MultiLabel, SingleLabel
from dgl_mgpu.train.optimizer import broadcast_from_first, sum_gradients
from dgl_mgpu.train.trainer import Progress, Trainer
from dgl_mgpu.utils.stages import WHOLE_GRAPH, StageTimes, stage


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
    (num_nodes of this rank,), say which nodes are ``"train"``, ``"valid"`` and ``"test"``.

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
    ) -> None:
        criterion = MultiLabel(labels.shape[1]) if labels.dim() == 2 else SingleLabel()
        super().__init__(model, optimizer, graph.device, eval_every, criterion)
        self._graph = graph
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
            # Also where a rank has no training node: others wait for its part of the backward pass.
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
        """What the model gives for this rank's nodes."""
        if getattr(self.model, "takes_host_rows", False):
            return self.model(self._graph, self._inputs)
        with offloaded_rows(self._inputs) as inputs:
            return self.model(self._graph, inputs)

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

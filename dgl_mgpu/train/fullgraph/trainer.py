"""Training on a whole graph, of which each rank has its part: every epoch is one step."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
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
from dgl_mgpu.train.objectives import Criterion, MultiLabel, SingleLabel
from dgl_mgpu.train.optimizer import broadcast_from_first, sum_gradients
from dgl_mgpu.train.trainer import Progress, Trainer
from dgl_mgpu.utils.stages import WHOLE_GRAPH, StageTimes, stage


class WholeGraphTrainer(Trainer):
    """Trains a model on a partitioned graph, with the gradients of training on the whole graph.

    The loss is over all ranks' examples.  All ranks begin with the first one's parameters, and take
    the same steps.

    ``model`` is called with the graph and ``inputs``, and gives rows of this rank's nodes.
    ``graph`` is this rank's part (:func:`dgl_mgpu.partition_graph`), or the whole graph on a single
    rank.  ``inputs`` are features of this rank's nodes; in place of a tensor there may be
    `HostRows`, of which a model gets tensors unless it says of itself that it ``takes_host_rows``.
    ``counts`` says how many examples this rank has of each part of the split.  With another
    ``precision`` than float32 the model runs under autocast.

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
        criterion: Criterion,
        counts: Mapping[str, int],
        *,
        eval_every: int = 1,
        precision: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(model, optimizer, graph.device, eval_every, criterion)
        self._graph = graph
        self._precision = precision
        self._inputs = inputs
        self._counts = counts
        self._totals = self._count_examples()
        #: By how many terms a sum of losses is divided.
        self._loss_terms = self._totals["train"]
        self._check_in_degrees()
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        broadcast_from_first(model.state_dict().values())

    @abstractmethod
    def _examples(self, rows: torch.Tensor, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs for this rank's examples of a part of the split, and their targets; collective.

        ``rows`` are those of this rank's nodes.
        """

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
            seeds=self._counts["train"],
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
        with stage("forward"):
            outputs, targets = self._examples(self._rows(), "train")
            # Also without an example: others wait for this rank's part of the backward pass.
            loss = self.criterion.loss(outputs, targets, "sum") / self._loss_terms
            correct = self.criterion.num_correct(outputs.detach(), targets)
            accuracy = correct / self._totals["train"]
        self.optimizer.zero_grad()
        with stage("backward"):
            loss.backward()
        with stage("update"):
            metrics = sum_gradients(self._parameters, loss.detach(), accuracy.to(loss.dtype))
            self.optimizer.step()
        return metrics

    def _rows(self) -> torch.Tensor:
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
        """The metric of all ranks' validation and of their test examples."""
        self.model.eval()
        with self._unbounded():
            rows = self._rows()
        return {
            name: self.criterion.score([self._examples(rows, name)], self._device)
            for name in SPLITS[1:]
        }

    @torch.no_grad()
    def predict(self) -> torch.Tensor:
        self.model.eval()
        with self._unbounded():
            rows = self._rows().float()
        if isinstance(self._graph, PartitionedGraph):
            rows = self._graph.gather(rows, self._predicted_type)
        return rows.cpu()

    @property
    def _predicted_type(self) -> str | None:
        """The type of nodes that the model's rows are of, None where there is one."""
        return None

    def _test(self) -> float:
        return self.evaluate()["test"]

    def _count_examples(self) -> dict[str, int]:
        """Of each part of the split, on all ranks together."""
        own = [self._counts[name] for name in SPLITS]
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


class FullGraphTrainer(WholeGraphTrainer):
    """Classifies nodes; the loss is the mean over the training nodes of all ranks.

    The model gives the logits of this rank's nodes, of type ``target`` where there are several.
    ``labels`` are int64, shape (num_nodes of this rank,), or, where a node may have several, int8
    of shape (num_nodes of this rank, num_classes), as :class:`~dgl_mgpu.data.Dataset` has them.
    ``masks``, bool and of shape (num_nodes of this rank,), say which nodes are ``"train"``,
    ``"valid"`` and ``"test"``.  Other arguments are those of `WholeGraphTrainer`.
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
        self._target = target
        self._labels = labels
        self._nodes = {name: masks[name].nonzero().squeeze(1) for name in SPLITS}
        criterion = MultiLabel(labels.shape[1]) if labels.dim() == 2 else SingleLabel()
        super().__init__(
            model, optimizer, graph, inputs, criterion,
            {name: len(nodes) for name, nodes in self._nodes.items()},
            eval_every=eval_every, precision=precision,
        )  # fmt: skip

    def _examples(self, rows: torch.Tensor, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        nodes = self._nodes[split]
        return rows[nodes], self._labels[nodes]

    @property
    def _predicted_type(self) -> str | None:
        return self._target


def _forbids_zero_in_degree(module: nn.Module) -> bool:
    return getattr(module, "_allow_zero_in_degree", None) is False

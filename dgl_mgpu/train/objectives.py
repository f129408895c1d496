"""Objectives: outputs of a model for seeds, their loss and metric, and sums over steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import dgl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from dgl_mgpu.report import ACCURACY, ROC_AUC

#: Outputs of a model and their targets, by mini-batch.
Predictions = Iterable[tuple[torch.Tensor, torch.Tensor]]
#: Scores that are ranked at a time, at some 60 bytes each.
_SCORES_AT_ONCE = 1 << 24


class Criterion(ABC):
    """Loss and metric of a model's outputs for seeds, given their targets."""

    #: The metric's name in reports.
    metric_name: ClassVar[str]

    @abstractmethod
    def loss(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> torch.Tensor:
        """Mean or sum over the seeds, shape ()."""

    @abstractmethod
    def num_correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Number of seeds predicted correctly, shape (); the host does not wait."""

    @abstractmethod
    def predictions(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Predictions for each node from a model's outputs, by name."""

    def score(self, predictions: Predictions, device: torch.device) -> float:
        """The metric of all ranks' seeds, of which each brings its own; collective."""
        counts = torch.zeros(2, dtype=torch.float64, device=device)
        for outputs, targets in predictions:
            counts[0] += self.num_correct(outputs, targets)
            counts[1] += len(targets)
        if dist.is_initialized():
            dist.all_reduce(counts)
        correct, total = counts.tolist()
        return correct / total


class SingleLabel(Criterion):
    """One class of each node, by cross entropy: logits, shape (nodes, classes); labels, int64."""

    metric_name = ACCURACY

    def loss(
        self, logits: torch.Tensor, labels: torch.Tensor, reduction: Literal["mean", "sum"] = "mean"
    ) -> torch.Tensor:
        return functional.cross_entropy(logits, labels, reduction=reduction)

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (logits.argmax(1) == labels).sum()

    def predictions(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"classes": logits.argmax(1), "logits": logits}


class MultiLabel(Criterion):
    """Several labels of each node, by binary cross entropy.

    Logits and int8 of 1, 0 and -1, which is unknown, of shape (nodes, labels).  A node's loss is
    the mean over its known labels.  The metric is the area under the ROC curve of each label that
    some nodes have and others have not, the mean over these labels, as ogbn-proteins is judged.
    Hu et al., «Open Graph Benchmark: Datasets for Machine Learning on Graphs», 2020, section 4.
    """

    metric_name = ROC_AUC

    def __init__(self, num_labels: int) -> None:
        self._num_labels = num_labels

    def loss(
        self, logits: torch.Tensor, labels: torch.Tensor, reduction: Literal["mean", "sum"] = "mean"
    ) -> torch.Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        is_known = (labels >= 0).to(dtype)
        total = functional.binary_cross_entropy_with_logits(
            logits.to(dtype),
            labels.clamp(min=0).to(dtype),
            is_known / is_known.sum(1, keepdim=True).clamp_(min=1),
            reduction="sum",
        )
        return total / len(labels) if reduction == "mean" else total

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The metric of these nodes times their number: its mean over batches is an estimate."""
        return mean_area(logits, labels) * len(labels)

    def predictions(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Labels with a probability above one half, as int8 of 1 and 0."""
        return {"labels": (logits > 0).to(torch.int8), "logits": logits}

    def score(self, predictions: Predictions, device: torch.device) -> float:
        return areas_of_all_ranks(predictions, self._num_labels, device)


class Objective(ABC):
    """Outputs and targets of the seeds of a mini-batch, whose last item is its blocks."""

    #: Whether a step that learns it can be captured as a CUDA graph.
    can_be_captured: ClassVar[bool] = False

    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Sequence[Any]) -> torch.Tensor:
        """Outputs of the model for each seed, shape (seeds, …)."""

    @abstractmethod
    def targets(self, batch: Sequence[Any]) -> torch.Tensor:
        """Targets of each seed, shape (seeds, …)."""


class NodeClassification(Objective):
    """Classes of nodes of type ``target``, which have ``"label"``."""

    can_be_captured = True

    def __init__(self, target: str, criterion: Criterion) -> None:
        super().__init__(criterion)
        self._target = target

    def outputs(self, model: nn.Module, batch: Sequence[Any]) -> torch.Tensor:
        return model_rows(model, batch[-1])

    def targets(self, batch: Sequence[Any]) -> torch.Tensor:
        return batch[-1][-1].dstnodes[self._target].data["label"]


def model_rows(model: nn.Module, blocks: Sequence[dgl.DGLGraph]) -> torch.Tensor:
    """Outputs of a model for the destination nodes of the last block."""
    data = blocks[0].srcdata
    # Iterating over all data would fetch features that the model does not read.
    inputs: Any = getattr(model, "module", model).inputs
    return model(blocks, {name: data[name] for name in (dgl.NID, *inputs) if name in data})


class MetricAccumulator:
    """Loss and number of correct predictions of the steps added so far."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.steps = self.seeds = 0
        self._latest = 0.0, 0.0, 0
        # The seeds of sums on their way to the host, and the event after which they are there.
        on_gpu = device.type == "cuda"
        self._on_host = torch.empty(2, dtype=torch.float64, pin_memory=True) if on_gpu else None
        self._pending: tuple[int, torch.cuda.Event] | None = None

    def add(self, mean: torch.Tensor, num_correct: torch.Tensor, seeds: int) -> None:
        """Add a step.

        ``mean`` (Tensor, shape ()): of the seeds' losses. ``num_correct`` (Tensor, shape ()):
        number of seeds predicted correctly.
        """
        self._sums += torch.stack([mean.detach().double() * seeds, num_correct.double()])
        self.seeds += seeds
        self.steps += 1

    def sums(self) -> tuple[float, float, int]:
        """Loss, correct predictions and seeds so far; waits for the GPU."""
        loss, num_correct = self._sums.tolist()
        return loss, num_correct, self.seeds

    def latest(self) -> tuple[float, float]:
        """Mean loss and accuracy; on a GPU as they were some steps ago, and at first NaN."""
        if self._on_host is None:
            self._latest = self.sums()
        elif self._pending is None:
            self._on_host.copy_(self._sums, non_blocking=True)
            stream = torch.cuda.current_stream(self._sums.device)
            self._pending = self.seeds, stream.record_event()
        elif self._pending[1].query():
            loss, num_correct = self._on_host.tolist()
            self._latest = loss, num_correct, self._pending[0]
            self._pending = None
        loss, num_correct, seeds = self._latest
        return (loss / seeds, num_correct / seeds) if seeds else (float("nan"), float("nan"))


def mean_area(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean of the areas of labels that have one; a half where none has.

    float64, shape (), on the device, without waiting for it; NaN if a score of such a label is.
    ``scores`` and ``targets`` are those of `areas`.
    """
    areas_, has_area = areas(scores, targets)
    count = has_area.sum()
    mean = areas_.masked_fill(~has_area, 0).sum() / count.clamp(min=1)
    return mean.masked_fill(count == 0, 0.5)


def areas(scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The area under each label's ROC curve: how often one that has it scores above one without.

    Equal scores count a half: Mann and Whitney, «On a test of whether one of two random variables
    is stochastically larger than the other», 1947. ``scores``: Tensor, floating, shape (nodes,
    labels). ``targets`` (Tensor, integer, shape (nodes, labels)): 1 and 0; what is below is not
    known, and left aside. ``areas`` (Tensor, float64, shape (labels,)): anything where there is
    none, and NaN of scores that are NaN. ``has_area`` (Tensor, bool, shape (labels,)): whether some
    nodes have the label and others have it not.
    """
    is_known, is_positive = targets >= 0, targets == 1
    known, positives = is_known.sum(0), is_positive.sum(0)
    negatives = known - positives
    # Unknown labels sort last, so that the ranks of others do not change.
    scores = scores.float().masked_fill(~is_known, torch.inf).T.contiguous()
    ordered, order = scores.sort(1)
    # Looked up in sorted order, for the cache.
    below = torch.searchsorted(ordered, ordered)
    not_above = torch.searchsorted(ordered, ordered, right=True).minimum(known[:, None])
    # Twice the mean rank of equal scores, counted from 1.
    ranks = ((below + not_above + 1) * is_positive.T.gather(1, order)).sum(1)
    wins = (ranks - positives * (positives + 1)).double() / 2
    # NaNs sort last, and compare to nothing.
    wins = wins.masked_fill(ordered[:, -1:].isnan().any(1), torch.nan)
    pairs = positives.double() * negatives
    return wins / pairs, pairs > 0


def areas_of_all_ranks(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]], num_labels: int, device: torch.device
) -> float:
    """The mean area, as `mean_area`, over the nodes of all ranks; collective.

    ``parts`` are this rank's, none or several; they are compared on ``device`` once all are there.
    """
    own_scores = [torch.empty(0, num_labels, device=device)]
    own_targets = [torch.empty(0, num_labels, dtype=torch.int8, device=device)]
    for scores, targets in parts:
        own_scores.append(scores.to(device, torch.float32))
        own_targets.append(targets.to(device, torch.int8))
    own = torch.cat(own_scores), torch.cat(own_targets)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for scores, targets in _gather_by_label(*own):
        areas_, has_area = areas(scores, targets)
        total += torch.stack([areas_.masked_fill(~has_area, 0).sum(), has_area.sum()])
    summed, count = total.tolist()
    return summed / count if count else 0.5


def _gather_by_label(
    scores: torch.Tensor, targets: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """All ranks' nodes, some labels at a time."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    most = torch.tensor(len(scores), device=scores.device)
    if num_ranks > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    rows = int(most)
    step = max(1, _SCORES_AT_ONCE // max(1, rows * num_ranks))
    for first in range(0, scores.shape[1], step):
        both = scores[:, first : first + step], targets[:, first : first + step]
        if num_ranks == 1:
            yield both
            continue
        width = both[0].shape[1]
        # Ranks send equally many rows: padding has unknown labels.
        padded = scores.new_zeros(rows, width), targets.new_full((rows, width), -1)
        gathered = []
        for own, room in zip(both, padded, strict=True):
            room[: len(own)] = own
            of_all = room.new_empty(num_ranks, rows, width)
            dist.all_gather(list(of_all), room)
            gathered.append(of_all.flatten(0, 1))
        yield gathered[0], gathered[1]

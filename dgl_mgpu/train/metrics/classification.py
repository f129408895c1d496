"""What is learned of nodes' labels: the loss of a model's rows, and their metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch.nn import functional

from dgl_mgpu.report import ACCURACY, ROC_AUC
from dgl_mgpu.train.metrics.roc_auc import areas_of_all_ranks, mean_area

#: Rows that a model gives, and what is true of them.
Predictions = Iterable[tuple[torch.Tensor, torch.Tensor]]


class Classification(ABC):
    """How the rows that a model gives for nodes are compared with their labels."""

    #: What `num_correct` is a share of.
    figure: ClassVar[str]

    @abstractmethod
    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> torch.Tensor:
        """Mean or sum over the nodes, shape ()."""

    @abstractmethod
    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Number of nodes predicted correctly, shape (); the host does not wait."""

    @abstractmethod
    def predictions(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """What logits say of each node, by a name for it, and the logits."""

    def score(self, predictions: Predictions, device: torch.device) -> float:
        """The figure of all ranks' nodes, of which each brings its own; collective."""
        return share_correct(self.num_correct, predictions, device)


class SingleLabel(Classification):
    """The one class of each node, by cross entropy: logits, shape (nodes, classes), and int64."""

    figure = ACCURACY

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> torch.Tensor:
        return functional.cross_entropy(logits, labels, reduction=reduction)

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (logits.argmax(1) == labels).sum()

    def predictions(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"classes": logits.argmax(1), "logits": logits}


class MultiLabel(Classification):
    """Which labels each node has, by binary cross entropy.

    Logits and int8 of 1, 0 and -1, which is unknown, of shape (nodes, labels).  A node's loss is
    the mean over its known labels.  The figure is the area under the ROC curve of each label that
    some nodes have and others have not, the mean over these labels, as ogbn-proteins is judged.
    Hu et al., «Open Graph Benchmark: Datasets for Machine Learning on Graphs», 2020, section 4.
    """

    figure = ROC_AUC

    def __init__(self, num_labels: int) -> None:
        self._num_labels = num_labels

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        reduction: Literal["mean", "sum"] = "mean",
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
        """The figure of these nodes alone, times as many: its mean over batches is an estimate."""
        return mean_area(logits, labels) * len(labels)

    def predictions(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """The labels that a node rather has than not, as int8 of 1 and 0."""
        return {"labels": (logits > 0).to(torch.int8), "logits": logits}

    def score(self, predictions: Predictions, device: torch.device) -> float:
        return areas_of_all_ranks(predictions, self._num_labels, device)


def share_correct(
    num_correct: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    predictions: Predictions,
    device: torch.device,
) -> float:
    """Of all ranks' answers, counted by ``num_correct``; collective."""
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for outputs, targets in predictions:
        counts[0] += num_correct(outputs, targets)
        counts[1] += len(targets)
    if dist.is_initialized():
        dist.all_reduce(counts)
    correct, total = counts.tolist()
    return correct / total

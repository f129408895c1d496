"""What a model learns of mini-batches: its outputs for their seeds, and their metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import dgl
import torch
from torch import nn
from torch.nn import functional

from dgl_mgpu.report import AUC
from dgl_mgpu.train.metrics.classification import Classification, Predictions, share_correct


class Objective(ABC):
    """What is asked of a model for the seeds of a mini-batch, which ends with its blocks."""

    #: Whether a step that learns it can be captured as a CUDA graph.
    can_be_captured: ClassVar[bool] = False

    @property
    @abstractmethod
    def figure(self) -> str:
        """Name of the metric."""

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Sequence[Any]) -> torch.Tensor:
        """What the model says of each seed, shape (seeds, …)."""

    @abstractmethod
    def targets(self, batch: Sequence[Any]) -> torch.Tensor:
        """What is true of each seed, shape (seeds, …)."""

    @abstractmethod
    def mean_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean over the seeds, shape ()."""

    @abstractmethod
    def num_correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Number of seeds predicted correctly, shape (); the host does not wait."""

    @abstractmethod
    def predictions(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model's rows for nodes say of each, by a name for it."""

    def score(self, predictions: Predictions, device: torch.device) -> float:
        """The figure of outputs and truths of all ranks' seeds; collective."""
        return share_correct(self.num_correct, predictions, device)


class NodeClassification(Objective):
    """Classes of nodes.

    ``target``: the type of the seeds, which have ``"label"``. ``classification``: of these labels.
    """

    can_be_captured = True

    def __init__(self, target: str, classification: Classification) -> None:
        self._target = target
        self._classification = classification

    @property
    def figure(self) -> str:
        return self._classification.figure

    def outputs(self, model: nn.Module, batch: Sequence[Any]) -> torch.Tensor:
        return _rows(model, batch[-1])

    def targets(self, batch: Sequence[Any]) -> torch.Tensor:
        return batch[-1][-1].dstnodes[self._target].data["label"]

    def mean_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._classification.loss(outputs, targets)

    def num_correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._classification.num_correct(outputs, targets)

    def predictions(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._classification.predictions(rows)

    def score(self, predictions: Predictions, device: torch.device) -> float:
        return self._classification.score(predictions, device)


class LinkPrediction(Objective):
    """Edges, told from pairs that are none by the product of their ends' rows.

    A batch is what ``dgl.dataloading.as_edge_prediction_sampler`` gives: input nodes, the graph of
    the edges, that of the other pairs, as many for each edge and of its source, and blocks.  Edges
    and other pairs count alike in the loss, a binary cross entropy.  An edge is right by the share
    of its other pairs that score lower, of equal scores a half: the mean over edges estimates that
    of the areas under the ROC curves of their sources' pairs.
    """

    @property
    def figure(self) -> str:
        return AUC

    def outputs(self, model: nn.Module, batch: Sequence[Any]) -> torch.Tensor:
        """Scores, of each edge and then of its other pairs, float32, shape (edges, 1 + others)."""
        _, edges, others, blocks = batch
        # Products of 16-bit numbers are often equal.
        rows = _rows(model, blocks).float()
        scores = [_products(pairs, rows).view(edges.num_edges(), -1) for pairs in (edges, others)]
        return torch.cat(scores, 1)

    def targets(self, batch: Sequence[Any]) -> torch.Tensor:
        """Which of these pairs are edges: the first ones, float32, of the same shape."""
        _, edges, others, _ = batch
        count = edges.num_edges()
        width = 1 + others.num_edges() // count
        first = torch.arange(width, device=edges.device) == 0
        return first.float().expand(count, width)

    def mean_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, targets)

    def num_correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        edges, others = outputs[:, :1], outputs[:, 1:]
        return ((edges > others).double() + 0.5 * (edges == others)).mean(1).sum()

    def predictions(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Embeddings, of which the product of two is the score of a pair."""
        return {"embeddings": rows}


def _rows(model: nn.Module, blocks: Sequence[dgl.DGLGraph]) -> torch.Tensor:
    """What a model gives for the nodes that blocks end with."""
    data = blocks[0].srcdata
    # All that there is would be fetched to be looked at.
    inputs: Any = getattr(model, "module", model).inputs
    return model(blocks, {name: data[name] for name in (dgl.NID, *inputs) if name in data})


def _products(pairs: dgl.DGLGraph, rows: torch.Tensor) -> torch.Tensor:
    """Of the rows at the ends of each pair, shape (pairs,)."""
    sources, destinations = pairs.edges()
    return (rows[sources.long()] * rows[destinations.long()]).sum(1)

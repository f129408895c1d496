"""Forward and backward pass of a model over a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from dgl.heterograph import DGLBlock
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Blocks = Sequence[DGLBlock]


class Pass(nn.Module):
    """The computation of a training step, as a module with the model's parameters."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Blocks], torch.Tensor],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        labels: Callable[[Blocks], torch.Tensor],
    ) -> None:
        super().__init__()
        self.model = model
        # In a tuple: modules among them must not be registered.
        self._functions = forward, loss, labels

    def forward(
        self, blocks: Blocks, seeds: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss, outputs and labels of the first ``seeds`` seeds, by default of all."""
        forward, loss, labels = self._functions
        outputs, classes = forward(blocks)[:seeds], labels(blocks)[:seeds]
        return loss(outputs, classes), outputs.detach(), classes.detach()


def normalised_batch(model: nn.Module) -> str | None:
    """The name of a batch normalisation module, if there is one."""
    names = (name for name, each in model.named_modules() if isinstance(each, _BatchNorm))
    return next(names, None)

"""Forward and backward pass of a model over a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from dgl.heterograph import DGLBlock
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Blocks = Sequence[DGLBlock]


class Pass(nn.Module):
    """What is computed of a mini-batch, as a module that has the model's parameters."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Blocks], torch.Tensor],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        labels: Callable[[Blocks], torch.Tensor],
    ) -> None:
        super().__init__()
        self.model = model
        # Together, or those that are modules would be registered.
        self._functions = forward, loss, labels

    def forward(
        self, blocks: Blocks, seeds: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss, outputs and labels for the seeds; of how many says ``seeds``, if not of all."""
        forward, loss, labels = self._functions
        outputs, classes = forward(blocks)[:seeds], labels(blocks)[:seeds]
        return loss(outputs, classes), outputs.detach(), classes.detach()


def normalised_batch(model: nn.Module) -> str | None:
    """The name of a module that normalises rows by all of a mini-batch, if there is one."""
    names = (name for name, each in model.named_modules() if isinstance(each, _BatchNorm))
    return next(names, None)

"""The reversible layer's checkpoint (Li et al., 2021, arXiv:2106.07476) on untyped storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class InvertibleCheckpoint(torch.autograd.Function):
    """Frees the input features in forward and rebuilds them from the output in backward.

    The arguments of `forward` are those of DGL's class of this name: a function of
    ``(graph, features, *args)``, its inverse, how many inputs follow, then the inputs and the
    function's parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, fn: Callable, fn_inverse: Callable, num_inputs: int, *inputs_and_weights: Any
    ) -> torch.Tensor:
        inputs = inputs_and_weights[:num_inputs]
        ctx.fn, ctx.fn_inverse = fn, fn_inverse
        ctx.weights = inputs_and_weights[num_inputs:]
        with torch.no_grad():
            outputs = fn(*(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs))
            outputs = outputs.detach_()
        features = inputs[1]
        ctx.num_bytes = features.untyped_storage().nbytes()
        features.untyped_storage().resize_(0)
        # Not save_for_backward: both storages are resized on purpose.
        ctx.inputs, ctx.outputs = inputs, outputs
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("GroupRevRes works with Tensor.backward() only, not autograd.grad()")
        if ctx.inputs is None:
            raise RuntimeError("GroupRevRes frees its input: it runs backward only once")
        (graph, features, *rest), outputs = ctx.inputs, ctx.outputs
        ctx.inputs = ctx.outputs = None
        with torch.no_grad():
            rebuilt = ctx.fn_inverse(graph, outputs, *rest)
            outputs.untyped_storage().resize_(0)
            features.untyped_storage().resize_(ctx.num_bytes)
            # Through .data: the same values come back, so what saved them has not been changed.
            features.data.copy_(rebuilt)

        inputs = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in (graph, features, *rest)
        ]
        wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        with torch.enable_grad():
            recomputed = ctx.fn(*inputs)
        gradients = iter(torch.autograd.grad(recomputed, [*wanted, *ctx.weights], grad_outputs))
        of_inputs = [next(gradients) if any(x is w for w in wanted) else None for x in inputs]
        return (None, None, None, *of_inputs, *gradients)

"""Gradients without a second derivative, which raise an error when one is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError


def is_transformed() -> bool:
    """Whether operators are not just run and recorded for a backward pass: torch compiles them, or
    derives forward or with functorch."""
    return (
        torch.compiler.is_compiling()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiable_once(what: str, fix: str) -> Callable[[Backward], Backward]:
    """Make the backward pass of a ``torch.autograd.Function`` refuse second derivatives.

    torch's ``once_differentiable`` only does so if autograd reaches its error: its graph leads to
    no tensor that gradients depend on, so ``torch.autograd.grad`` of these bypasses it and silently
    leaves this part out of a second derivative.
    Here gradients depend on the arguments of ``backward`` and on its saved tensors.  The error
    message says that ``what`` cannot be differentiated twice, and the ``fix``.
    """

    def decorated(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                results = backward(ctx, *gradients)
            places = [place for place, tensor in enumerate(results) if tensor is not None]
            if not torch.is_grad_enabled() or not places:  # no second derivative can follow
                return results
            tensors = (*gradients, *ctx.saved_tensors)
            read = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
            guarded = list(results)
            outputs = _Once.apply((what, fix), len(places), *(results[p] for p in places), *read)
            for place, tensor in zip(places, outputs, strict=True):
                guarded[place] = tensor
            return tuple(guarded)

        return once

    return decorated


class _Once(torch.autograd.Function):
    """Return the first tensors unchanged, but make them depend on all of them."""

    @staticmethod
    def forward(
        ctx: Any, about: tuple[str, str], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.about = about
        # Autograd allows no in-place change of a view that is made here.
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        what, fix = ctx.about
        raise InvalidInputError(
            f"differentiate {what} twice", "it has no second derivative here", fix
        )

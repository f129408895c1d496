"""Gradients that have no gradient themselves: whoever asks for one is told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dgl_mgpu.errors import InvalidInputError

Backward = Callable[..., tuple[torch.Tensor | None, ...]]


def differentiable_once(what: str, fix: str) -> Callable[[Backward], Backward]:
    """Have a backward pass of a ``torch.autograd.Function`` refuse second derivatives.

    torch's ``once_differentiable`` does so where its error is come by: its graph leads to no tensor
    that gradients depend on, so that ``torch.autograd.grad`` of these goes past it, and of a second
    derivative this part is missing without a word.

    Parameters
    ----------
    what : str
        What was to be differentiated.
    fix : str

    Returns
    -------
    callable
        Decorates ``backward``.  Gradients depend on what it was given and has saved.
    """

    def decorated(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            with torch.no_grad():
                found = backward(ctx, *gradients)
            if not torch.is_grad_enabled():  # nobody will ask
                return found
            read = [each for each in (*gradients, *ctx.saved_tensors) if each.requires_grad]
            places = [place for place, each in enumerate(found) if each is not None]
            guarded = list(found)
            made = _Once.apply((what, fix), len(places), *(found[p] for p in places), *read)
            for place, each in zip(places, made, strict=True):
                guarded[place] = each
            return tuple(guarded)

        return once

    return decorated


class _Once(torch.autograd.Function):
    """Some tensors as they are, and others that they are said to depend on."""

    @staticmethod
    def forward(
        ctx: Any, about: tuple[str, str], count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.about = about
        # Of a view that is made here autograd allows no change in place.
        return tuple(each.detach() for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        what, fix = ctx.about
        raise InvalidInputError(
            f"differentiate {what} twice", "it has no second derivative here", fix
        )

"""Products of a sparse matrix with dense ones, differentiable any number of times.

The gradient of either function is made of the other: of ``C = A @ X``, that of the non-zeros of
``A`` is ``dC @ X.T`` at their places, and that of ``X`` is ``A.T @ dC``.
"""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.graph.sparse import operators
from dgl_mgpu.graph.sparse.pattern import SparsityPattern


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pattern: SparsityPattern, value: torch.Tensor, dense: torch.Tensor
    ) -> torch.Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(
            value if ctx.needs_input_grad[2] else None, dense if ctx.needs_input_grad[1] else None
        )
        return operators.multiply(pattern, value, dense)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, dense = ctx.saved_tensors
        return (
            None,
            dot(ctx.pattern, grad, dense) if ctx.needs_input_grad[1] else None,
            multiply(ctx.pattern.transpose(), value, grad) if ctx.needs_input_grad[2] else None,
        )


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pattern: SparsityPattern, lhs: torch.Tensor, rhs: torch.Tensor
    ) -> torch.Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(
            lhs if ctx.needs_input_grad[2] else None, rhs if ctx.needs_input_grad[1] else None
        )
        return operators.dot(pattern, lhs, rhs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        lhs, rhs = ctx.saved_tensors
        return (
            None,
            multiply(ctx.pattern, grad, rhs) if ctx.needs_input_grad[1] else None,
            multiply(ctx.pattern.transpose(), grad, lhs) if ctx.needs_input_grad[2] else None,
        )


def multiply(pattern: SparsityPattern, value: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """`operators.multiply` with gradients."""
    return _Multiply.apply(pattern, value, dense)


def dot(pattern: SparsityPattern, lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """`operators.dot` with gradients."""
    return _Dot.apply(pattern, lhs, rhs)

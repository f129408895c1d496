"""Softmax over the non-zeros of rows or columns."""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.sparse import operators
from dgl_mgpu.graph.sparse.check import check_dim
from dgl_mgpu.graph.sparse.matrix import SparseMatrix
from dgl_mgpu.graph.sparse.pattern import SparsityPattern
from dgl_mgpu.graph.sparse.reduction import OfRows, RowSums


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pattern: SparsityPattern, value: torch.Tensor) -> torch.Tensor:
        ctx.pattern = pattern
        out = operators.softmax(pattern, value)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (out,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, operators.softmax_backward(ctx.pattern, out, grad)
        # The gradient is to be differentiated itself.
        part = out * grad
        return None, part - out * OfRows.apply(ctx.pattern, RowSums.apply(ctx.pattern, part))


def softmax(mat: SparseMatrix, dim: int) -> SparseMatrix:
    """Softmax over the non-zeros of each column (``dim=0``) or row (``dim=1``).

    Raises
    ------
    InvalidInputError
        If values are not floating-point numbers, or there is no such dimension.
    """
    asked = "take the softmax of a sparse matrix"
    check_dim(asked, dim)
    value = mat.val()
    if not value.is_floating_point():
        raise InvalidInputError(
            asked, f"the values have dtype {value.dtype}", "convert with float()"
        )
    pattern = mat.pattern if dim == 1 else mat.pattern.transpose()
    return SparseMatrix(mat.pattern, _Softmax.apply(pattern, value))

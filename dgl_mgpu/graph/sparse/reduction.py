"""Sums, means, products, minima and maxima of the non-zeros of rows, columns or the matrix."""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.sparse import operators
from dgl_mgpu.graph.sparse.check import check_dim
from dgl_mgpu.graph.sparse.matrix import SparseMatrix
from dgl_mgpu.graph.sparse.pattern import SparsityPattern

# What torch calls the reductions of dgl.sparse.
_REDUCTIONS = {"sum": "sum", "smin": "amin", "smax": "amax", "smean": "mean", "sprod": "prod"}


def reduce(mat: SparseMatrix, rtype: str, dim: int | None = None) -> torch.Tensor:
    """Reduce the non-zeros of each column (``dim=0``) or row (``dim=1``), or all.

    Returns
    -------
    Tensor, shape (shape[1 - dim], ...) or (...,), where values have shape (nnz, ...)
        0 where there is nothing to reduce.  Where several are the largest or smallest, gradients
        are shared equally.

    Raises
    ------
    InvalidInputError
        If there is no such reduction or dimension, or integers are averaged over all.
    """
    asked = "reduce a sparse matrix"
    if rtype not in _REDUCTIONS:
        raise InvalidInputError(
            asked, f"there is no rtype={rtype!r}", f"pass one of {', '.join(_REDUCTIONS)}"
        )
    name = _REDUCTIONS[rtype]
    value = mat.val()
    if dim is None:
        return _reduce_all(asked, value, name)
    check_dim(asked, dim)
    pattern = mat.pattern if dim == 1 else mat.pattern.transpose()
    if name == "sum" and value.is_floating_point():
        return RowSums.apply(pattern, value)
    if name == "mean" and value.is_floating_point():
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return (RowSums.apply(pattern, wide) / _counts(pattern, wide)).to(value.dtype)
    row = pattern.row.view(-1, *[1] * (value.dim() - 1)).expand_as(value)
    zeros = value.new_zeros(pattern.shape[0], *value.shape[1:])
    return zeros.scatter_reduce(0, row, value, name, include_self=False)


class RowSums(torch.autograd.Function):
    """Sums of the non-zeros of each row, differentiable any number of times.

    Values are floating-point numbers, of shape (nnz, ...); sums have the shape (rows, ...).
    """

    @staticmethod
    def forward(ctx: Any, pattern: SparsityPattern, value: torch.Tensor) -> torch.Tensor:
        ctx.pattern = pattern
        return operators.row_sums(pattern, value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, OfRows.apply(ctx.pattern, grad)


class OfRows(torch.autograd.Function):
    """For each non-zero what there is of its row: the transpose of `RowSums`.

    Torch's own indexing would add up gradients of 16 bits in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, pattern: SparsityPattern, rows: torch.Tensor) -> torch.Tensor:
        ctx.pattern = pattern
        return rows[pattern.row]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, RowSums.apply(ctx.pattern, grad.contiguous())


def _counts(pattern: SparsityPattern, value: torch.Tensor) -> torch.Tensor:
    """How many non-zeros each row has, at least 1: to divide what has the shape of row sums."""
    counts = pattern.relation.csr().indptr.diff().clamp(min=1).to(value.dtype)
    return counts.view(-1, *[1] * (value.dim() - 1))


def _reduce_all(asked: str, value: torch.Tensor, name: str) -> torch.Tensor:
    if value.shape[0] == 0:
        # Sums and products of integers are of 64 bits, also of none.
        nothing = value.sum(0)
        return nothing if name in ("sum", "prod") else nothing.to(value.dtype)
    if name == "mean" and not value.is_floating_point():
        raise InvalidInputError(
            asked, f"the values have dtype {value.dtype}, which has no mean", "convert with float()"
        )
    return getattr(value, name)(0)


def sum(mat: SparseMatrix, dim: int | None = None) -> torch.Tensor:
    return reduce(mat, "sum", dim)


def smean(mat: SparseMatrix, dim: int | None = None) -> torch.Tensor:
    return reduce(mat, "smean", dim)


def smin(mat: SparseMatrix, dim: int | None = None) -> torch.Tensor:
    return reduce(mat, "smin", dim)


def smax(mat: SparseMatrix, dim: int | None = None) -> torch.Tensor:
    return reduce(mat, "smax", dim)


def sprod(mat: SparseMatrix, dim: int | None = None) -> torch.Tensor:
    return reduce(mat, "sprod", dim)

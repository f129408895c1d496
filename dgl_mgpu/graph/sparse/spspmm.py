"""Sparse matrix times sparse matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.relation import ranges
from dgl_mgpu.graph.sparse.check import check_places, check_same
from dgl_mgpu.graph.sparse.matrix import SparseMatrix
from dgl_mgpu.graph.sparse.pattern import SparsityPattern
from dgl_mgpu.graph.sparse.reduction import OfRows
from dgl_mgpu.graph.sparse.selection import wide

# How many products of two non-zeros are in memory at a time, at about 50 bytes each; more where
# one row has more.
PRODUCTS = 2**24


class _Products(NamedTuple):
    """Products of a non-zero of ``lhs`` and one of ``rhs``.

    Parameters
    ----------
    lhs, rhs : Tensor, int64
        Which non-zeros.
    keys : Tensor, int64
        `SparsityPattern.keys` of their places in the result.
    """

    lhs: torch.Tensor
    rhs: torch.Tensor
    keys: torch.Tensor


def spspmm(lhs: SparseMatrix, rhs: SparseMatrix) -> SparseMatrix:
    """``lhs @ rhs``, differentiable in the values of both.

    Non-zero wherever a product of non-zeros falls, also where their sum is 0; sorted, except that
    a square diagonal matrix leaves the non-zeros of the other where they are.

    Raises
    ------
    InvalidInputError
        If shapes, dtypes or devices do not fit together, values are vectors, or there are
        duplicates.
    """
    asked = "multiply two sparse matrices"
    if lhs.shape()[1] != rhs.shape()[0]:
        raise InvalidInputError(
            asked,
            f"their shapes are {lhs.shape()} and {rhs.shape()}",
            "pass a second matrix with as many rows as the first has columns",
        )
    if lhs.val().dim() != 1 or rhs.val().dim() != 1:
        raise InvalidInputError(
            asked,
            f"their values have the shapes {tuple(lhs.val().shape)} and {tuple(rhs.val().shape)}",
            "pass matrices with scalar values",
        )
    check_same(asked, lhs=lhs.val(), rhs=rhs.val())
    shape = lhs.shape()[0], rhs.shape()[1]
    if lhs.is_diag() and rhs.is_diag():
        common = min(lhs.nnz(), rhs.nnz())
        diagonal = lhs.val()[:common] * rhs.val()[:common]
        diagonal = torch.nn.functional.pad(diagonal, (0, min(shape) - common))
        return SparseMatrix(SparsityPattern.from_diag(shape, lhs.device()), diagonal)
    if lhs.is_diag() and _is_square(lhs):
        return SparseMatrix(rhs.pattern, OfRows.apply(rhs.pattern, lhs.val()) * rhs.val())
    if rhs.is_diag() and _is_square(rhs):
        of_columns = OfRows.apply(lhs.pattern.transpose(), rhs.val())
        return SparseMatrix(lhs.pattern, lhs.val() * of_columns)
    if lhs.has_duplicate() or rhs.has_duplicate():
        raise InvalidInputError(
            asked,
            "one of them has several non-zeros at one place",
            "call coalesce() on the matrix that has them",
        )
    check_places(asked, shape)
    keys, value = multiply(lhs.pattern, rhs.pattern, lhs.val(), rhs.val())
    return SparseMatrix(SparsityPattern.from_keys(keys, shape), value)


def multiply(
    lhs: SparsityPattern, rhs: SparsityPattern, lhs_value: torch.Tensor, rhs_value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-zeros of a product of matrices, as ascending `SparsityPattern.keys`, and their values.

    Differentiable in the values; non-zeros at the same place add up.
    """
    return _Multiply.apply(lhs, rhs, lhs_value, rhs_value)


def _is_square(mat: SparseMatrix) -> bool:
    return mat.shape()[0] == mat.shape()[1]


def _products(lhs: SparsityPattern, rhs: SparsityPattern) -> Iterator[_Products]:
    """All products, some rows of ``lhs`` at a time."""
    left, right = lhs.relation.csr(), rhs.relation.csr()
    row, col = left.owners().long(), left.indices.long()
    left_ids, right_ids = left.edge_ids().long(), right.edge_ids().long()
    start = right.indptr[col].long()
    counts = right.indptr[col + 1].long() - start
    # How many products there are before each row.
    before = torch.cat([counts.new_zeros(1), counts.cumsum(0)])[left.indptr.long()]
    total = int(before[-1])
    goals = torch.arange(PRODUCTS, max(total, PRODUCTS), PRODUCTS, device=before.device)
    ends = left.indptr[torch.searchsorted(before, goals)].tolist()
    for first, last in zip([0, *ends], [*ends, row.numel()], strict=True):
        part = slice(first, last)
        at_right = ranges(start[part], counts[part])
        at_left = torch.arange(first, last, device=row.device).repeat_interleave(
            counts[part], output_size=at_right.numel()
        )
        keys = row[at_left] * rhs.shape[1] + right.indices[at_right]
        yield _Products(left_ids[at_left], right_ids[at_right], keys)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lhs: SparsityPattern,
        rhs: SparsityPattern,
        lhs_value: torch.Tensor,
        rhs_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, sums = [], []
        wide_lhs, wide_rhs = wide(lhs_value), wide(rhs_value)
        for part in _products(lhs, rhs):
            found, place = part.keys.unique(return_inverse=True)
            terms = wide_lhs[part.lhs] * wide_rhs[part.rhs]
            keys.append(found)
            sums.append(terms.new_zeros(found.numel()).index_add_(0, place, terms))
        ctx.patterns = lhs, rhs
        all_keys = torch.cat(keys)
        ctx.mark_non_differentiable(all_keys)
        ctx.save_for_backward(lhs_value, rhs_value, all_keys)
        return all_keys, torch.cat(sums).to(lhs_value.dtype)

    @staticmethod
    def backward(ctx: Any, _: None, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Nothing in place: the gradients may be differentiated themselves.
        lhs_value, rhs_value, keys = ctx.saved_tensors
        wide_lhs, wide_rhs, wide_grad = wide(lhs_value), wide(rhs_value), wide(grad)
        lhs_grad, rhs_grad = torch.zeros_like(wide_lhs), torch.zeros_like(wide_rhs)
        for part in _products(*ctx.patterns):
            terms = wide_grad[torch.searchsorted(keys, part.keys)]
            lhs_grad = lhs_grad.index_add(0, part.lhs, terms * wide_rhs[part.rhs])
            rhs_grad = rhs_grad.index_add(0, part.rhs, terms * wide_lhs[part.lhs])
        return None, None, lhs_grad.to(lhs_value.dtype), rhs_grad.to(rhs_value.dtype)

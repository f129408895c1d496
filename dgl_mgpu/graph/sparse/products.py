"""Products of sparse matrices with dense and sparse ones.

Products with dense matrices are differentiable any number of times, since the gradient of either
function is made of the other: for ``C = A @ X``, that of the non-zeros of ``A`` is ``dC @ X.T`` at
their places, and that of ``X`` is ``A.T @ dC``.  Sums of float16 and bfloat16 are computed in
float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from dgl_mgpu import ops
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.relation import ranges
from dgl_mgpu.graph.sparse.attention import attend, pending_product
from dgl_mgpu.graph.sparse.matrix import SparseMatrix, widen
from dgl_mgpu.graph.sparse.pattern import SparsityPattern, check_numbering, check_same
from dgl_mgpu.graph.sparse.reduction import BroadcastRows, check_no_duplicates

# How many products of two non-zeros are in memory at a time, at about 50 bytes each; more where
# one row has more.
PRODUCTS = 2**24


def spmm(mat: SparseMatrix, dense: torch.Tensor) -> torch.Tensor:
    """``mat @ dense`` for a matrix of shape (L, M), differentiable in the values and in `dense`.

    Scalar values go with a dense matrix of shape (M,) or (M, N), vectors of K numbers with one of
    shape (M, N, K); the result has L in place of M.
    """
    action = "multiply a sparse with a dense matrix"
    attended = attend(mat, dense, functools.partial(_SpMM.apply, mat.pattern))
    if attended is not None:
        return attended
    value = mat.val()
    batch = tuple(value.shape[1:])
    fits = dense.dim() in ((3,) if batch else (1, 2)) and dense.shape[0] == mat.shape()[1]
    if not fits or tuple(dense.shape[2:]) != batch:
        raise InvalidInputError(
            action,
            f"the sparse matrix has shape {mat.shape()} with values of shape "
            f"{tuple(value.shape)}, but the dense one has shape {tuple(dense.shape)}",
            f"pass a dense matrix of shape {(mat.shape()[1], 'N', *batch)}",
        )
    check_same(action, values=value, dense=dense)
    if dense.dim() == 1:
        return _SpMM.apply(mat.pattern, value, dense[:, None]).squeeze(1)
    return _SpMM.apply(mat.pattern, value, dense)


def sddmm(mat: SparseMatrix, lhs: torch.Tensor, rhs: torch.Tensor) -> SparseMatrix:
    """``(lhs @ rhs) * mat``, differentiable in all three.

    For a matrix of shape (L, N), with scalars or vectors of K numbers as values: `lhs` has shape
    (L,), (L, M) or (L, M, K), and `rhs` (N,), (M, N) or (M, N, K).
    """
    action = "multiply dense matrices at the non-zeros of a sparse one"
    value = mat.val()
    shapes = tuple(lhs.shape), tuple(rhs.shape)
    lhs = lhs[:, None] if lhs.dim() == 1 else lhs
    rhs = rhs[None] if rhs.dim() == 1 else rhs
    batch = tuple(lhs.shape[2:])
    fits = (
        lhs.dim() == rhs.dim()
        and lhs.dim() in (2, 3)
        and (lhs.shape[0], rhs.shape[1]) == mat.shape()
        and lhs.shape[1] == rhs.shape[0]
        and batch == tuple(rhs.shape[2:])
        and tuple(value.shape[1:]) in ((), batch)
    )
    if not fits:
        raise InvalidInputError(
            action,
            f"the sparse matrix has shape {mat.shape()} with values of shape "
            f"{tuple(value.shape)}, but the dense ones have shapes {shapes[0]} and {shapes[1]}",
            f"pass {(mat.shape()[0], 'M')} and {('M', mat.shape()[1])}, or both with one more "
            "dimension, as long as values are",
        )
    check_same(action, lhs=lhs, rhs=rhs)
    pending = pending_product(mat, lhs, rhs, functools.partial(_Dot.apply, mat.pattern))
    if pending is not None:
        return pending
    product = _Dot.apply(mat.pattern, lhs, rhs.transpose(0, 1))
    if value.dim() < product.dim():
        value = value[:, None]
    return SparseMatrix(mat.pattern, product * value)


class _SpMM(torch.autograd.Function):
    """Values of shape (nnz,) or (nnz, K) times (columns, N) or (columns, N, K)."""

    @staticmethod
    def forward(
        ctx: Any, pattern: SparsityPattern, value: torch.Tensor, dense: torch.Tensor
    ) -> torch.Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(
            value if ctx.needs_input_grad[2] else None, dense if ctx.needs_input_grad[1] else None
        )
        csr = pattern.relation.csr()
        return ops.spmm(*csr, dense, value.unsqueeze(1), "mul", "sum")[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, dense = ctx.saved_tensors
        return (
            None,
            _Dot.apply(ctx.pattern, grad, dense) if ctx.needs_input_grad[1] else None,
            _SpMM.apply(ctx.pattern.transpose(), value, grad) if ctx.needs_input_grad[2] else None,
        )


class _Dot(torch.autograd.Function):
    """``lhs @ rhs.T`` at the non-zeros, of shapes (rows, N[, K]) and (columns, N[, K])."""

    @staticmethod
    def forward(
        ctx: Any, pattern: SparsityPattern, lhs: torch.Tensor, rhs: torch.Tensor
    ) -> torch.Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(
            lhs if ctx.needs_input_grad[2] else None, rhs if ctx.needs_input_grad[1] else None
        )
        row, col = pattern.relation.coo()
        if lhs.dim() == 3:
            lhs, rhs = lhs.transpose(1, 2), rhs.transpose(1, 2)
        return ops.sddmm(row, col, lhs, rhs, "dot", "u", "v").squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        lhs, rhs = ctx.saved_tensors
        return (
            None,
            _SpMM.apply(ctx.pattern, grad, rhs) if ctx.needs_input_grad[1] else None,
            _SpMM.apply(ctx.pattern.transpose(), grad, lhs) if ctx.needs_input_grad[2] else None,
        )


def spspmm(lhs: SparseMatrix, rhs: SparseMatrix) -> SparseMatrix:
    """``lhs @ rhs``, differentiable in the values of both.

    Non-zero wherever a product of non-zeros falls, also where their sum is 0; sorted, except that
    a square diagonal matrix leaves the non-zeros of the other where they are.
    """
    action = "multiply two sparse matrices"
    if lhs.shape()[1] != rhs.shape()[0]:
        raise InvalidInputError(
            action,
            f"their shapes are {lhs.shape()} and {rhs.shape()}",
            "pass a second matrix with as many rows as the first has columns",
        )
    if lhs.val().dim() != 1 or rhs.val().dim() != 1:
        raise InvalidInputError(
            action,
            f"their values have the shapes {tuple(lhs.val().shape)} and {tuple(rhs.val().shape)}",
            "pass matrices with scalar values",
        )
    check_same(action, lhs=lhs.val(), rhs=rhs.val())
    shape = lhs.shape()[0], rhs.shape()[1]
    if lhs.is_diag() and rhs.is_diag():
        common = min(lhs.nnz(), rhs.nnz())
        diagonal = lhs.val()[:common] * rhs.val()[:common]
        diagonal = torch.nn.functional.pad(diagonal, (0, min(shape) - common))
        return SparseMatrix(SparsityPattern.from_diag(shape, lhs.device()), diagonal)
    if lhs.is_diag() and lhs.shape()[0] == lhs.shape()[1]:
        of_rows = BroadcastRows.apply(rhs.pattern, lhs.val())
        return SparseMatrix(rhs.pattern, of_rows * rhs.val())
    if rhs.is_diag() and rhs.shape()[0] == rhs.shape()[1]:
        of_columns = BroadcastRows.apply(lhs.pattern.transpose(), rhs.val())
        return SparseMatrix(lhs.pattern, lhs.val() * of_columns)
    check_no_duplicates(action, lhs, rhs)
    check_numbering(action, shape)
    keys, value = multiply(lhs.pattern, rhs.pattern, lhs.val(), rhs.val())
    return SparseMatrix(SparsityPattern.from_keys(keys, shape), value)


def multiply(
    lhs: SparsityPattern, rhs: SparsityPattern, lhs_value: torch.Tensor, rhs_value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-zeros of a product of matrices, as ascending `SparsityPattern.keys`, and their values.

    Differentiable in the values; non-zeros at the same place add up.
    """
    return _SpSpMM.apply(lhs, rhs, lhs_value, rhs_value)


class _Products(NamedTuple):
    """Products of two non-zeros: their numbers, and the key of each product's place; int64."""

    lhs: torch.Tensor
    rhs: torch.Tensor
    keys: torch.Tensor


def _products(lhs: SparsityPattern, rhs: SparsityPattern) -> Iterator[_Products]:
    """All products, for some rows of ``lhs`` at a time."""
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


class _SpSpMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lhs: SparsityPattern,
        rhs: SparsityPattern,
        lhs_value: torch.Tensor,
        rhs_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, sums = [], []
        wide_lhs, wide_rhs = widen(lhs_value), widen(rhs_value)
        for part in _products(lhs, rhs):
            part_keys, place = part.keys.unique(return_inverse=True)
            terms = wide_lhs[part.lhs] * wide_rhs[part.rhs]
            keys.append(part_keys)
            sums.append(terms.new_zeros(part_keys.numel()).index_add_(0, place, terms))
        ctx.patterns = lhs, rhs
        all_keys = torch.cat(keys)
        ctx.mark_non_differentiable(all_keys)
        ctx.save_for_backward(lhs_value, rhs_value, all_keys)
        return all_keys, torch.cat(sums).to(lhs_value.dtype)

    @staticmethod
    def backward(ctx: Any, _: None, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Nothing in place: the gradients may be differentiated themselves.
        lhs_value, rhs_value, keys = ctx.saved_tensors
        wide_lhs, wide_rhs, wide_grad = widen(lhs_value), widen(rhs_value), widen(grad)
        lhs_grad, rhs_grad = torch.zeros_like(wide_lhs), torch.zeros_like(wide_rhs)
        for part in _products(*ctx.patterns):
            terms = wide_grad[torch.searchsorted(keys, part.keys)]
            lhs_grad = lhs_grad.index_add(0, part.lhs, terms * wide_rhs[part.rhs])
            rhs_grad = rhs_grad.index_add(0, part.rhs, terms * wide_lhs[part.lhs])
        return None, None, lhs_grad.to(lhs_value.dtype), rhs_grad.to(rhs_value.dtype)

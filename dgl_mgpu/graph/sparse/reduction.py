"""Reductions and softmax over rows, columns or all non-zeros; sums, products and quotients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dgl_mgpu import ops
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.sparse.attention import pending_softmax
from dgl_mgpu.graph.sparse.matrix import SparseMatrix
from dgl_mgpu.graph.sparse.pattern import SparsityPattern, check_dim, check_same

# What torch calls the reductions of dgl.sparse.
_REDUCTIONS = {"sum": "sum", "smin": "amin", "smax": "amax", "smean": "mean", "sprod": "prod"}


def reduce(mat: SparseMatrix, rtype: str, dim: int | None = None) -> torch.Tensor:
    """Reduce the non-zeros of each column (``dim=0``) or row (``dim=1``), or all.

    0 where there is nothing to reduce.  Where several are the largest or smallest, gradients are
    shared equally.
    """
    action = "reduce a sparse matrix"
    if rtype not in _REDUCTIONS:
        raise InvalidInputError(
            action, f"there is no rtype={rtype!r}", f"pass one of {', '.join(_REDUCTIONS)}"
        )
    name = _REDUCTIONS[rtype]
    value = mat.val()
    if dim is None:
        return _reduce_all(action, value, name)
    check_dim(action, dim)
    pattern = mat.pattern if dim == 1 else mat.pattern.transpose()
    if name == "sum" and value.is_floating_point():
        return RowSums.apply(pattern, value)
    if name == "mean" and value.is_floating_point():
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        counts = pattern.relation.csr().indptr.diff().clamp(min=1).to(wide.dtype)
        counts = counts.view(-1, *[1] * (wide.dim() - 1))
        return (RowSums.apply(pattern, wide) / counts).to(value.dtype)
    row = pattern.row.view(-1, *[1] * (value.dim() - 1)).expand_as(value)
    zeros = value.new_zeros(pattern.shape[0], *value.shape[1:])
    return zeros.scatter_reduce(0, row, value, name, include_self=False)


def _reduce_all(action: str, value: torch.Tensor, name: str) -> torch.Tensor:
    if value.shape[0] == 0:
        # Sums and products of integers are of 64 bits, also of none.
        nothing = value.sum(0)
        return nothing if name in ("sum", "prod") else nothing.to(value.dtype)
    if name == "mean" and not value.is_floating_point():
        raise InvalidInputError(
            action,
            f"the values have dtype {value.dtype}, which has no mean",
            "convert with float()",
        )
    return getattr(value, name)(0)


def _reduction(rtype: str) -> Callable[..., torch.Tensor]:
    def named(mat: SparseMatrix, dim: int | None = None) -> torch.Tensor:
        return reduce(mat, rtype, dim)

    return named


sum, smean, smin, smax, sprod = map(_reduction, ("sum", "smean", "smin", "smax", "sprod"))


class RowSums(torch.autograd.Function):
    """Sums of the floating-point non-zeros of each row, differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, pattern: SparsityPattern, value: torch.Tensor) -> torch.Tensor:
        ctx.pattern = pattern
        indptr, _, places = pattern.relation.csr()
        return ops.spmm(indptr, None, places, None, value, "copy_rhs", "sum")[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, BroadcastRows.apply(ctx.pattern, grad)


class BroadcastRows(torch.autograd.Function):
    """For each non-zero the value of its row: the transpose of `RowSums`.

    Torch's own indexing would add up gradients of 16 bits in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, pattern: SparsityPattern, rows: torch.Tensor) -> torch.Tensor:
        ctx.pattern = pattern
        return rows[pattern.row]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, RowSums.apply(ctx.pattern, grad.contiguous())


def softmax(mat: SparseMatrix, dim: int) -> SparseMatrix:
    """Softmax over the non-zeros of each column (``dim=0``) or row (``dim=1``)."""
    action = "take the softmax of a sparse matrix"
    check_dim(action, dim)
    pattern = mat.pattern if dim == 1 else mat.pattern.transpose()
    pending = pending_softmax(mat, dim, functools.partial(_Softmax.apply, pattern))
    if pending is not None:
        return pending
    value = mat.val()
    if not value.is_floating_point():
        found = f"the values have dtype {value.dtype}"
        raise InvalidInputError(action, found, "convert with float()")
    return SparseMatrix(mat.pattern, _Softmax.apply(pattern, value))


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pattern: SparsityPattern, value: torch.Tensor) -> torch.Tensor:
        ctx.pattern = pattern
        indptr, _, places = pattern.relation.csr()
        out = ops.edge_softmax(indptr, places, value)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (out,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            indptr, _, places = ctx.pattern.relation.csr()
            return None, ops.edge_softmax_backward(indptr, places, out, grad)
        # The gradient is to be differentiated itself.
        part = out * grad
        total = BroadcastRows.apply(ctx.pattern, RowSums.apply(ctx.pattern, part))
        return None, part - out * total


def spsp_add(lhs: SparseMatrix, rhs: SparseMatrix) -> SparseMatrix:
    """``lhs + rhs``, non-zero where either is; sorted and without duplicates."""
    _check("add", lhs, rhs)
    if lhs.is_diag() and rhs.is_diag():
        return SparseMatrix(lhs.pattern, lhs.val() + rhs.val())
    both = SparsityPattern.from_indices(torch.cat([lhs.indices(), rhs.indices()], 1), lhs.shape())
    return SparseMatrix(both, torch.cat([lhs.val(), rhs.val()])).coalesce()


def spsp_mul(lhs: SparseMatrix, rhs: SparseMatrix) -> SparseMatrix:
    """``lhs * rhs``, non-zero where both are; sorted."""
    action = _check("multiply", lhs, rhs)
    if lhs.is_diag() and rhs.is_diag():
        return SparseMatrix(lhs.pattern, lhs.val() * rhs.val())
    check_no_duplicates(action, lhs, rhs)
    keys, order = lhs.pattern.keys().sort()
    other_keys, other_order = rhs.pattern.keys().sort()
    place = torch.searchsorted(other_keys, keys)
    in_both = torch.cat([other_keys, other_keys.new_full((1,), -1)])[place] == keys
    pattern = SparsityPattern.from_keys(keys[in_both], lhs.shape())
    products = lhs.val()[order[in_both]] * rhs.val()[other_order[place[in_both]]]
    return SparseMatrix(pattern, products)


def spsp_div(lhs: SparseMatrix, rhs: SparseMatrix) -> SparseMatrix:
    """``lhs / rhs`` for matrices with non-zeros at the same places, in the order of `lhs`."""
    action = _check("divide", lhs, rhs)
    if lhs.is_diag() and rhs.is_diag():
        return SparseMatrix(lhs.pattern, lhs.val() / rhs.val())
    check_no_duplicates(action, lhs, rhs)
    keys, order = lhs.pattern.keys().sort()
    other_keys, other_order = rhs.pattern.keys().sort()
    if not torch.equal(keys, other_keys):
        raise InvalidInputError(
            action,
            "their non-zeros are at different places",
            "pass matrices with non-zeros at the same places",
        )
    counterpart = torch.empty_like(order).index_copy_(0, order, other_order)
    return SparseMatrix(lhs.pattern, lhs.val() / rhs.val()[counterpart])


def _check(verb: str, lhs: SparseMatrix, rhs: SparseMatrix) -> str:
    """Raise unless shapes and values fit; else what is to be done, for errors."""
    action = f"{verb} two sparse matrices"
    if lhs.shape() != rhs.shape():
        found = f"their shapes differ, {lhs.shape()} and {rhs.shape()}"
        raise InvalidInputError(action, found, "pass matrices of one shape")
    check_same(action, lhs=lhs.val(), rhs=rhs.val())
    if lhs.val().shape[1:] != rhs.val().shape[1:]:
        raise InvalidInputError(
            action,
            f"their values have the shapes {tuple(lhs.val().shape)} and {tuple(rhs.val().shape)}",
            "pass scalars for both, or vectors of one length",
        )
    return action


def check_no_duplicates(action: str, lhs: SparseMatrix, rhs: SparseMatrix) -> None:
    """Raise if one of them has several non-zeros at one place."""
    if lhs.has_duplicate() or rhs.has_duplicate():
        raise InvalidInputError(
            action,
            "one of them has several non-zeros at one place",
            "call coalesce() on the matrix that has them",
        )

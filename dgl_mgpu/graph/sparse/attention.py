"""Attention written with sparse matrices, ``sddmm(A, Q, K.T).softmax() @ V``, in one pass.

The values that products and softmax have are computed when somebody reads them.  A product of a
softmax that nobody has read is attention: nothing of the size of the non-zeros is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from dgl_mgpu.graph.dispatch import is_passed_as_tensor
from dgl_mgpu.graph.sparse.matrix import DotScores, Pending, SparseMatrix
from dgl_mgpu.ops.attention import attention, computed_in
from dgl_mgpu.ops.attention_cuda import can_attend
from dgl_mgpu.ops.autograd import is_transformed
from dgl_mgpu.ops.check import DTYPES


def pending_product(
    mat: SparseMatrix, lhs: Tensor, rhs: Tensor, product: Callable[[Tensor, Tensor], Tensor]
) -> SparseMatrix | None:
    """``(lhs @ rhs) * mat``, where ``product(lhs, rhs.T)`` computes the values of ``lhs @ rhs``.

    None where attention is not made of them in one pass.  Both are copied: a script may write to
    them meanwhile.
    """
    dim, dtype = lhs.dim(), torch.promote_types(lhs.dtype, mat.val().dtype)
    if (
        not is_passed_as_tensor(lhs)
        or is_transformed()
        or lhs.dtype not in DTYPES
        or computed_in(lhs.dtype) != computed_in(dtype)
        or not _have_room(_rows(lhs))
        or (number := mat.constant()) is None
    ):
        return None
    left, right = (
        _rows(it).clone(memory_format=torch.contiguous_format) for it in (rhs.transpose(0, 1), lhs)
    )

    def compute() -> Tensor:
        return product(_of_dim(right, dim), _of_dim(left, dim)).to(dtype) * number

    scores = DotScores(left, right, number, dim, product)
    return SparseMatrix(mat.pattern, Pending(scores, None, compute))


def pending_softmax(
    mat: SparseMatrix, dim: int, softmax: Callable[[Tensor], Tensor]
) -> SparseMatrix | None:
    """`mat` with ``softmax(values)`` as values; None if attention is not made of them."""
    pending = mat.pending
    if pending is None or pending.softmax or dim != 1:
        return None
    if pending.is_recorded != torch.is_grad_enabled():
        return None
    return mat.followed_by(Pending(pending.scores, softmax, lambda: softmax(mat.val())))


def scaled(mat: Any, factor: Any, value: Callable[[], Tensor]) -> SparseMatrix | None:
    """`mat` times a number, with the values that ``value()`` computes, if those of `mat` are scores
    that nobody has read; else None."""
    pending = mat.pending if isinstance(mat, SparseMatrix) else None
    if (
        pending is None
        or pending.softmax
        or pending.is_recorded != torch.is_grad_enabled()
        or not isinstance(factor, Real)
        or not math.isfinite(factor)
    ):
        return None
    scores = pending.scores._replace(scale=pending.scores.scale * float(factor))
    return mat.followed_by(Pending(scores, None, value))


def attend(
    mat: SparseMatrix, dense: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    """``mat @ dense`` for a softmax that nobody has read, in one pass; None if it is no such one.

    What does not fit is None, too: the product refuses it.  A second derivative is that of the
    composition, with ``multiply(values, dense)``.
    """
    pending = mat.pending
    if pending is None or not pending.softmax or is_transformed():
        return None
    softmax, (left, right, scale, dim, product) = pending.softmax, pending.scores
    if (dense.dim(), dense.dtype, dense.device) != (dim, left.dtype, left.device):
        return None
    values = _rows(dense).contiguous()
    if values.shape != left.shape:
        return None

    def composed(left: Tensor, right: Tensor, values: Tensor) -> Tensor:
        scores = scale * product(_of_dim(right, dim), _of_dim(left, dim))
        return _rows(multiply(softmax(scores), _of_dim(values, dim)))

    relation = mat.pattern.relation
    with torch.autocast(dense.device.type, enabled=False):
        out = attention(
            *relation.csr(), values, left, right, score="dot", scale=scale, by_source=relation.csc
        )
    out = _DifferentiableTwice.apply(composed, out, left, right, values)
    return _of_dim(out, dim).contiguous()


class _DifferentiableTwice(torch.autograd.Function):
    """``out``, whose gradient is that of ``composed(*operands)`` where one is taken of it, too."""

    @staticmethod
    def forward(
        ctx: Any, composed: Callable[..., Tensor], out: Tensor, *operands: Tensor
    ) -> Tensor:
        ctx.composed = composed
        ctx.save_for_backward(*operands)
        # Autograd allows no in-place change of a view that is made here.
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wanted = ctx.needs_input_grad[2:]
        if not torch.is_grad_enabled():
            return None, grad, *(None for _ in wanted)
        operands = ctx.saved_tensors
        leaves = [it for it, is_wanted in zip(operands, wanted, strict=True) if is_wanted]
        found = iter(torch.autograd.grad(ctx.composed(*operands), leaves, grad, create_graph=True))
        return None, None, *(next(found) if is_wanted else None for is_wanted in wanted)


def _rows(dense: Tensor) -> Tensor:
    """A matrix (n, width) or matrices (n, width, heads) as attention takes them."""
    return dense.unsqueeze(1) if dense.dim() == 2 else dense.transpose(1, 2)


def _of_dim(rows: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`_rows`."""
    return rows.squeeze(1) if dim == 2 else rows.transpose(1, 2)


def _have_room(rows: Tensor) -> bool:
    _, heads, width = rows.shape
    return bool(heads and width) and all(
        can_attend(heads, width, it) for it in (torch.float32, rows.dtype)
    )

"""Products of dense matrices at the non-zeros of a sparse one."""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.sparse.check import check_same
from dgl_mgpu.graph.sparse.matrix import SparseMatrix
from dgl_mgpu.graph.sparse.products import dot


def sddmm(mat: SparseMatrix, lhs: torch.Tensor, rhs: torch.Tensor) -> SparseMatrix:
    """``(lhs @ rhs) * mat``, differentiable in all three.

    Parameters
    ----------
    mat : SparseMatrix, shape (L, N), values of shape (nnz,) or (nnz, K)
    lhs : Tensor, shape (L,), (L, M) or (L, M, K)
    rhs : Tensor, shape (N,), (M, N) or (M, N, K)

    Raises
    ------
    InvalidInputError
        If shapes, dtypes or devices do not fit together.
    """
    asked = "multiply dense matrices at the non-zeros of a sparse one"
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
            asked,
            f"the sparse matrix has shape {mat.shape()} with values of shape "
            f"{tuple(value.shape)}, but the dense ones have shapes {shapes[0]} and {shapes[1]}",
            f"pass {(mat.shape()[0], 'M')} and {('M', mat.shape()[1])}, or both with one more "
            "dimension, as long as values are",
        )
    check_same(asked, lhs=lhs, rhs=rhs)
    product = dot(mat.pattern, lhs, rhs.transpose(0, 1))
    if value.dim() < product.dim():
        value = value[:, None]
    return SparseMatrix(mat.pattern, product * value)

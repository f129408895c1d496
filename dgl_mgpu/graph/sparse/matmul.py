"""Sparse matrix times dense matrix."""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.sparse.check import check_same
from dgl_mgpu.graph.sparse.matrix import SparseMatrix
from dgl_mgpu.graph.sparse.products import multiply


def spmm(mat: SparseMatrix, dense: torch.Tensor) -> torch.Tensor:
    """``mat @ dense``, differentiable in the values and in `dense`.

    Parameters
    ----------
    mat : SparseMatrix, shape (L, M), values of shape (nnz,) or (nnz, K)
    dense : Tensor, shape (M,), (M, N) or, for vectors as values, (M, N, K)

    Returns
    -------
    Tensor, shape (L,), (L, N) or (L, N, K)

    Raises
    ------
    InvalidInputError
        If shapes, dtypes or devices do not fit together.
    """
    asked = "multiply a sparse with a dense matrix"
    value = mat.val()
    batch = tuple(value.shape[1:])
    fits = dense.dim() in ((3,) if batch else (1, 2)) and dense.shape[0] == mat.shape()[1]
    if not fits or tuple(dense.shape[2:]) != batch:
        raise InvalidInputError(
            asked,
            f"the sparse matrix has shape {mat.shape()} with values of shape "
            f"{tuple(value.shape)}, but the dense one has shape {tuple(dense.shape)}",
            f"pass a dense matrix of shape {(mat.shape()[1], 'N', *batch)}",
        )
    check_same(asked, values=value, dense=dense)
    if dense.dim() == 1:
        return multiply(mat.pattern, value, dense[:, None]).squeeze(1)
    return multiply(mat.pattern, value, dense)

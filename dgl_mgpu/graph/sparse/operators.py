"""The computations over non-zeros that take the time, by this package's operators.

None is differentiable.  Values and dense matrices are of float32, float64, float16 or bfloat16, and
sums of the last two are made in float32.
"""

from __future__ import annotations

import torch

from dgl_mgpu.graph.sparse.pattern import SparsityPattern
from dgl_mgpu.ops import edge_softmax, edge_softmax_backward, sddmm, spmm


def multiply(pattern: SparsityPattern, value: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """Matrix times dense matrix.

    Parameters
    ----------
    value : Tensor, shape (nnz,) or (nnz, K)
    dense : Tensor, shape (columns, N) or (columns, N, K)

    Returns
    -------
    Tensor, shape (rows, N) or (rows, N, K)
    """
    indptr, indices, places = pattern.relation.csr()
    return spmm(indptr, indices, places, dense, value.unsqueeze(1), "mul", "sum")[0]


def dot(pattern: SparsityPattern, lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """``lhs`` times the transpose of ``rhs``, at the non-zeros alone.

    Parameters
    ----------
    lhs : Tensor, shape (rows, N) or (rows, N, K)
    rhs : Tensor, shape (columns, N) or (columns, N, K)

    Returns
    -------
    Tensor, shape (nnz,) or (nnz, K)
    """
    row, col = pattern.relation.coo()
    if lhs.dim() == 3:
        lhs, rhs = lhs.transpose(1, 2), rhs.transpose(1, 2)
    return sddmm(row, col, lhs, rhs, "dot", "u", "v").squeeze(-1)


def row_sums(pattern: SparsityPattern, value: torch.Tensor) -> torch.Tensor:
    """Sums of the non-zeros of each row.

    Parameters
    ----------
    value : Tensor, shape (nnz,) or (nnz, D)

    Returns
    -------
    Tensor, shape (rows,) or (rows, D)
    """
    indptr, _, places = pattern.relation.csr()
    return spmm(indptr, None, places, None, value, "copy_rhs", "sum")[0]


def softmax(pattern: SparsityPattern, value: torch.Tensor) -> torch.Tensor:
    """Softmax over the non-zeros of each row.

    Parameters
    ----------
    value : Tensor, shape (nnz,) or (nnz, D)
    """
    indptr, _, places = pattern.relation.csr()
    return edge_softmax(indptr, places, value)


def softmax_backward(
    pattern: SparsityPattern, out: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Gradient of `softmax` for its ``value``, all of one shape."""
    indptr, _, places = pattern.relation.csr()
    return edge_softmax_backward(indptr, places, out, grad)

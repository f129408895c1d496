"""Matrices from their parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.sparse.check import check_indices, check_range, check_value, outside
from dgl_mgpu.graph.sparse.matrix import SparseMatrix
from dgl_mgpu.graph.sparse.pattern import SparsityPattern


def from_coo(indices: torch.Tensor, value: torch.Tensor, shape: Sequence[int]) -> SparseMatrix:
    """A matrix with ``value[i]`` at row ``indices[0, i]`` and column ``indices[1, i]``.

    Raises
    ------
    InvalidInputError
        If shapes, dtypes or devices do not fit together.
    IdOutOfRangeError
        If an index is negative or not below the shape.
    """
    asked = "make a sparse matrix from COO"
    if indices.dim() != 2 or indices.shape[0] != 2:
        raise InvalidInputError(
            asked,
            f"the indices have shape {tuple(indices.shape)}",
            "pass indices of shape (2, nnz)",
        )
    rows, cols = _shape(asked, shape)
    check_indices(asked, row=indices[0], col=indices[1])
    check_value(asked, value, indices.shape[1], indices.device)
    check_range(asked, (indices[0], rows), (indices[1], cols))
    return SparseMatrix(SparsityPattern.from_indices(indices, (rows, cols)), value)


def from_csr(
    indptr: torch.Tensor, indices: torch.Tensor, value: torch.Tensor, shape: Sequence[int]
) -> SparseMatrix:
    """A matrix whose row ``i`` has the columns ``indices[indptr[i]:indptr[i + 1]]``.

    Raises
    ------
    InvalidInputError
        If shapes, dtypes or devices do not fit together, or ``indptr`` does not run from 0 to the
        number of non-zeros without a step down.
    IdOutOfRangeError
        If an index is negative or not below the shape.
    """
    asked = "make a sparse matrix from CSR"
    pattern = _compressed(asked, indptr, indices, value, _shape(asked, shape))
    return SparseMatrix(pattern, value)


def from_csc(
    indptr: torch.Tensor, indices: torch.Tensor, value: torch.Tensor, shape: Sequence[int]
) -> SparseMatrix:
    """A matrix whose column ``i`` has the rows ``indices[indptr[i]:indptr[i + 1]]``.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError
        As `from_csr`.
    """
    asked = "make a sparse matrix from CSC"
    rows, cols = _shape(asked, shape)
    pattern = _compressed(asked, indptr, indices, value, (cols, rows))
    return SparseMatrix(pattern.transpose(), value)


def from_diag(value: torch.Tensor, shape: Sequence[int]) -> SparseMatrix:
    """A matrix with ``value`` on its diagonal.

    Raises
    ------
    InvalidInputError
        If there is not one value for each place of the diagonal.
    """
    asked = "make a diagonal sparse matrix"
    rows, cols = _shape(asked, shape)
    check_value(asked, value, min(rows, cols), value.device)
    return SparseMatrix(SparsityPattern.from_diag((rows, cols), value.device), value)


def val_like(mat: SparseMatrix, value: torch.Tensor) -> SparseMatrix:
    """A matrix with other values at the places of `mat`.

    Raises
    ------
    InvalidInputError
        If there is not one value for each non-zero, on the matrix's device.
    """
    check_value("give a sparse matrix new values", value, mat.nnz(), mat.device())
    return SparseMatrix(mat.pattern, value)


def _shape(asked: str, shape: Sequence[int]) -> tuple[int, int]:
    sizes = [int(size) for size in shape]  # where DGL takes them from the indices, tensors
    if len(sizes) != 2 or min(sizes) < 0:
        raise InvalidInputError(asked, f"the shape is {tuple(sizes)}", "pass (rows, columns)")
    return sizes[0], sizes[1]


def _compressed(
    asked: str,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    value: torch.Tensor,
    shape: tuple[int, int],
) -> SparsityPattern:
    check_indices(asked, indptr=indptr, indices=indices)
    check_value(asked, value, indices.numel(), indices.device)
    if indptr.numel() != shape[0] + 1:
        raise InvalidInputError(
            asked,
            f"indptr has {indptr.numel()} entries, but there are {shape[0]} compressed rows or "
            "columns",
            "pass an indptr with one entry more than that",
        )
    steps_down = (indptr.diff() < 0).any()
    is_bad = steps_down | (indptr[0] != 0) | (indptr[-1] != indices.numel())
    if bool(is_bad | outside(indices, shape[1])):
        check_range(asked, (indices, shape[1]))
        raise InvalidInputError(
            asked,
            "indptr does not rise from 0 to the number of non-zeros",
            "pass the running sum of how many non-zeros each row or column has",
        )
    return SparsityPattern.from_csr(indptr, indices, shape)

"""Sums, products and quotients of two matrices, non-zero by non-zero."""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.sparse.check import check_same
from dgl_mgpu.graph.sparse.matrix import SparseMatrix
from dgl_mgpu.graph.sparse.pattern import SparsityPattern
from dgl_mgpu.graph.sparse.selection import coalesce


def spsp_add(lhs: SparseMatrix, rhs: SparseMatrix) -> SparseMatrix:
    """``lhs + rhs``, non-zero where either is; sorted and without duplicates.

    Raises
    ------
    InvalidInputError
        If shapes, shapes of values, dtypes or devices differ.
    """
    _check("add", lhs, rhs)
    if lhs.is_diag() and rhs.is_diag():
        return SparseMatrix(lhs.pattern, lhs.val() + rhs.val())
    both = SparsityPattern.from_indices(torch.cat([lhs.indices(), rhs.indices()], 1), lhs.shape())
    return SparseMatrix(*coalesce(both, torch.cat([lhs.val(), rhs.val()])))


def spsp_mul(lhs: SparseMatrix, rhs: SparseMatrix) -> SparseMatrix:
    """``lhs * rhs``, non-zero where both are; sorted.

    Raises
    ------
    InvalidInputError
        If shapes, shapes of values, dtypes or devices differ, or either has duplicates.
    """
    _check("multiply", lhs, rhs)
    if lhs.is_diag() and rhs.is_diag():
        return SparseMatrix(lhs.pattern, lhs.val() * rhs.val())
    _check_no_duplicates("multiply", lhs, rhs)
    keys, order = lhs.pattern.keys().sort()
    other_keys, other_order = rhs.pattern.keys().sort()
    place = torch.searchsorted(other_keys, keys)
    in_both = torch.cat([other_keys, other_keys.new_full((1,), -1)])[place] == keys
    values = lhs.val()[order[in_both]], rhs.val()[other_order[place[in_both]]]
    return SparseMatrix(
        SparsityPattern.from_keys(keys[in_both], lhs.shape()), values[0] * values[1]
    )


def spsp_div(lhs: SparseMatrix, rhs: SparseMatrix) -> SparseMatrix:
    """``lhs / rhs`` for matrices with non-zeros at the same places, in the order of `lhs`.

    Raises
    ------
    InvalidInputError
        If shapes, shapes of values, dtypes, devices or the places of non-zeros differ, or there
        are duplicates.
    """
    _check("divide", lhs, rhs)
    if lhs.is_diag() and rhs.is_diag():
        return SparseMatrix(lhs.pattern, lhs.val() / rhs.val())
    _check_no_duplicates("divide", lhs, rhs)
    keys, order = lhs.pattern.keys().sort()
    other_keys, other_order = rhs.pattern.keys().sort()
    if not torch.equal(keys, other_keys):
        raise InvalidInputError(
            "divide two sparse matrices",
            "their non-zeros are at different places",
            "pass matrices with non-zeros at the same places",
        )
    counterpart = torch.empty_like(order).index_copy_(0, order, other_order)
    return SparseMatrix(lhs.pattern, lhs.val() / rhs.val()[counterpart])


def _check(what: str, lhs: SparseMatrix, rhs: SparseMatrix) -> None:
    asked = f"{what} two sparse matrices"
    if lhs.shape() != rhs.shape():
        raise InvalidInputError(
            asked,
            f"their shapes differ, {lhs.shape()} and {rhs.shape()}",
            "pass matrices of one shape",
        )
    check_same(asked, lhs=lhs.val(), rhs=rhs.val())
    if lhs.val().shape[1:] != rhs.val().shape[1:]:
        raise InvalidInputError(
            asked,
            f"their values have the shapes {tuple(lhs.val().shape)} and {tuple(rhs.val().shape)}",
            "pass scalars for both, or vectors of one length",
        )


def _check_no_duplicates(what: str, lhs: SparseMatrix, rhs: SparseMatrix) -> None:
    if lhs.has_duplicate() or rhs.has_duplicate():
        raise InvalidInputError(
            f"{what} two sparse matrices",
            "one of them has several non-zeros at one place",
            "call coalesce() on the matrix that has them",
        )

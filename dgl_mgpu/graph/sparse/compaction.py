"""Matrices without their empty rows or columns."""

from __future__ import annotations

import torch

from dgl_mgpu.graph.sparse.check import check_dim, check_indices, check_range
from dgl_mgpu.graph.sparse.matrix import SparseMatrix
from dgl_mgpu.graph.sparse.pattern import SparsityPattern


def compact(
    mat: SparseMatrix, dim: int, leading_indices: torch.Tensor | None
) -> tuple[SparseMatrix, torch.Tensor]:
    """Number rows (``dim=0``) or columns (``dim=1``) anew, without those that are empty.

    Parameters
    ----------
    leading_indices : Tensor, sequence of int or None
        Those that come first, in this order, also if they are empty; the others keep their order.

    Returns
    -------
    SparseMatrix
        With the same values.
    Tensor, shape (new size,)
        The old number of each.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError
        If ``dim`` is neither 0 nor 1, or leading indices are not below ``shape[dim]``.
    """
    asked = "compact a sparse matrix"
    check_dim(asked, dim)
    row, col = mat.coo()
    ids = (row, col)[dim]
    size = mat.shape()[dim]
    occupied = torch.zeros(size, dtype=torch.bool, device=ids.device)
    occupied.index_fill_(0, ids.long(), True)
    leading = ids.new_empty(0)
    if leading_indices is not None:
        of_list = None if isinstance(leading_indices, torch.Tensor) else ids.dtype
        leading = torch.as_tensor(leading_indices, dtype=of_list, device=ids.device)
        check_indices(asked, leading_indices=leading)
        check_range(asked, (leading, size))
        leading = _first_occurrences(leading).to(ids.dtype)
        occupied.index_fill_(0, leading.long(), False)
    old = torch.cat([leading, occupied.nonzero().flatten().to(ids.dtype)])
    new = ids.new_empty(size)
    new[old.long()] = torch.arange(old.numel(), dtype=ids.dtype, device=ids.device)
    renumbered = new[ids.long()]
    if dim == 0:
        pattern = SparsityPattern.from_coo(renumbered, col, (old.numel(), mat.shape()[1]))
    else:
        pattern = SparsityPattern.from_coo(row, renumbered, (mat.shape()[0], old.numel()))
    return SparseMatrix(pattern, mat.val()), old


def _first_occurrences(ids: torch.Tensor) -> torch.Tensor:
    """`ids` without those that came before."""
    ordered, place = ids.sort(stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ids[place[is_first].sort().values]

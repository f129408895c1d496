"""Parts of matrices: rows, columns, and what is left when duplicates are added up."""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.sparse.check import check_indices, check_range
from dgl_mgpu.graph.sparse.pattern import SparsityPattern


def wide(value: torch.Tensor) -> torch.Tensor:
    """In the precision in which sums of its dtype are made: at least float32."""
    if not value.is_floating_point():
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))


def coalesce(pattern: SparsityPattern, value: torch.Tensor) -> tuple[SparsityPattern, torch.Tensor]:
    """One non-zero a place, sorted by row and column, with the sum of the values there."""
    keys, place = pattern.keys().unique(return_inverse=True)
    terms = wide(value)
    total = terms.new_zeros(keys.numel(), *value.shape[1:]).index_add(0, place, terms)
    return SparsityPattern.from_keys(keys, pattern.shape), total.to(value.dtype)


def index_select(
    pattern: SparsityPattern, value: torch.Tensor, dim: int, ids: torch.Tensor
) -> tuple[SparsityPattern, torch.Tensor]:
    """The rows (``dim=0``) or columns (``dim=1``) `ids`, in this order.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError
        If `ids` are no indices, on another device, or not all below ``shape[dim]``.
    """
    asked = "select rows or columns of a sparse matrix"
    check_indices(asked, index=ids)
    if ids.device != pattern.device:
        raise InvalidInputError(
            asked,
            f"the index is on {ids.device}, but the matrix is on {pattern.device}",
            "move one to the other",
        )
    check_range(asked, (ids, pattern.shape[dim]))
    return _select(pattern, value, dim, ids)


def range_select(
    pattern: SparsityPattern, value: torch.Tensor, dim: int, start: int, end: int | None
) -> tuple[SparsityPattern, torch.Tensor]:
    """The rows (``dim=0``) or columns (``dim=1``) from `start` up to `end`, or to the last.

    Raises
    ------
    InvalidInputError
        If there are no such rows or columns.
    """
    size = pattern.shape[dim]
    end = size if end is None else end
    if not 0 <= start <= end <= size:
        raise InvalidInputError(
            "select a range of rows or columns of a sparse matrix",
            f"the range [{start}, {end}) is not within [0, {size})",
            f"pass a range within [0, {size})",
        )
    return _select(pattern, value, dim, torch.arange(start, end, device=pattern.device))


def _select(
    pattern: SparsityPattern, value: torch.Tensor, dim: int, ids: torch.Tensor
) -> tuple[SparsityPattern, torch.Tensor]:
    if dim == 1:
        selected, value = _select(pattern.transpose(), value, 0, ids)
        return selected.transpose(), value
    csr = pattern.relation.csr()
    entries, counts = csr.entries(ids)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(csr.indptr.dtype)
    selected = SparsityPattern.from_csr(
        indptr, csr.indices[entries], (ids.numel(), pattern.shape[1])
    )
    places = entries if csr.eids is None else csr.eids[entries].long()
    return selected, value.index_select(0, places)

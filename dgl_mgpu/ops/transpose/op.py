"""A CSR made of a CSC, or the reverse: the contract."""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_ids, check_integer
from dgl_mgpu.ops.library import Operator, Size, call

_ASKED = "group edges by their other ends"


@Operator
def transpose_op(
    indptr: torch.Tensor, indices: torch.Tensor, eids: torch.Tensor | None, num_cols: Size
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return outputs(indices, num_cols)


def outputs(
    indices: torch.Tensor, num_cols: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the operator's outputs."""
    count = indices.shape[0]
    return indices.new_empty(num_cols + 1), indices.new_empty(count), indices.new_empty(count)


def transpose(
    indptr: torch.Tensor, indices: torch.Tensor, eids: torch.Tensor | None, num_cols: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The matrix transposed: its entries grouped by column, those of one in the order of edge ids.

    Parameters
    ----------
    indptr : Tensor, int32 or int64, shape (num_rows + 1,)
        Where each row's entries begin, and the end of the last.
    indices : Tensor, dtype of ``indptr``, shape (nnz,)
        Column of each entry.
    eids : Tensor, dtype of ``indptr``, shape (nnz,), or None
        Edge of each entry, every number in [0, nnz) once; None where entry ``i`` is edge ``i``.
    num_cols : int
        Columns, which are the rows of the result.

    Returns
    -------
    indptr : Tensor, dtype of ``indptr``, shape (num_cols + 1,)
    indices : Tensor, dtype of ``indptr``, shape (nnz,)
        Row of each entry.
    eids : Tensor, dtype of ``indptr``, shape (nnz,)
        Edge of each entry; ascending in each column.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype, shape or device; on CUDA also for 2**31 rows or entries.

    Notes
    -----
    The same bits on every run, those of a stable sort; no wait for a GPU.  While it works, it
    takes 24 bytes an entry there, and 16 on the CPU.

    What ``indptr``, ``indices`` and ``eids`` hold is not checked: with ids out of range it writes
    to memory that is none of its own.
    """
    indptr = check_ids(indptr, _ASKED)
    if indptr.shape[0] == 0:
        raise InvalidInputError(
            _ASKED, "indptr is empty", "pass an indptr with one element more than there are rows"
        )
    indices = check_ids(indices, _ASKED, indptr.device)
    if eids is not None:
        eids = check_ids(eids, _ASKED, indptr.device)
        if eids.shape != indices.shape:
            raise InvalidInputError(
                _ASKED,
                f"there are {len(indices)} columns, but {len(eids)} edge ids",
                "pass both for each entry",
            )
    for ids in (indices, eids):
        if ids is not None and ids.dtype != indptr.dtype:
            raise InvalidInputError(
                _ASKED,
                f"indptr has dtype {indptr.dtype}, but the ids have dtype {ids.dtype}",
                "convert one to the dtype of the other",
            )
    num_cols = check_integer(num_cols, "num_cols", 0, _ASKED)
    return call("transpose", (indptr, indices, eids), num_cols)

"""How edges are sorted, as DGL's C++ tells its Python."""

from __future__ import annotations

import torch


def coo_is_sorted(row: torch.Tensor, col: torch.Tensor, num_rows: int, num_cols: int) -> int:
    """Whether edges are sorted by row, and then by column: ``_CAPI_DGLCOOIsSorted``.

    Parameters
    ----------
    row, col : Tensor, int32 or int64, shape (num_edges,)
    num_rows, num_cols : int

    Returns
    -------
    int
        0, 1 if by row, 2 if by both.
    """
    ascend = (row[:-1] <= row[1:]).all()
    both = ((row[:-1] < row[1:]) | (col[:-1] <= col[1:])).all()
    by_row, by_both = torch.stack([ascend, ascend & both]).tolist()
    return int(by_row) + int(by_both)

"""A CSR made of a CSC, or the reverse, on the CPU."""

from __future__ import annotations

import numpy as np
import torch

from dgl_mgpu.ops.memory import kernel, load_id, scratch, store_id
from dgl_mgpu.ops.transpose.op import outputs, transpose_op


@kernel
def _to_edge_order(
    indptr: int,
    num_rows: int,
    indices: int,
    eids: int,
    width: int,
    rows: np.ndarray,
    columns: np.ndarray,
) -> None:
    """Both ends of every edge; ``eids`` is 0 where entry ``i`` is edge ``i``."""
    for row in range(num_rows):
        for entry in range(load_id(indptr, row, width), load_id(indptr, row + 1, width)):
            edge = entry if eids == 0 else load_id(eids, entry, width)
            rows[edge] = row
            columns[edge] = load_id(indices, entry, width)


@kernel
def _group(
    rows: np.ndarray,
    columns: np.ndarray,
    width: int,
    counts: np.ndarray,
    indptr: int,
    indices: int,
    eids: int,
) -> None:
    """Group edges by column, in their order."""
    counts[:] = 0
    for edge in range(len(columns)):
        counts[columns[edge]] += 1
    total = 0
    for column in range(len(counts)):
        count = counts[column]
        store_id(indptr, column, width, total)
        counts[column] = total
        total += count
    store_id(indptr, len(counts), width, total)
    for edge in range(len(columns)):
        place = counts[columns[edge]]
        counts[columns[edge]] = place + 1
        store_id(indices, place, width, rows[edge])
        store_id(eids, place, width, edge)


@transpose_op.cpu
def _transpose(
    indptr: torch.Tensor, indices: torch.Tensor, eids: torch.Tensor | None, num_cols: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    indptr, indices = indptr.contiguous(), indices.contiguous()
    eids = None if eids is None else eids.contiguous()
    count, width = indices.numel(), indices.element_size()
    rows, columns = scratch("transpose_rows", count), scratch("transpose_columns", count)
    _to_edge_order(
        indptr.data_ptr(),
        indptr.numel() - 1,
        indices.data_ptr(),
        0 if eids is None else eids.data_ptr(),
        width,
        rows,
        columns,
    )
    out = outputs(indices, num_cols)
    counts = scratch("transpose_counts", num_cols)
    _group(rows, columns, width, counts, *(each.data_ptr() for each in out))
    return out

"""A CSR made of a CSC, or the reverse; see ``kernels/transpose.cu``."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import check_ids, check_integer, raise_at_bad_id
from dgl_mgpu.ops.cpu import kernel, load_id, scratch, store_id
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.library import Operator, Size, call
from dgl_mgpu.ops.workspace import workspace

_ACTION = "group edges by their other ends"


@Operator
def transpose_op(
    indptr: Tensor, indices: Tensor, eids: Tensor | None, num_cols: Size
) -> tuple[Tensor, Tensor, Tensor]:
    return outputs(indices, num_cols)


def outputs(indices: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the operator's outputs."""
    count = indices.shape[0]
    return indices.new_empty(num_cols + 1), indices.new_empty(count), indices.new_empty(count)


def transpose(
    indptr: Tensor, indices: Tensor, eids: Tensor | None, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
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
    indptr = check_ids(indptr, _ACTION)
    if indptr.shape[0] == 0:
        raise InvalidInputError(
            _ACTION, "indptr is empty", "pass an indptr with one element more than there are rows"
        )
    indices = check_ids(indices, _ACTION, indptr.device)
    if eids is not None:
        eids = check_ids(eids, _ACTION, indptr.device)
        if eids.shape != indices.shape:
            raise InvalidInputError(
                _ACTION,
                f"there are {len(indices)} columns, but {len(eids)} edge ids",
                "pass both for each entry",
            )
    for ids in (indices, eids):
        if ids is not None and ids.dtype != indptr.dtype:
            raise InvalidInputError(
                _ACTION,
                f"indptr has dtype {indptr.dtype}, but the ids have dtype {ids.dtype}",
                "convert one to the dtype of the other",
            )
    num_cols = check_integer(num_cols, "num_cols", 0, _ACTION)
    return call("transpose", (indptr, indices, eids), num_cols)


@kernel
def _to_edge_order(
    indptr: int, num_rows: int, indices: int, eids: int, width: int, rows: np.ndarray,
    columns: np.ndarray,
) -> None:  # fmt: skip
    """Both ends of every edge; ``eids`` is 0 where entry ``i`` is edge ``i``."""
    for row in range(num_rows):
        for entry in range(load_id(indptr, row, width), load_id(indptr, row + 1, width)):
            edge = entry if eids == 0 else load_id(eids, entry, width)
            rows[edge] = row
            columns[edge] = load_id(indices, entry, width)


@kernel
def _group(
    rows: np.ndarray, columns: np.ndarray, width: int, counts: np.ndarray, indptr: int,
    indices: int, eids: int,
) -> int:  # fmt: skip
    """Group edges by column, in their order; the first edge whose column is none, or -1."""
    counts[:] = 0
    for edge in range(len(columns)):
        column = columns[edge]
        if column < 0 or column >= len(counts):
            return edge
        counts[column] += 1
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
    return -1


def group_on_cpu(major: Tensor, minor: Tensor, num_major: int) -> tuple[Tensor, Tensor, Tensor]:
    """Edges grouped by their ends ``major``, as :func:`transpose` returns them, on the CPU.

    Both ends are int32 or int64, shape (nnz,).  Raises IdOutOfRangeError unless those of ``major``
    are in [0, num_major).
    """
    out = outputs(minor, num_major)
    counts = scratch("transpose_counts", num_major)
    place = _group(
        minor.contiguous().numpy(), major.contiguous().numpy(), minor.element_size(), counts,
        *(tensor.data_ptr() for tensor in out),
    )  # fmt: skip
    raise_at_bad_id([place], major, num_major, _ACTION)
    return out


@transpose_op.cpu
def _transpose_cpu(
    indptr: Tensor, indices: Tensor, eids: Tensor | None, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
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
    _group(rows, columns, width, counts, *(tensor.data_ptr() for tensor in out))
    return out


#: A block's threads, and entries of a piece.
_THREADS = 256
_MAX_ENTRIES = 1 << 31


@functools.cache
def _kernel(dtype: torch.dtype) -> Kernel:
    return Kernel("transpose.cu", f"dgl_mgpu::transpose<{c_type(dtype)}>", cooperative=True)


@transpose_op.cuda
def _transpose_cuda(
    indptr: Tensor, indices: Tensor, eids: Tensor | None, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    device, num_rows, count = indices.device, indptr.shape[0] - 1, indices.shape[0]
    if max(num_rows, count) >= _MAX_ENTRIES:
        raise InvalidInputError(
            "group edges by their other ends on a GPU",
            f"there are {count} entries in {num_rows} rows",
            f"pass fewer than {_MAX_ENTRIES} of both",
        )
    indptr, indices = indptr.contiguous(), indices.contiguous()
    eids = None if eids is None else eids.contiguous()
    starts, rows, edges = outputs(indices, num_cols)
    # Of each entry its numbers and a word, two totals, and where the pieces of long columns begin,
    # of which all but one a column are full.
    pieces = 2 * (count // _THREADS)
    buffer = torch.empty(24 * count + 4 * (2 + pieces), dtype=torch.uint8, device=device)
    entries = buffer.data_ptr()
    words = entries + 16 * count
    totals = words + 8 * count
    kernel, space = _kernel(indices.dtype), workspace(device)
    # All blocks run at once or none does: half of what the device holds need not wait for the
    # gathers of batches that are made ahead.
    sms, wanted = gpu.driver.num_sms(device) // 2, -(-max(count, num_cols) // _THREADS)
    blocks = gpu.blocks_within(kernel, _THREADS, wanted, device, sms)
    with space.lock:
        request = gpu.struct(
            indptr, indices, eids, num_rows, num_cols, count, starts, rows, edges,
            entries, words, totals, totals + 4, totals + 8, space.control(blocks),
        )  # fmt: skip
        kernel(blocks, _THREADS, request, device=device)
    return starts, rows, edges

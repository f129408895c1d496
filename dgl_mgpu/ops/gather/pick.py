"""Some rows of a tensor that is all on one device."""

from __future__ import annotations

import math

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import check_ids, raise_at_bad_id
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.gather.cuda import THREADS, UNROLL, VECTORS, launch_shape, row_slots
from dgl_mgpu.ops.library import Operator, Written, call


@Operator
def pick_rows_op(out: Written, rows: torch.Tensor, ids: torch.Tensor) -> None:
    return None


def pick_rows(rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copy some rows of a tensor, as ``torch.index_select`` does, which takes a block for each row.

    Parameters
    ----------
    rows : Tensor, contiguous, shape (n, \\*shape)
    ids : Tensor, int32 or int64, shape (count,)
        In [0, n).
    out : Tensor, contiguous, of the same dtype, shape (count, \\*shape)

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype, shape or device.
    IdOutOfRangeError
        On a GPU by a later call, as :func:`dgl_mgpu.ops.gather_rows` says.
    """
    check_ids(ids, "pick rows", rows.device)
    expected = len(ids), *rows.shape[1:]
    if (
        out.shape != expected
        or out.dtype != rows.dtype
        or out.device != rows.device
        or not (rows.is_contiguous() and out.is_contiguous())
    ):
        raise InvalidInputError(
            f"pick {len(ids)} rows of shape {tuple(rows.shape[1:])} and dtype {rows.dtype}",
            f"out has shape {tuple(out.shape)} and dtype {out.dtype} on '{out.device}', or out or"
            " rows is not contiguous",
            f"pass contiguous rows, and a contiguous out of shape {expected} and dtype {rows.dtype}"
            f" on '{rows.device}'",
        )
    call("pick_rows", (out, rows, ids))


@pick_rows_op.cpu
def _pick_rows_cpu(out: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    bad = ((ids < 0) | (ids >= len(rows))).nonzero()[:1].flatten()
    raise_at_bad_id(bad.tolist(), ids, len(rows), "pick rows")
    torch.index_select(rows, 0, ids, out=out)


@pick_rows_op.cuda
def _pick_rows(out: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """See ``kernels/gather.cu``."""
    device, count = out.device, len(ids)
    gpu.raise_faults(device, wait=False)
    if not out.numel():
        return
    row_bytes = out.numel() // count * out.element_size()
    vector = math.gcd(row_bytes, out.data_ptr(), rows.data_ptr(), 16)
    types = f"{c_type(ids.dtype)}, {VECTORS[vector]}, {UNROLL}"
    kernel = Kernel("gather.cu", f"dgl_mgpu::pick<{types}>")
    blocks, warp_rows = launch_shape(kernel, count, device, 0)
    slots = row_slots(row_bytes, vector)
    kernel(
        blocks, THREADS, out, rows, ids.contiguous(), count, len(rows), row_bytes, slots,
        warp_rows, gpu.fault_record(device), device=device,
    )  # fmt: skip

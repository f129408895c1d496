"""A CSR made of a CSC, or the reverse, on CUDA; see ``kernels/transpose.cu``."""

from __future__ import annotations

import functools

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.transpose.op import outputs, transpose_op
from dgl_mgpu.ops.workspace import workspace

#: A block's threads, and entries of a piece.
_THREADS = 256
_MOST = 1 << 31


@functools.cache
def _kernel(dtype: torch.dtype) -> Kernel:
    return Kernel("transpose.cu", f"dgl_mgpu::transpose<{c_type(dtype)}>", cooperative=True)


@transpose_op.cuda
def _transpose(
    indptr: torch.Tensor, indices: torch.Tensor, eids: torch.Tensor | None, num_cols: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device, num_rows, count = indices.device, indptr.shape[0] - 1, indices.shape[0]
    if max(num_rows, count) >= _MOST:
        raise InvalidInputError(
            "group edges by their other ends on a GPU",
            f"there are {count} entries in {num_rows} rows",
            f"pass fewer than {_MOST} of both",
        )
    indptr, indices = indptr.contiguous(), indices.contiguous()
    eids = None if eids is None else eids.contiguous()
    starts, rows, edges = outputs(indices, num_cols)
    # Of each entry its numbers and a word, two totals, and where the pieces of long columns begin,
    # of which all but one a column are full.
    pieces = 2 * (count // _THREADS)
    room = torch.empty(24 * count + 4 * (2 + pieces), dtype=torch.uint8, device=device)
    entries = room.data_ptr()
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

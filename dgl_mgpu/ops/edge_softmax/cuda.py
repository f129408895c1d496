"""Softmax over the entries of each row on CUDA; see ``kernels/edge_softmax.cu``."""

from __future__ import annotations

import functools

import torch

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.edge_softmax.op import edge_softmax_backward_op, edge_softmax_op

_THREADS, _FINISH_THREADS = 256, 128
_WARPS = _THREADS // 32
#: Entries of a thread, and columns that a block takes at most.
_RUN, _MOST_COLUMNS = 17, 8
_ELEMENTS = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "dgl_mgpu::Float16",
    torch.bfloat16: "dgl_mgpu::BFloat16",
}


@functools.cache
def _kernels(
    ids: torch.dtype, scores: torch.dtype, columns: int, gradient: bool
) -> tuple[Kernel, Kernel, Kernel]:
    types = f"{c_type(ids)}, {_ELEMENTS[scores]}, {columns}"
    both = f"{types}, {'true' if gradient else 'false'}"
    reduce, merge, finish = (
        Kernel("edge_softmax.cu", f"dgl_mgpu::{name}")
        for name in (f"reduce_shares<{both}>", f"merge_shares<{types}>", f"finish_shares<{both}>")
    )
    return reduce, merge, finish


@edge_softmax_op.cuda
def _edge_softmax(
    indptr: torch.Tensor, eids: torch.Tensor | None, scores: torch.Tensor
) -> torch.Tensor:
    return _launch(indptr, eids, scores, None)


@edge_softmax_backward_op.cuda
def _edge_softmax_backward(
    indptr: torch.Tensor, eids: torch.Tensor | None, out: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    return _launch(indptr, eids, out, grad)


def _launch(
    indptr: torch.Tensor,
    eids: torch.Tensor | None,
    scores: torch.Tensor,
    gradients: torch.Tensor | None,
) -> torch.Tensor:
    out = torch.empty_like(scores)
    if scores.numel() == 0:
        return out
    device, num_rows, num_entries = scores.device, indptr.numel() - 1, scores.shape[0]
    columns = scores.numel() // num_entries
    together = min(_MOST_COLUMNS, 1 << (columns - 1).bit_length())
    groups = -(-columns // together)
    share = _THREADS // together * _RUN
    shares = -(-(num_rows + num_entries) // share)
    # First rows of the shares, and two partial results for each share and column.
    words = shares + 1 + 2 * shares * columns * (2 if scores.dtype == torch.float64 else 1)
    room = torch.empty(words, dtype=torch.int64, device=device)
    request = gpu.struct(
        indptr, num_rows, eids, num_entries, scores, gradients, out, columns, share, shares,
        room, room.data_ptr() + 8 * (shares + 1),
    )  # fmt: skip
    reduce, merge, finish = _kernels(indptr.dtype, scores.dtype, together, gradients is not None)
    reduce(shares * groups, _THREADS, request, device=device)
    if shares > 1:
        merge(-(-shares * groups // _WARPS), _THREADS, request, device=device)
        finish(shares * groups, _FINISH_THREADS, request, device=device)
    return out

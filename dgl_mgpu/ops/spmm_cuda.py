"""Generalised sparse-dense product on CUDA; see ``kernels/spmm.cu``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.spmm import (
    CHOICES,
    MessageOperands,
    add_spmm_op,
    outputs,
    spmm_op,
    spmm_shares_op,
)
from dgl_mgpu.ops.spmm_layout import (
    ELEMENTS,
    VECTOR_BYTES,
    OperandLayout,
    at_lines,
    columns_in_cache,
    expanded,
    joining_blocks,
    make_layout,
    max_shares,
    shares,
)

_THREADS = 256
_WARPS = _THREADS // 32
_OPERATIONS = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "copy_lhs": "Copy",
    "copy_rhs": "Copy",
}
_REDUCTIONS = {"sum": "Total", "mean": "Mean", "max": "Largest", "min": "Smallest"}
_CHOICES = {_REDUCTIONS[name] for name in CHOICES}
#: Of the left operand's row, a share for each of the entries that it has in another matrix.
_SHARE = "share"
#: A sum that is added to what the output has.
_ADDED = "Added"


@dataclass(frozen=True, slots=True)
class _Plan:
    """The kernels and sizes of a product, as its types and shapes decide them."""

    product: Kernel
    join: Kernel
    layout: OperandLayout
    row_bytes: int  # of the result
    part_bytes: int  # of all numbers of a part of a row
    share_bytes: int  # what a share keeps: two parts of rows, and the row that it ends in


@spmm_op.cuda
def _spmm(messages: MessageOperands, shape: Sequence[int], op: str, reduce: str) -> list[Tensor]:
    indptr, _, _, u, e = messages
    out, arg_u, arg_e = outputs(indptr, u, e, shape, reduce)
    _multiply(messages, shape, op, _REDUCTIONS[reduce], out, arg_u, arg_e)
    return [tensor for tensor in (out, arg_u, arg_e) if tensor is not None]


@add_spmm_op.cuda
def _add_spmm(out: Tensor, messages: MessageOperands, op: str) -> None:
    _multiply(messages, list(out.shape[1:]), op, _ADDED, out)


@spmm_shares_op.cuda
def _spmm_shares(indptr: Tensor, indices: Tensor, bounds: Tensor, u: Tensor) -> Tensor:
    shape = u.shape[1:]
    out = u.new_empty((indptr.shape[0] - 1, *shape))
    messages = MessageOperands(indptr, indices, None, u, None)
    _multiply(messages, shape, _SHARE, "Total", out, bounds=bounds)
    return out


def _multiply(
    messages: MessageOperands,
    shape: Sequence[int],
    op: str,
    reduction: str,
    out: Tensor,
    arg_u: Tensor | None = None,
    arg_e: Tensor | None = None,
    bounds: Tensor | None = None,
) -> None:
    """Fill ``out``, and the choices of a reduction that chooses.

    For a mini-batch this takes the host longer than the GPU takes.
    """
    if out.numel() == 0:
        return
    indptr, indices, eids, u, e = messages
    # A lone operand is the left one.
    left, left_ids, left_choice = (e, eids, arg_e) if u is None else (u, indices, arg_u)
    right, right_ids, right_choice = (None, None, None) if u is None else (e, eids, arg_e)
    assert left is not None  # as the public function has seen to
    indptr, left = indptr.contiguous(), left.contiguous()
    left_ids = None if left_ids is None else left_ids.contiguous()
    right_ids = None if right_ids is None else right_ids.contiguous()
    right = None if right is None else right.contiguous()
    entries = (left if left_ids is None else left_ids).shape[0]
    whole = right is None or right.shape[1:].numel() == 1
    tile_bytes, in_cache, row_bytes = columns_in_cache(u, entries, whole)
    plan = _plan(
        op,
        reduction,
        left.dtype,
        indptr.dtype,
        tuple(shape),
        left.shape[1:],
        None if right is None else right.shape[1:],
        left.data_ptr() % VECTOR_BYTES,
        0 if right is None else right.data_ptr() % VECTOR_BYTES,
        tile_bytes,
        row_bytes,
    )
    if plan.layout.expand:
        left = expanded(left, shape)
        right = None if right is None else expanded(right, shape)
    elif row_bytes * left.shape[0] > left.nbytes:
        left = at_lines(left, row_bytes)
    if bounds is not None:
        right = bounds.contiguous()
    device, num_rows = out.device, out.shape[0]
    length = num_rows + entries
    most = max_shares(plan.share_bytes, num_rows * plan.row_bytes)
    share, num_shares = shares(length, plan.row_bytes, device, in_cache, most)
    scratch = torch.empty(num_shares * plan.share_bytes, dtype=torch.uint8, device=device)
    open_rows = scratch.data_ptr()
    parts = open_rows + 8 * num_shares
    request = gpu.struct(
        indptr.data_ptr(), _address(left_ids), _address(right_ids), left.data_ptr(),
        _address(right), out.data_ptr(), _address(left_choice), _address(right_choice), parts,
        parts + 2 * num_shares * plan.part_bytes, open_rows, num_rows, share, num_shares,
        then=plan.layout.numbers,
    )  # fmt: skip
    plan.product(-(-num_shares * plan.layout.tiles // _WARPS), _THREADS, request, device=device)
    blocks = joining_blocks(num_shares, plan.layout.width, _THREADS)
    plan.join(blocks, _THREADS, request, device=device)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.lru_cache(maxsize=4096)
def _plan(
    op: str,
    reduction: str,
    dtype: torch.dtype,
    id_dtype: torch.dtype,
    shape: tuple[int, ...],
    left_shape: tuple[int, ...],
    right_shape: tuple[int, ...] | None,
    left_offset: int,
    right_offset: int,
    tile_bytes: int,
    row_bytes: int,
) -> _Plan:
    layout = make_layout(
        dtype, shape, left_shape, right_shape, left_offset, right_offset, tile_bytes, row_bytes,
        repeating=True,
    )  # fmt: skip
    ids, element = c_type(id_dtype), ELEMENTS[dtype]
    operation, right = ("Mul", "EntryShare") if op == _SHARE else (_OPERATIONS[op], layout.right)
    names = ", ".join(f"dgl_mgpu::{kind}" for kind in (operation, layout.left, right, reduction))
    sizes = f"{layout.vector}, {layout.lanes}, {layout.repeats}"
    part_bytes = layout.width * (8 if dtype == torch.float64 else 4)
    choice_bytes = 4 * layout.width * (reduction in _CHOICES)
    return _Plan(
        Kernel("spmm.cu", f"dgl_mgpu::spmm<{ids}, {element}, {names}, {sizes}>"),
        Kernel("spmm.cu", f"dgl_mgpu::join_parts<{ids}, {element}, dgl_mgpu::{reduction}>"),
        layout,
        row_bytes=layout.width * dtype.itemsize,
        part_bytes=part_bytes,
        share_bytes=8 + 2 * (part_bytes + choice_bytes),
    )

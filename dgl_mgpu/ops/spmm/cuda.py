"""Generalised sparse-dense product on CUDA; see ``kernels/spmm.cu``."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dgl_mgpu.ops import device
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.library import cuda_kernel
from dgl_mgpu.ops.spmm import op as contract
from dgl_mgpu.ops.spmm.layout import (
    ELEMENTS,
    VECTOR_BYTES,
    Layout,
    expanded,
    joining_blocks,
    lanes_in_cache,
    make_layout,
    shares,
    shares_in_room,
)

_THREADS = 256
_WARPS = _THREADS // 32
_OPERATIONS = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}
_REDUCTIONS = {"sum": "Total", "mean": "Mean", "max": "Largest", "min": "Smallest"}
#: A sum that is added to what the output has.
_ADDED = "Added"


@dataclass(frozen=True)
class _Plan:
    """What a product's types and shapes decide."""

    product: Kernel
    join: Kernel
    layout: Layout


@cuda_kernel("spmm")
def _spmm(
    indptr: torch.Tensor,
    indices: torch.Tensor | None,
    eids: torch.Tensor | None,
    u: torch.Tensor | None,
    e: torch.Tensor | None,
    shape: list[int],
    op: str,
    reduce: str,
) -> list[torch.Tensor]:
    out, arg_u, arg_e = contract.outputs(indptr, u, e, shape, reduce)
    _multiply(indptr, indices, eids, u, e, shape, op, _REDUCTIONS[reduce], out, arg_u, arg_e)
    return [found for found in (out, arg_u, arg_e) if found is not None]


@cuda_kernel("add_spmm")
def _add_spmm(
    out: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor | None,
    eids: torch.Tensor | None,
    u: torch.Tensor | None,
    e: torch.Tensor | None,
    op: str,
) -> None:
    _multiply(indptr, indices, eids, u, e, list(out.shape[1:]), op, _ADDED, out)


def _multiply(
    indptr: torch.Tensor,
    indices: torch.Tensor | None,
    eids: torch.Tensor | None,
    u: torch.Tensor | None,
    e: torch.Tensor | None,
    shape: list[int],
    op: str,
    reduction: str,
    out: torch.Tensor,
    arg_u: torch.Tensor | None = None,
    arg_e: torch.Tensor | None = None,
) -> None:
    """Fill ``out``, and what was chosen where the reduction chooses."""
    if out.numel() == 0:
        return
    chooses = arg_u is not None or arg_e is not None
    indptr = indptr.contiguous()
    indices, eids, u, e = [
        None if tensor is None else tensor.contiguous() for tensor in (indices, eids, u, e)
    ]
    # A lone operand is the left one.
    left, left_ids, left_choice = (e, eids, arg_e) if u is None else (u, indices, arg_u)
    right, right_ids, right_choice = (None, None, None) if u is None else (e, eids, arg_e)
    assert left is not None  # as the public function has seen to
    where = indptr.device
    lanes, in_cache = lanes_in_cache(u)
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
        lanes,
    )
    layout = plan.layout
    if layout.expand:
        left = expanded(left, shape)
        right = None if right is None else expanded(right, shape)
    num_rows = indptr.shape[0] - 1
    entries = left if left_ids is None else left_ids
    length, row_bytes = num_rows + entries.shape[0], layout.width * left.element_size()
    # Of a share two parts of rows and the row that it ends in.
    number = 8 if left.dtype == torch.float64 else 4
    share_bytes = 8 + 2 * layout.width * (number + 4 * chooses)
    most = shares_in_room(share_bytes, num_rows * row_bytes)
    share, num_shares = shares(length, row_bytes, where, in_cache, most)
    parts = 2 * num_shares * layout.width
    room = torch.empty(num_shares * share_bytes, dtype=torch.uint8, device=where)
    open_rows = room.data_ptr()
    part_values = open_rows + 8 * num_shares
    request = device.struct(
        indptr,
        left_ids,
        right_ids,
        left,
        right,
        out,
        left_choice,
        right_choice,
        part_values,
        part_values + parts * number,
        open_rows,
        num_rows,
        share,
        num_shares,
        then=layout.numbers,
    )
    plan.product(-(-num_shares * layout.tiles // _WARPS), _THREADS, request, device=where)
    blocks = joining_blocks(num_shares, layout.width, _THREADS)
    plan.join(blocks, _THREADS, request, device=where)


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
    most_lanes: int,
) -> _Plan:
    layout = make_layout(
        dtype, shape, left_shape, right_shape, left_offset, right_offset, most_lanes
    )
    ids, element = c_type(id_dtype), ELEMENTS[dtype]
    kinds = (_OPERATIONS.get(op, "Copy"), layout.left, layout.right, reduction)
    names = ", ".join(f"dgl_mgpu::{kind}" for kind in kinds)
    sizes = f"{layout.vector}, {layout.lanes}"
    return _Plan(
        Kernel("spmm.cu", f"dgl_mgpu::spmm<{ids}, {element}, {names}, {sizes}>"),
        Kernel("spmm.cu", f"dgl_mgpu::join_parts<{ids}, {element}, dgl_mgpu::{reduction}>"),
        layout,
    )

"""Generalised sparse-dense product on CUDA; see ``kernels/spmm.cu``."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from dgl_mgpu.ops import device
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.library import library
from dgl_mgpu.ops.spmm import op as contract

_THREADS = 256
_WARPS = _THREADS // 32
#: Rows and entries that are worth a warp, and warps for a multiprocessor where there are many:
#: it holds a tenth of them at once, so that none is left with nothing to do for long.
_SHORTEST_SHARE, _WARPS_PER_SM = 64, 256
#: Lanes for the columns of a row: more columns are done by other warps, later.
_MOST_LANES = 32
#: Most dimensions of an output's row, where neighbours that the same operands have are one.
_DIMENSIONS = 4
_VECTOR_BYTES = 16

_ELEMENTS = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "dgl_mgpu::Float16",
    torch.bfloat16: "dgl_mgpu::BFloat16",
}
_OPERATIONS = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}
_REDUCTIONS = {"sum": "Total", "max": "Largest", "min": "Smallest"}


@dataclass(frozen=True)
class _Plan:
    """What a product's types and shapes decide.

    Attributes
    ----------
    expand : bool
        Whether the operands must have the shape of the output first.
    layout : tuple of int
        The kernel's ``Product`` from ``width`` on.
    """

    product: Kernel
    join: Kernel
    expand: bool
    tiles: int
    width: int
    layout: tuple[int, ...]


@torch.library.impl(library, "spmm", "CUDA")
def _spmm(
    indptr: torch.Tensor,
    indices: torch.Tensor | None,
    eids: torch.Tensor | None,
    u: torch.Tensor | None,
    e: torch.Tensor | None,
    shape: list[int],
    op: str,
    reduce: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    results = contract.outputs(indptr, u, e, shape, reduce)
    out, arg_u, arg_e = results
    if out.numel() == 0:
        return results
    indptr = indptr.contiguous()
    indices, eids, u, e = (
        None if tensor is None else tensor.contiguous() for tensor in (indices, eids, u, e)
    )
    # A lone operand is the left one.
    left, left_ids, left_choice = (e, eids, arg_e) if u is None else (u, indices, arg_u)
    right, right_ids, right_choice = (None, None, None) if u is None else (e, eids, arg_e)
    assert left is not None  # as the public function has seen to
    plan = _plan(
        op,
        reduce,
        left.dtype,
        indptr.dtype,
        tuple(shape),
        left.shape[1:],
        None if right is None else right.shape[1:],
        _alignment(left),
        _alignment(right),
    )
    if plan.expand:
        left = _expanded(left, shape)
        right = None if right is None else _expanded(right, shape)
    where, num_rows = indptr.device, indptr.shape[0] - 1
    entries = left if left_ids is None else left_ids
    length = num_rows + entries.shape[0]
    most = _WARPS_PER_SM * device.driver.num_sms(where)
    share = max(_SHORTEST_SHARE, -(-length // most))
    shares = -(-length // share)
    # Of a share two parts of rows and the row that it ends in.
    chooses = reduce != "sum"
    number = 8 if left.dtype == torch.float64 else 4
    parts = 2 * shares * plan.width
    room = torch.empty(shares * 8 + parts * (number + 4 * chooses), dtype=torch.uint8, device=where)
    open_rows = room.data_ptr()
    part_values = open_rows + 8 * shares
    request = device.struct(
        indptr,
        left_ids,
        right_ids,
        left,
        right,
        out,
        left_choice if chooses else None,
        right_choice if chooses and right is not None else None,
        part_values,
        part_values + parts * number,
        open_rows,
        num_rows,
        share,
        shares,
        *plan.layout,
    )
    plan.product(-(-shares * plan.tiles // _WARPS), _THREADS, request, device=where)
    plan.join(-(-shares // _WARPS) if shares > 1 else 0, _THREADS, request, device=where)
    return results


def _alignment(operand: torch.Tensor | None) -> int:
    """The largest vector, in bytes, that an operand may be read by."""
    return _VECTOR_BYTES if operand is None else math.gcd(operand.data_ptr(), _VECTOR_BYTES)


def _expanded(operand: torch.Tensor, shape: list[int]) -> torch.Tensor:
    rows, missing = len(operand), len(shape) + 1 - operand.dim()
    aligned = operand.view(rows, *[1] * missing, *operand.shape[1:])
    return aligned.expand(rows, *shape).contiguous()


@functools.lru_cache(maxsize=4096)
def _plan(
    op: str,
    reduce: str,
    dtype: torch.dtype,
    id_dtype: torch.dtype,
    shape: tuple[int, ...],
    left_shape: tuple[int, ...],
    right_shape: tuple[int, ...] | None,
    left_alignment: int,
    right_alignment: int,
) -> _Plan:
    dims = _joined_dimensions(shape, left_shape, right_shape)
    expand = len(dims) > _DIMENSIONS
    if expand:
        left_shape, right_shape = shape, None if right_shape is None else shape
        left_alignment = right_alignment = _VECTOR_BYTES
        dims = _joined_dimensions(shape, left_shape, right_shape)
    width = math.prod(shape)
    run, of_left, of_right = dims[-1]
    entry_scalar = right_shape is not None and math.prod(right_shape) == 1
    vector = math.gcd(
        run * dtype.itemsize,
        left_alignment if of_left else _VECTOR_BYTES,
        right_alignment if of_right and not entry_scalar else _VECTOR_BYTES,
        _VECTOR_BYTES,
    ) // dtype.itemsize  # fmt: skip
    left_kind = "Vectors" if of_left or vector == 1 else "Scalars"
    right_kind = "Vectors" if of_right or vector == 1 else "Scalars"
    if right_shape is None:
        right_kind = "Absent"
    elif entry_scalar:
        right_kind = "EntryScalar"
    lanes = min(_MOST_LANES, 1 << (width // vector - 1).bit_length())
    tiles = -(-width // (vector * lanes))
    ids, element, reduction = c_type(id_dtype), _ELEMENTS[dtype], _REDUCTIONS[reduce]
    kinds = (_OPERATIONS.get(op, "Copy"), left_kind, right_kind, reduction)
    names = ", ".join(f"dgl_mgpu::{kind}" for kind in kinds)
    return _Plan(
        Kernel("spmm.cu", f"dgl_mgpu::spmm<{ids}, {element}, {names}, {vector}, {lanes}>"),
        Kernel("spmm.cu", f"dgl_mgpu::join_parts<{ids}, {element}, dgl_mgpu::{reduction}>"),
        expand,
        tiles,
        width,
        (
            tiles,
            width,
            math.prod(left_shape) * dtype.itemsize,
            0 if right_shape is None else math.prod(right_shape) * dtype.itemsize,
            len(dims),
            *_strides(dims),
        ),
    )


def _joined_dimensions(
    shape: tuple[int, ...], left_shape: tuple[int, ...], right_shape: tuple[int, ...] | None
) -> list[tuple[int, bool, bool]]:
    """The dimensions of the output's rows, outermost first: size, and which operand has it.

    Neighbours that the same operands have are one, and those of size 1 are none.
    """
    dims: list[tuple[int, bool, bool]] = []
    for place in range(-len(shape), 0):
        size = shape[place]
        if size == 1:
            continue
        has_left, has_right = (
            row is not None and -place <= len(row) and row[place] != 1
            for row in (left_shape, right_shape)
        )
        if dims and dims[-1][1:] == (has_left, has_right):
            size *= dims.pop()[0]
        dims.append((size, has_left, has_right))
    return dims or [(1, True, right_shape is not None)]


def _strides(dims: list[tuple[int, bool, bool]]) -> list[int]:
    """Sizes of the dimensions and the operands' strides, as the kernel takes them."""
    table = []
    for operand in (1, 2):
        strides, stride = [], 1
        for dim in reversed(dims):
            strides.append(stride if dim[operand] else 0)
            stride *= dim[0] if dim[operand] else 1
        table.append(strides[::-1])
    padding = [1] * (_DIMENSIONS - len(dims))
    return [
        *(dim[0] for dim in dims), *padding, *table[0], *padding, *table[1], *padding,
    ]  # fmt: skip

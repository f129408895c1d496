"""Attention over the in-edges of nodes on CUDA; see ``kernels/attention.cu``."""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.attention import (
    AttentionOperands,
    AttentionScore,
    Entries,
    attention_of_destinations_op,
    attention_of_sources_op,
    attention_op,
    attention_products_op,
    computed_in,
    outputs,
)
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.spmm_layout import ELEMENTS, VECTOR_BYTES, max_shares, shares

_THREADS = 256
_WARPS = _THREADS // 32
_LANES = 32
#: Columns of a lane up to which it has more of them so that a warp has all heads; and at most.
_FEW_COLUMNS, _MOST_VECTORS = 8, 4
_FORWARD, _DESTINATIONS, _SOURCES = "Forward", "Destinations", "Sources"


@dataclass(frozen=True, slots=True)
class _Plan:
    """The kernels and sizes of a pass, as its types and shapes decide them."""

    attend: Kernel
    join: Kernel
    tiles: int  # warps that a row's heads take
    part_bytes: int  # of what a share has of a row


def can_attend(heads: int, width: int, dtype: torch.dtype) -> bool:
    """Whether kernels have room for rows of this shape."""
    return _lanes(heads, width, dtype, VECTOR_BYTES)[1] <= _MOST_VECTORS


@functools.lru_cache(maxsize=4096)
def _lanes(heads: int, width: int, dtype: torch.dtype, alignment: int) -> tuple[int, int, int, int]:
    """Columns of a vector, vectors of a lane, lanes of a head and heads of a warp."""
    item = dtype.itemsize
    vector = math.gcd(width * item, VECTOR_BYTES, alignment) // item
    vectors, together = -(-width // vector), min(_LANES, _power_of_2(heads))
    lanes = min(_LANES, _power_of_2(vectors))
    while lanes > 1 and lanes * together > _LANES and 2 * vector * vectors <= _FEW_COLUMNS * lanes:
        lanes //= 2
    return vector, _power_of_2(-(-vectors // lanes)), lanes, min(together, _LANES // lanes)


def _power_of_2(count: int) -> int:
    """The least power of two that is not below a count."""
    return 1 << max(0, count - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def _plan(
    kernel_pass: str,
    score: str,
    drops: bool,
    id_dtype: torch.dtype,
    dtype: torch.dtype,
    heads: int,
    width: int,
    alignment: int,
) -> _Plan:
    vector, vectors, lanes, together = _lanes(heads, width, dtype, alignment)
    if vectors > _MOST_VECTORS:
        raise InvalidInputError(
            "compute attention on a GPU",
            f"a head has {width} columns of {dtype}",
            f"pass at most {_MOST_VECTORS * _LANES * vector}",
        )
    columns = vector * vectors
    if kernel_pass == _FORWARD:
        state = columns + 2 + (score == "Additive")
    elif score == "Additive":
        state = 1 + columns * (kernel_pass == _SOURCES)
    else:
        state = columns * (2 if kernel_pass == _SOURCES and score == "Dot" else 1)
    types = (
        f"{c_type(id_dtype)}, {ELEMENTS[dtype]}, dgl_mgpu::{score}, dgl_mgpu::{kernel_pass},"
        f" {'true' if drops else 'false'}, {vector}, {vectors}, {lanes}, {together}"
    )
    attend, join = (
        Kernel("attention.cu", f"dgl_mgpu::{name}<{types}>")
        for name in ("attend", "join_attention")
    )
    tiles = -(-heads // together)
    part_bytes = tiles * state * lanes * together * computed_in(dtype).itemsize
    return _Plan(attend, join, tiles, part_bytes)


def _launch(
    kernel_pass: str,
    entries: Entries,
    operands: AttentionOperands,
    key: Tensor | None,
    score: AttentionScore,
    out: Tensor | None = None,
    left_out: Tensor | None = None,
    numbers: Tensor | None = None,
    bias: Tensor | None = None,
    grad: Tensor | None = None,
    products: Tensor | None = None,
) -> Tensor | None:
    """Fill the outputs of a pass; returns shares of the vector's gradient, if it has one."""
    indptr, indices, eids = (None if it is None else it.contiguous() for it in entries)
    assert indptr is not None
    assert indices is not None
    values, left, right, vector = operands
    device, (_, heads, width) = values.device, values.shape
    rows = (values, left, right, vector, bias, grad, out, left_out)
    alignment = VECTOR_BYTES
    for tensor in rows:
        if tensor is not None and tensor.dtype == values.dtype and tensor.dim() > 1:
            alignment = math.gcd(alignment, tensor.data_ptr())
    kind = {"additive": "Additive", "dynamic": "Dynamic"}.get(score.kind)
    kind = kind or ("DotOfValues" if left is None else "Dot")
    plan = _plan(
        kernel_pass, kind, key is not None, indptr.dtype, values.dtype, heads, width, alignment
    )
    num_rows = indptr.shape[0] - 1
    share_bytes = 8 + 2 * plan.part_bytes
    row_bytes = heads * width * values.itemsize
    most = max_shares(share_bytes, num_rows * row_bytes)
    share, num_shares = shares(num_rows + len(indices), row_bytes, device, most=most)
    shares_of_vector = None
    if vector is not None and kernel_pass == _DESTINATIONS:
        numbers = shares_of_vector = torch.zeros(
            num_shares, heads, width, dtype=computed_in(values.dtype), device=device
        )
    scratch = torch.empty(num_shares * share_bytes, dtype=torch.uint8, device=device)
    open_rows = scratch.data_ptr()
    request = gpu.struct(
        indptr, indices, eids, values, left, right, vector, bias, grad, products, key,
        int(score.dropout * 2**32), _bits(1 / (1 - score.dropout)), _bits(score.slope),
        _bits(score.scale), out, left_out, numbers, num_rows, heads, width, plan.tiles, share,
        num_shares, open_rows + 8 * num_shares, open_rows,
    )  # fmt: skip
    warps = num_shares * plan.tiles
    plan.attend(-(-warps // _WARPS), _THREADS, request, device=device)
    if num_shares > 2:  # two are done by the first of them
        plan.join(warps, _THREADS, request, device=device)
    return shares_of_vector


def _bits(value: float) -> int:
    bits: int
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return bits


@attention_op.cuda
def _attention(
    entries: Entries,
    operands: AttentionOperands,
    bias: Tensor | None,
    key: Tensor | None,
    score: AttentionScore,
) -> tuple[Tensor, Tensor]:
    out, sums = outputs(entries, operands)
    if out.numel():
        _launch(_FORWARD, entries, operands, key, score, out, numbers=sums, bias=bias)
    return out, sums


@functools.lru_cache(maxsize=256)
def _products_kernel(dtype: torch.dtype, width: int, alignment: int) -> tuple[Kernel, int]:
    """The kernel, and lanes of a head."""
    vector = math.gcd(width * dtype.itemsize, VECTOR_BYTES, alignment) // dtype.itemsize
    lanes = min(_LANES, _power_of_2(-(-width // vector)))
    name = f"dgl_mgpu::multiply_gradients<{ELEMENTS[dtype]}, {vector}, {lanes}>"
    return Kernel("attention.cu", name), lanes


@attention_products_op.cuda
def _attention_products(
    grad: Tensor, out: Tensor, sums: Tensor, right: Tensor | None, bias: Tensor | None
) -> Tensor:
    num_dst, heads, width = grad.shape
    products = sums.new_empty(num_dst, heads, 4)
    if not products.numel():
        return products
    alignment = VECTOR_BYTES
    for tensor in (grad, out, bias):
        alignment = alignment if tensor is None else math.gcd(alignment, tensor.data_ptr())
    kernel, lanes = _products_kernel(grad.dtype, width, alignment)
    count = num_dst * heads
    kernel(
        -(-count * lanes // _THREADS), _THREADS, grad, out, sums, right, bias, products, count,
        heads, width, device=grad.device,
    )  # fmt: skip
    return products


@attention_of_destinations_op.cuda
def _attention_of_destinations(
    entries: Entries,
    operands: AttentionOperands,
    grad: Tensor,
    products: Tensor,
    key: Tensor | None,
    score: AttentionScore,
) -> list[Tensor]:
    right, vector = operands.right, operands.vector
    of_right = torch.empty_like(right)
    if not grad.numel():
        return [of_right.zero_(), *([] if vector is None else [torch.zeros_like(vector)])]
    out, numbers = (None, of_right) if score.kind == "additive" else (of_right, None)
    of_vector = _launch(
        _DESTINATIONS, entries, operands, key, score, out, numbers=numbers, grad=grad,
        products=products,
    )  # fmt: skip
    return [of_right] if of_vector is None else [of_right, of_vector.sum(0).to(right.dtype)]


@attention_of_sources_op.cuda
def _attention_of_sources(
    entries: Entries,
    operands: AttentionOperands,
    grad: Tensor,
    products: Tensor,
    key: Tensor | None,
    score: AttentionScore,
) -> list[Tensor]:
    values, left = operands.values, operands.left
    of_values, of_left = torch.empty_like(values), None if left is None else torch.empty_like(left)
    if not values.numel():
        return [of_values, *([] if of_left is None else [of_left.zero_()])]
    left_out, numbers = (None, of_left) if score.kind == "additive" else (of_left, None)
    _launch(
        _SOURCES, entries, operands, key, score, of_values, left_out, numbers, grad=grad,
        products=products,
    )  # fmt: skip
    return [of_values, *([] if of_left is None else [of_left])]

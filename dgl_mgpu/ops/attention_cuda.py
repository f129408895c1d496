"""Attention over the in-edges of nodes on CUDA.

See ``kernels/attention.cu``, and ``kernels/attention_rows.cu`` for what comes before and after.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.attention import (
    AttentionGradient,
    AttentionOperands,
    AttentionScore,
    Draws,
    EdgeGradients,
    EdgeTerms,
    Entries,
    add_attention_op,
    attention_backward_op,
    attention_op,
    attention_products_op,
    attention_vectors_backward_op,
    attention_vectors_op,
    computed_in,
    gradients,
    outputs,
    products_of,
)
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.spmm_layout import ELEMENTS, VECTOR_BYTES, max_shares, shares

_THREADS = 256
_WARPS = _THREADS // 32
_LANES = 32
#: Columns of a lane up to which it has more of them so that a warp has all heads; and at most.
_FEW_COLUMNS, _MOST_VECTORS = 8, 4
#: Memory for the parts of rows that several warps share, of what a sparse product takes for them at
#: most: attention saves memory, and that would be seen.
_SCRATCH = 0.2
#: For rounding, of a bound.
_MARGIN = 1.01
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
    return _lanes(heads, width, dtype)[1] <= _MOST_VECTORS


@functools.lru_cache(maxsize=4096)
def _lanes(heads: int, width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Columns of a vector, vectors of a lane, lanes of a head and heads of a warp."""
    vector = _vector_of(width, dtype)
    vectors, together = -(-width // vector), min(_LANES, _power_of_2(heads))
    lanes = min(_LANES, _power_of_2(vectors))
    while lanes > 1 and lanes * together > _LANES:
        more = _power_of_2(-(-vectors // (lanes // 2)))
        if more > _MOST_VECTORS or more * vector > _FEW_COLUMNS:
            break
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
    has_terms: bool,
    id_dtype: torch.dtype,
    dtype: torch.dtype,
    heads: int,
    width: int,
) -> _Plan:
    vector, vectors, lanes, together = _lanes(heads, width, dtype)
    if vectors > _MOST_VECTORS:
        raise InvalidInputError(
            "compute attention on a GPU",
            f"a head has {width} columns of {dtype}",
            f"pass at most {_MOST_VECTORS * _LANES * vector}",
        )
    columns = vector * vectors
    behind = {
        (_FORWARD, score): 2 + (score == "Additive"),
        (_SOURCES, "Additive"): 1,
        (_SOURCES, "Dot"): columns,
    }.get((kernel_pass, score), 0)
    state = columns + behind
    types = (
        f"{c_type(id_dtype)}, {ELEMENTS[dtype]}, dgl_mgpu::{score}, dgl_mgpu::{kernel_pass},"
        f" {_c_bool(drops)}, {_c_bool(has_terms)}, {vector}, {vectors}, {lanes}, {together}"
    )
    attend, join = (
        Kernel("attention.cu", f"dgl_mgpu::{name}<{types}>")
        for name in ("attend", "join_attention")
    )
    tiles = -(-heads // together)
    part_bytes = tiles * state * lanes * together * computed_in(dtype).itemsize
    return _Plan(attend, join, tiles, part_bytes)


def _c_bool(value: bool) -> str:
    return "true" if value else "false"


class _Outputs(NamedTuple):
    """What a pass writes, as ``kernels/attention.cu`` names it."""

    out: Tensor | None = None
    left_out: Tensor | None = None
    numbers: Tensor | None = None
    right_sums: Tensor | None = None
    right_bad: Tensor | None = None
    added_rows: int = 0
    of_edge_scores: Tensor | None = None
    of_edge_weights: Tensor | None = None


def _launch(
    kernel_pass: str,
    entries: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    draws: Draws,
    score: AttentionScore,
    written: _Outputs,
    bias: Tensor | None = None,
    gradient: AttentionGradient | None = None,
) -> Tensor | None:
    """Fill the outputs of a pass; returns shares of the vector's gradient, if it has one."""
    indptr, indices, eids = (None if it is None else it.contiguous() for it in entries)
    assert indptr is not None
    assert indices is not None
    values, left, right, vector = operands
    right = values if right is None else right
    device, (_, heads, width) = values.device, values.shape
    kind = {"additive": "Additive", "gatv2": "GATv2"}.get(score.kind)
    kind = kind or ("DotOfValues" if left is None else "Dot")
    # Of no edges there are no addresses to read.
    scores, weights = (it if it is not None and it.numel() else None for it in terms)
    has_terms = scores is not None or weights is not None
    plan = _plan(
        kernel_pass,
        kind,
        draws.key is not None,
        has_terms,
        indptr.dtype,
        values.dtype,
        heads,
        width,
    )
    grad, products, exponents = (None, None, None) if gradient is None else gradient
    num_rows = indptr.shape[0] - 1
    share_bytes = 8 + 2 * plan.part_bytes
    row_bytes = heads * width * values.itemsize
    most = max_shares(share_bytes, int(_SCRATCH * num_rows * row_bytes))
    share, num_shares = shares(num_rows + len(indices), row_bytes, device, most=most)
    shares_of_vector, numbers = None, written.numbers
    if vector is not None and kernel_pass == _DESTINATIONS:
        numbers = shares_of_vector = torch.empty(
            num_shares, heads, width, dtype=computed_in(values.dtype), device=device
        )
    scratch = torch.empty(num_shares * share_bytes, dtype=torch.uint8, device=device)
    open_rows = scratch.data_ptr()
    request = gpu.struct(
        indptr, indices, eids, values, left, right, vector, bias, scores, weights,
        _columns(scores), _columns(weights), grad, products, exponents, *draws,
        int(score.dropout * 2**32), _bits(1 / (1 - score.dropout)), _bits(score.slope),
        _bits(score.scale), written.out, written.left_out, numbers, written.right_sums,
        written.right_bad, written.of_edge_scores, written.of_edge_weights, num_rows,
        written.added_rows, heads, width, plan.tiles, share, num_shares,
        open_rows + 8 * num_shares, open_rows,
    )  # fmt: skip
    warps = num_shares * plan.tiles
    plan.attend(-(-warps // _WARPS), _THREADS, request, device=device)
    if num_shares > 2:  # what two have of a row is done by the first of them
        plan.join(warps, _THREADS, request, device=device)
    return shares_of_vector


def _columns(terms: Tensor | None) -> int:
    return 0 if terms is None else terms.shape[1]


def _vector_of(width: int, dtype: torch.dtype) -> int:
    """Columns of a head that are read at once."""
    return math.gcd(width * dtype.itemsize, VECTOR_BYTES) // dtype.itemsize


def _aligned(tensors: Any) -> Any:
    """A group of tensors, those copied that do not begin where vectors may."""
    return type(tensors)(*map(_aligned_one, tensors))


def _aligned_one(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.data_ptr() % VECTOR_BYTES == 0:
        return tensor
    return tensor.clone()


@functools.lru_cache(maxsize=256)
def _bits(value: float) -> int:
    bits: int
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return bits


@attention_op.cuda
def _attention(
    entries: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    bias: Tensor | None,
    draws: Draws,
    score: AttentionScore,
) -> tuple[Tensor, Tensor]:
    out, kept = outputs(entries, operands)
    if out.numel():
        operands, bias = _aligned(operands), _aligned_one(bias)
        written = _Outputs(out, numbers=kept)
        _launch(_FORWARD, entries, operands, terms, draws, score, written, bias)
    return out, kept


@add_attention_op.cuda
def _add_attention(
    out: Tensor,
    kept: Tensor,
    entries: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    bias: Tensor | None,
    draws: Draws,
    score: AttentionScore,
) -> None:
    if out.numel():
        operands, bias = _aligned(operands), _aligned_one(bias)
        written = _Outputs(out, numbers=kept, added_rows=len(out))
        _launch(_FORWARD, entries, operands, terms, draws, score, written, bias)


@attention_products_op.cuda
def _attention_products(
    grad: Tensor,
    out: Tensor,
    kept: Tensor,
    right: Tensor | None,
    bias: Tensor | None,
    score: AttentionScore,
) -> tuple[Tensor, Tensor]:
    num_dst, heads, width = grad.shape
    products, exponents = products_of(grad, kept, score)
    count = num_dst * heads
    if not count:
        return products, exponents
    if not width:  # nothing is read of them
        return products.zero_(), exponents.zero_()
    kernel, lanes = _kernel_of_heads("multiply_gradients", grad.dtype, width)
    kernel(
        -(-count * lanes // _THREADS), _THREADS, _aligned_one(grad), _aligned_one(out), kept, right,
        _aligned_one(bias), products, exponents, count, heads, width,
        _MARGIN / (1 - score.dropout) * max(1.0, abs(score.slope)), device=grad.device,
    )  # fmt: skip
    return products, exponents


@attention_backward_op.cuda
def _attention_backward(
    by_destination: Entries,
    by_source: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    gradient: AttentionGradient,
    of_terms: EdgeGradients,
    draws: Draws,
    score: AttentionScore,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = gradients(operands)
    grad = gradient.grad
    if not grad.numel() or not operands.values.numel():
        for tensor in found:
            tensor.zero_()
        return found
    num_dst = len(grad)
    of_values, of_left, of_right, of_vector = (
        None if operand is None else it for operand, it in zip(operands, found, strict=True)
    )
    operands = _aligned(operands)
    gradient = gradient._replace(grad=_aligned_one(grad))  # type: ignore[arg-type]
    if score.kind == "additive":
        assert of_right is not None
        count = of_right.numel()
        zeros = torch.zeros(9 * count, dtype=torch.uint8, device=grad.device)
        sums, bad = zeros[: 8 * count].view(torch.int64), zeros[8 * count :]
        written = _Outputs(of_values, None, of_left, sums, bad, 0, *of_terms)
        _launch(_SOURCES, by_source, operands, terms, draws, score, written, gradient=gradient)
        name = "double" if of_right.dtype == torch.float64 else "float"
        kernel = Kernel("attention_rows.cu", f"dgl_mgpu::scale_sums<{name}>")
        kernel(
            -(-count // _THREADS), _THREADS, sums, bad, gradient.exponents, of_right, count,
            device=grad.device,
        )  # fmt: skip
        return found
    assert of_values is not None
    # Where destinations are sources, their part is there when the sources' is added to it.
    is_shared = of_right is None
    written = _Outputs(of_values[:num_dst] if of_right is None else of_right)
    shares_of_vector = _launch(
        _DESTINATIONS, by_destination, operands, terms, draws, score, written, gradient=gradient
    )
    if of_vector is not None:
        assert shares_of_vector is not None
        of_vector.copy_(shares_of_vector.sum(0))
    added = num_dst if is_shared else 0
    written = _Outputs(of_values, of_left, None, None, None, added, *of_terms)
    _launch(_SOURCES, by_source, operands, terms, draws, score, written, gradient=gradient)
    return found


#: Blocks for a multiprocessor of kernels that go over all values once.
_BLOCKS_A_MULTIPROCESSOR = 8


def _blocks_over(count: int, device: torch.device) -> int:
    """Blocks of a kernel that goes over so many vectors of values."""
    most = _BLOCKS_A_MULTIPROCESSOR * gpu.driver.num_sms(device)
    return max(1, min(most, -(-count // _THREADS)))


@attention_vectors_op.cuda
def _attention_vectors(values: Tensor, vectors: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
    values = _aligned_one(values)  # type: ignore[assignment]
    num_src, heads, width = values.shape
    left, right = vectors.new_zeros(num_src, heads), vectors.new_zeros(num_dst, heads)
    if values.numel():
        kernel, lanes = _kernel_of_heads("multiply_vectors", values.dtype, width)
        count = num_src * heads
        kernel(
            -(-count * lanes // _THREADS), _THREADS, values, vectors.contiguous(), left, right,
            count, num_dst * heads, heads, width, device=values.device,
        )  # fmt: skip
    return left, right


@attention_vectors_backward_op.cuda
def _attention_vectors_backward(
    of_values: Tensor, values: Tensor, of_left: Tensor, of_right: Tensor | None, vectors: Tensor
) -> Tensor:
    num_src, heads, width = values.shape
    if not values.numel():
        return torch.zeros_like(vectors)
    values, added = _aligned_one(values), _aligned_one(of_values)  # type: ignore[assignment]
    assert added is not None
    vector = _vector_of(width, values.dtype)
    kernel = Kernel(
        "attention_rows.cu", f"dgl_mgpu::fold_vectors<{ELEMENTS[values.dtype]}, {vector}>"
    )
    blocks = _blocks_over(values.numel() // vector, values.device)
    shares_of_vectors = torch.empty(
        blocks, *vectors.shape, dtype=vectors.dtype, device=values.device
    )
    num_dst = 0 if of_right is None else len(of_right)
    kernel(
        blocks, _THREADS, values, of_left, of_right, vectors.contiguous(), added,
        shares_of_vectors, num_src, num_dst, heads, width, device=values.device,
    )  # fmt: skip
    if added is not of_values:
        of_values.copy_(added)
    return shares_of_vectors.sum(0)


@functools.lru_cache(maxsize=256)
def _kernel_of_heads(name: str, dtype: torch.dtype, width: int) -> tuple[Kernel, int]:
    """A kernel with a group of lanes for each head, and the number of these."""
    vector = _vector_of(width, dtype)
    lanes = min(_LANES, _power_of_2(-(-width // vector)))
    types = f"{ELEMENTS[dtype]}, {vector}, {lanes}"
    return Kernel("attention_rows.cu", f"dgl_mgpu::{name}<{types}>"), lanes

"""An operation on two operands' rows for every edge, on CUDA; see ``kernels/sddmm.cu``."""

from __future__ import annotations

import functools
import math

import torch

from dgl_mgpu.ops import device
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.library import cuda_kernel
from dgl_mgpu.ops.sddmm import op as contract

_THREADS = 256
#: What a block has under way at once: vectors of the output of a thread, dot products of lanes.
_VECTORS, _PRODUCTS = 4, 2
#: Vectors of each operand that a lane has of a dot product, until there are a warp's.
_LANE_VECTORS = 2
_WARP = 32
_ELEMENTS = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "dgl_mgpu::Float16",
    torch.bfloat16: "dgl_mgpu::BFloat16",
}
#: As kernels number them.
_OPERATIONS = {"copy_lhs": 0, "copy_rhs": 0, "add": 1, "sub": 2, "mul": 3, "div": 4, "dot": 5}


@functools.cache
def _kernel(name: str, ids: torch.dtype, features: torch.dtype, elements: int) -> Kernel:
    types = f"{c_type(ids)}, {_ELEMENTS[features]}, {elements}"
    return Kernel("sddmm.cu", f"dgl_mgpu::{name}<{types}>")


@functools.cache
def _offsets(
    left: tuple[int, ...], right: tuple[int, ...], reduced: int, where: torch.device
) -> torch.Tensor:
    """Which columns of the operands each column of the output comes from: the first of ``reduced``
    ones of a dot product.

    Kept for good: models have few shapes.
    """
    shape = torch.broadcast_shapes(left, right)
    columns = [
        reduced * torch.arange(math.prod(each), dtype=torch.int32).view(each).expand(shape)
        for each in (left, right)
    ]
    return torch.stack(columns).to(where)


@cuda_kernel("sddmm")
def _sddmm(
    src: torch.Tensor,
    dst: torch.Tensor,
    lhs: torch.Tensor | None,
    rhs: torch.Tensor | None,
    op: str,
    lhs_target: str,
    rhs_target: str,
) -> torch.Tensor:
    left, left_target = (rhs, rhs_target) if op == "copy_rhs" else (lhs, lhs_target)
    right, right_target = (None, "e") if op.startswith("copy") else (rhs, rhs_target)
    assert left is not None
    num_edges = src.numel()
    out = left.new_empty((num_edges, *contract.out_shape(op, lhs, rhs)))
    if out.numel() == 0:
        return out
    columns = out.numel() // num_edges
    left_shape = tuple(left.shape[1:])
    right_shape = left_shape if right is None else tuple(right.shape[1:])
    reduced = left_shape[-1] if op == "dot" else 1
    if reduced == 0:
        return out.zero_()
    offsets = None
    if left_shape != right_shape:
        outer = slice(0, -1 if op == "dot" else None)
        offsets = _offsets(left_shape[outer], right_shape[outer], reduced, src.device)
    lanes = 1
    if op == "dot":
        elements = _elements(reduced, left, right)
        while lanes < _WARP and lanes * _LANE_VECTORS * elements < reduced:
            lanes *= 2
        name, pieces, at_once = "sddmm_dot", columns, _PRODUCTS * _THREADS // lanes
    else:
        elements = 1 if offsets is not None else _elements(columns, left, right, out)
        name, pieces, at_once = "sddmm", columns // elements, _VECTORS * _THREADS
    block_edges = max(1, at_once // pieces)
    ids = {"u": src, "e": None, "v": dst}
    request = device.struct(
        left, ids[left_target], math.prod(left_shape),
        right, ids[right_target], math.prod(right_shape),
        out, num_edges, columns, offsets, _OPERATIONS[op], reduced, lanes, block_edges,
    )  # fmt: skip
    kernel = _kernel(name, src.dtype, out.dtype, elements)
    kernel(-(-num_edges // block_edges), _THREADS, request, device=src.device)
    return out


def _elements(count: int, first: torch.Tensor, *others: torch.Tensor | None) -> int:
    """How many elements make one vector, of up to 16 bytes, in rows of so many."""
    addresses = [each.data_ptr() for each in others if each is not None]
    return math.gcd(16, count * first.itemsize, first.data_ptr(), *addresses) // first.itemsize

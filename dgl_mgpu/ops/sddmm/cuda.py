"""An operation on two operands' rows for every edge, on CUDA; see ``kernels/sddmm.cu``."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.sddmm import op as contract
from dgl_mgpu.ops.sddmm.op import sddmm_op

_THREADS = 256
#: What a block has under way at once: vectors of the output of a thread, dot products of lanes.
_VECTORS, _PRODUCTS = 4, 2
#: Vectors of each operand that a lane has of a dot product, until there are a warp's.
_LANE_VECTORS = 2
_WARP = 32
_VECTOR_BYTES = 16
_ELEMENTS = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "dgl_mgpu::Float16",
    torch.bfloat16: "dgl_mgpu::BFloat16",
}
#: As kernels number them.
_OPERATIONS = {"copy_lhs": 0, "copy_rhs": 0, "add": 1, "sub": 2, "mul": 3, "div": 4, "dot": 5}


@functools.cache
def _offsets(
    left: tuple[int, ...], right: tuple[int, ...], reduced: int, device: torch.device
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
    return torch.stack(columns).to(device)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the operands' types and shapes decide.

    Attributes
    ----------
    kernel : Kernel
    shape : tuple of int
        Of an edge's result.
    columns, left_columns, right_columns : int
        Of a result, and of the operands' rows.
    offsets : Tensor or None
        See :func:`_offsets`; None where all have the same columns.
    reduced, lanes : int
        Numbers of a dot product, and lanes that share one.
    block_edges : int
        That a block has under way.
    """

    kernel: Kernel
    shape: tuple[int, ...]
    columns: int
    left_columns: int
    right_columns: int
    offsets: torch.Tensor | None
    reduced: int
    lanes: int
    block_edges: int


@sddmm_op.cuda
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
    device, num_edges = src.device, src.shape[0]
    left_address = left.data_ptr()
    right_address = 0 if right is None else right.data_ptr()
    plan = _plan(
        op,
        left.dtype,
        src.dtype,
        left.shape[1:],
        left.shape[1:] if right is None else right.shape[1:],
        math.gcd(_VECTOR_BYTES, left_address, right_address),
        device,
    )
    out = left.new_empty((num_edges, *plan.shape))
    if out.numel() == 0:
        return out
    if plan.reduced == 0:
        return out.zero_()
    ids = {"u": src.data_ptr(), "e": 0, "v": dst.data_ptr()}
    request = gpu.struct(
        left_address, ids[left_target], plan.left_columns,
        right_address, ids[right_target], plan.right_columns,
        out.data_ptr(), num_edges, plan.columns,
        0 if plan.offsets is None else plan.offsets.data_ptr(),
        _OPERATIONS[op], plan.reduced, plan.lanes, plan.block_edges,
    )  # fmt: skip
    plan.kernel(-(-num_edges // plan.block_edges), _THREADS, request, device=device)
    return out


@functools.lru_cache(maxsize=4096)
def _plan(
    op: str,
    dtype: torch.dtype,
    id_dtype: torch.dtype,
    left_shape: tuple[int, ...],
    right_shape: tuple[int, ...],
    alignment: int,
    device: torch.device,
) -> _Plan:
    """For operands both of which begin at multiples of ``alignment`` bytes."""
    shape = contract.out_shape(op, left_shape, right_shape)
    columns = math.prod(shape)
    reduced, offsets, lanes = left_shape[-1] if op == "dot" else 1, None, 1
    if left_shape != right_shape:
        outer = slice(0, -1 if op == "dot" else None)
        offsets = _offsets(left_shape[outer], right_shape[outer], reduced, device)
    # How many make one vector, of up to 16 bytes.
    of_one = reduced if op == "dot" else 1 if offsets is not None else columns
    elements = max(1, math.gcd(alignment, of_one * dtype.itemsize) // dtype.itemsize)
    if op == "dot":
        while lanes < _WARP and lanes * _LANE_VECTORS * elements < reduced:
            lanes *= 2
        name, pieces, at_once = "sddmm_dot", columns, _PRODUCTS * _THREADS // lanes
    else:
        name, pieces, at_once = "sddmm", columns // elements, _VECTORS * _THREADS
    types = f"{c_type(id_dtype)}, {_ELEMENTS[dtype]}, {elements}"
    return _Plan(
        Kernel("sddmm.cu", f"dgl_mgpu::{name}<{types}>"),
        shape,
        columns,
        math.prod(left_shape),
        math.prod(right_shape),
        offsets,
        reduced,
        lanes,
        block_edges=max(1, at_once // max(1, pieces)),
    )

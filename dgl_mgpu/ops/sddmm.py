"""An operation on two operands' rows for every edge (SDDMM); see ``kernels/sddmm.cu``."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import cpu
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import DTYPES, check_ids
from dgl_mgpu.ops.cpu import AHEAD, inline, kernel, load_id, prefetch_row
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.library import Operator, call
from dgl_mgpu.ops.spmm import address, full_rows, matrix, repeats
from dgl_mgpu.ops.spmm_layout import ELEMENTS, VECTOR_BYTES

OPERATIONS = ("add", "sub", "mul", "div", "dot", "copy_lhs", "copy_rhs")
TARGETS = ("u", "e", "v")


class EdgeOperation(NamedTuple):
    """The operation as :func:`sddmm` takes it."""

    src: Tensor
    dst: Tensor
    lhs: Tensor | None
    rhs: Tensor | None
    op: str
    lhs_target: str
    rhs_target: str

    def operands(self) -> tuple[Tensor, Tensor]:
        """Both operands; what a copy reads stands for the other, too."""
        left = self.rhs if self.op == "copy_rhs" else self.lhs
        right = left if self.op.startswith("copy") else self.rhs
        assert left is not None and right is not None  # the public function has checked it
        return left, right


@Operator
def sddmm_op(operation: EdgeOperation) -> Tensor:
    left, right = operation.operands()
    return left.new_empty(
        operation.src.shape[0], *out_shape(operation.op, left.shape[1:], right.shape[1:])
    )


def out_shape(
    op: str, left_shape: tuple[int, ...], right_shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Shape of an edge's result, of operands' rows that fit."""
    if left_shape == right_shape:
        shape = tuple(left_shape)
    else:
        shape = tuple(torch.broadcast_shapes(left_shape, right_shape))
    return (*shape[:-1], 1) if op == "dot" else shape


def sddmm(
    src: Tensor,
    dst: Tensor,
    lhs: Tensor | None,
    rhs: Tensor | None,
    op: str,
    lhs_target: str = "u",
    rhs_target: str = "v",
) -> Tensor:
    """Compute ``op(lhs row, rhs row)`` for every edge.

    Parameters
    ----------
    src, dst : Tensor, int32 or int64, shape (num_edges,)
        The edges' ends, which are rows of the operands that are read by them: a graph's, so not
        checked.
    lhs, rhs : Tensor, float32, float64, float16 or bfloat16, shape (rows, *shape)
        Operands of one dtype, whose shapes broadcast from the right.  Half types are computed in
        float32.  What ``copy_lhs`` or ``copy_rhs`` does not read may be None.
    op : str
        'add', 'sub', 'mul', 'div', 'dot' (over the last dimension, which becomes 1), 'copy_lhs' or
        'copy_rhs'.
    lhs_target, rhs_target : str
        Row that edge ``i`` reads: 'u' for ``src[i]``, 'e' for ``i``, 'v' for ``dst[i]``.

    Returns
    -------
    Tensor, dtype of the operands, shape (num_edges, *shape)

    Raises
    ------
    InvalidInputError
        If a name is unknown or dtypes, shapes or devices do not fit.
    """
    action = _action(op, lhs_target, rhs_target)
    if op not in OPERATIONS:
        raise InvalidInputError(
            action, f"there is no op={op!r}", f"pass one of {', '.join(OPERATIONS)}"
        )
    if lhs_target not in TARGETS or rhs_target not in TARGETS:
        raise InvalidInputError(
            action,
            f"lhs_target is {lhs_target!r} and rhs_target is {rhs_target!r}",
            f"pass one of {', '.join(TARGETS)}",
        )
    src = check_ids(src, action)
    dst = check_ids(dst, action, src.device)
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise InvalidInputError(
            action,
            f"there are {len(src)} sources of {src.dtype}, but {len(dst)} destinations of "
            f"{dst.dtype}",
            "pass as many of both, of one dtype",
        )
    if op != "copy_rhs":
        lhs = _checked_operand(lhs, "lhs", lhs_target, src, action)
    if op != "copy_lhs":
        rhs = _checked_operand(rhs, "rhs", rhs_target, src, action)
    if op not in ("copy_lhs", "copy_rhs"):
        assert lhs is not None and rhs is not None
        _check_pair(lhs, rhs, op, action)
    return call("sddmm", (src, dst, lhs, rhs), op, lhs_target, rhs_target)


@functools.lru_cache(maxsize=256)
def _action(op: str, lhs_target: str, rhs_target: str) -> str:
    return f"compute {op} of '{lhs_target}' and '{rhs_target}' for every edge"


def _checked_operand(
    operand: Tensor | None, name: str, target: str, src: Tensor, action: str
) -> Tensor:
    if operand is None:
        raise InvalidInputError(
            action, f"{name} is None", f"pass {name}, which the operation reads"
        )
    if operand.dtype not in DTYPES or operand.dim() == 0 or operand.device != src.device:
        raise InvalidInputError(
            action,
            f"{name} has shape {tuple(operand.shape)} and dtype {operand.dtype} on "
            f"{operand.device}",
            f"pass rows of float32, float64, float16 or bfloat16 on {src.device}",
        )
    if target == "e" and operand.shape[0] != src.shape[0]:
        raise InvalidInputError(
            action,
            f"{name} has {len(operand)} rows, but there are {len(src)} edges",
            "pass a row for each edge",
        )
    return operand.contiguous()


def _check_pair(lhs: Tensor, rhs: Tensor, op: str, action: str) -> None:
    if lhs.dtype != rhs.dtype:
        raise InvalidInputError(
            action,
            f"lhs has dtype {lhs.dtype} and rhs has dtype {rhs.dtype}",
            "pass both in one dtype",
        )
    left, right = lhs.shape[1:], rhs.shape[1:]
    if op == "dot" and (not left or not right or left[-1] != right[-1]):
        raise InvalidInputError(
            action,
            f"the rows have shapes {tuple(left)} and {tuple(right)}",
            "pass rows whose last dimension is the same",
        )
    if left != right and any(
        a != b and a != 1 and b != 1 for a, b in zip(reversed(left), reversed(right), strict=False)
    ):
        raise InvalidInputError(
            action,
            f"the rows have shapes {tuple(left)} and {tuple(right)}",
            "pass shapes that broadcast from the right",
        )


#: Edges that are worth waking a thread for.
_GRAIN = 512
#: Partial sums of a dot product, in float64: vectors, and as exact as pairwise sums in float32.
_PARTS = 16
_ADD, _SUB, _MUL, _DIV, _DOT = range(5)


@inline
def _dot(left: np.ndarray, right: np.ndarray, parts: np.ndarray) -> float:
    parts[:] = 0
    whole = len(left) // _PARTS * _PARTS
    for first in range(0, whole, _PARTS):
        for part in range(_PARTS):
            parts[part] += np.float64(left[first + part]) * right[first + part]
    for place in range(whole, len(left)):
        parts[place - whole] += np.float64(left[place]) * right[place]
    total = parts[0]
    for part in range(1, _PARTS):
        total += parts[part]
    return total


@kernel
def _sddmm(
    begin: int, end: int, left: np.ndarray, left_ids: int, right: np.ndarray, right_ids: int,
    id_width: int, op: int, repeat: int, out: np.ndarray,
) -> None:  # fmt: skip
    """Edges ``[begin, end)``; ids are addresses of arrays, 0 where an edge's number is the row.

    Each column of ``right`` goes with ``repeat`` columns of ``left``; of a dot product both have
    ``repeat`` for each of the output.
    """
    parts = np.empty(_PARTS, np.float64)
    for edge in range(begin, end):
        if edge + AHEAD < end:
            if left_ids != 0:
                prefetch_row(left, load_id(left_ids, edge + AHEAD, id_width))
            if right_ids != 0:
                prefetch_row(right, load_id(right_ids, edge + AHEAD, id_width))
        first = left[load_id(left_ids, edge, id_width) if left_ids != 0 else edge]
        second = right[load_id(right_ids, edge, id_width) if right_ids != 0 else edge]
        result = out[edge]
        if op == _DOT:
            for column in range(len(result)):
                span = slice(column * repeat, (column + 1) * repeat)
                result[column] = out.dtype.type(_dot(first[span], second[span], parts))
            continue
        for block in range(len(second)):
            start, value = block * repeat, second[block]
            if op == _ADD:
                for column in range(start, start + repeat):
                    result[column] = first[column] + value
            elif op == _SUB:
                for column in range(start, start + repeat):
                    result[column] = first[column] - value
            elif op == _MUL:
                for column in range(start, start + repeat):
                    result[column] = first[column] * value
            else:
                for column in range(start, start + repeat):
                    result[column] = first[column] / value


@sddmm_op.cpu
def _sddmm_cpu(operation: EdgeOperation) -> Tensor:
    src, dst, _, _, op, lhs_target, rhs_target = operation
    left, right = operation.operands()
    out = left.new_empty(len(src), *out_shape(op, left.shape[1:], right.shape[1:]))
    ids = {"u": src.contiguous(), "e": None, "v": dst.contiguous()}
    if op.startswith("copy"):
        rows = ids[rhs_target if op == "copy_rhs" else lhs_target]
        return out.copy_(left) if rows is None else torch.index_select(left, 0, rows)
    if out.numel() == 0:
        return out
    shape = torch.broadcast_shapes(left.shape[1:], right.shape[1:])
    if math.prod(shape) == 0:  # dot products of nothing
        return out.zero_()
    number = torch.float64 if out.dtype == torch.float64 else torch.float32
    left_rows = full_rows(left, shape, number)
    repeat: int | None = shape[-1] if op == "dot" else repeats(right.shape[1:], shape)
    if op == "dot" or repeat is None:
        right_rows = full_rows(right, shape, number)
    else:
        right_rows = matrix(right, number)
    result = out if out.dtype == number else torch.empty_like(out, dtype=number)
    cpu.run(
        _sddmm, len(out), _GRAIN, left_rows.numpy(), address(ids[lhs_target]), right_rows.numpy(),
        address(ids[rhs_target]), src.element_size(), _NUMBERS[op], repeat or 1,
        result.view(len(out), -1).numpy(),
    )  # fmt: skip
    return out if result is out else out.copy_(result)


_NUMBERS = {"add": _ADD, "sub": _SUB, "mul": _MUL, "div": _DIV, "dot": _DOT}


_THREADS = 256
#: What a block has under way at once: vectors of the output of a thread, dot products of lanes.
_VECTORS, _PRODUCTS = 4, 2
#: Vectors of each operand that a lane has of a dot product, until there are a warp's.
_LANE_VECTORS = 2
_WARP = 32
#: Dot products of which the left operand is read once.
REPEATS = (2, 4, 8)
#: As kernels number them.
_OPERATION_NUMBERS = {
    "copy_lhs": 0,
    "copy_rhs": 0,
    "add": 1,
    "sub": 2,
    "mul": 3,
    "div": 4,
    "dot": 5,
}


@functools.cache
def _offsets(
    left: tuple[int, ...], right: tuple[int, ...], reduced: int, device: torch.device
) -> Tensor:
    """Which columns of the operands each column of the output comes from: the first of ``reduced``
    ones of a dot product.

    Kept for good: models have few shapes.
    """
    shape = torch.broadcast_shapes(left, right)
    columns = [
        reduced * torch.arange(math.prod(dims), dtype=torch.int32).view(dims).expand(shape)
        for dims in (left, right)
    ]
    return torch.stack(columns).to(device)


def _repeats(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many dot products that follow each other in a result have the same left operand, as heads
    that share rows, if the kernel takes as many together; else 1."""
    repeats = right[-1] if right and (not left or left[-1] == 1) else 1
    return repeats if repeats in REPEATS else 1


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the operands' types and shapes decide."""

    kernel: Kernel
    shape: tuple[int, ...]  # of an edge's result
    columns: int  # of a result
    left_columns: int  # of an operand's row
    right_columns: int
    offsets: Tensor | None  # see _offsets; None where all have the same columns
    reduced: int  # numbers of a dot product
    lanes: int  # that share one dot product
    block_edges: int  # that a block has under way


@sddmm_op.cuda
def _sddmm_cuda(operation: EdgeOperation) -> Tensor:
    src, dst, lhs, rhs, op, lhs_target, rhs_target = operation
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
        math.gcd(VECTOR_BYTES, left_address, right_address),
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
        _OPERATION_NUMBERS[op], plan.reduced, plan.lanes, plan.block_edges,
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
    shape = out_shape(op, left_shape, right_shape)
    columns = math.prod(shape)
    reduced, offsets, lanes = left_shape[-1] if op == "dot" else 1, None, 1
    outer = slice(0, -1 if op == "dot" else None)
    if left_shape != right_shape:
        offsets = _offsets(left_shape[outer], right_shape[outer], reduced, device)
    # How many make one vector, of up to 16 bytes.
    of_one = reduced if op == "dot" else 1 if offsets is not None else columns
    elements = max(1, math.gcd(alignment, of_one * dtype.itemsize) // dtype.itemsize)
    types = f"{c_type(id_dtype)}, {ELEMENTS[dtype]}, {elements}"
    if op == "dot":
        repeats = _repeats(left_shape[outer], right_shape[outer])
        while lanes < _WARP and lanes * _LANE_VECTORS * elements < reduced:
            lanes *= 2
        name, pieces, at_once = "sddmm_dot", columns // repeats, _PRODUCTS * _THREADS // lanes
        types += f", {repeats}"
    else:
        name, pieces, at_once = "sddmm", columns // elements, _VECTORS * _THREADS
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

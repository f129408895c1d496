"""An operation on two operands' rows for every edge (SDDMM): the contract."""

from __future__ import annotations

import functools

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_ids
from dgl_mgpu.ops.library import Operator, call

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OPERATIONS = ("add", "sub", "mul", "div", "dot", "copy_lhs", "copy_rhs")
TARGETS = ("u", "e", "v")


@Operator
def sddmm_op(
    src: torch.Tensor,
    dst: torch.Tensor,
    lhs: torch.Tensor | None,
    rhs: torch.Tensor | None,
    op: str,
    lhs_target: str,
    rhs_target: str,
) -> torch.Tensor:
    left, right = operands(op, lhs, rhs)
    return left.new_empty(src.shape[0], *out_shape(op, left.shape[1:], right.shape[1:]))


def operands(
    op: str, lhs: torch.Tensor | None, rhs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands; what a copy reads stands for the other, too."""
    left = rhs if op == "copy_rhs" else lhs
    right = left if op.startswith("copy") else rhs
    assert left is not None and right is not None  # the public function has checked it
    return left, right


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
    src: torch.Tensor,
    dst: torch.Tensor,
    lhs: torch.Tensor | None,
    rhs: torch.Tensor | None,
    op: str,
    lhs_target: str = "u",
    rhs_target: str = "v",
) -> torch.Tensor:
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
    asked = _asked(op, lhs_target, rhs_target)
    if op not in OPERATIONS:
        raise InvalidInputError(
            asked, f"there is no op={op!r}", f"pass one of {', '.join(OPERATIONS)}"
        )
    if lhs_target not in TARGETS or rhs_target not in TARGETS:
        raise InvalidInputError(
            asked,
            f"lhs_target is {lhs_target!r} and rhs_target is {rhs_target!r}",
            f"pass one of {', '.join(TARGETS)}",
        )
    src = check_ids(src, asked)
    dst = check_ids(dst, asked, src.device)
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise InvalidInputError(
            asked,
            f"there are {len(src)} sources of {src.dtype}, but {len(dst)} destinations of "
            f"{dst.dtype}",
            "pass as many of both, of one dtype",
        )
    if op != "copy_rhs":
        lhs = _checked_operand(lhs, "lhs", lhs_target, src, asked)
    if op != "copy_lhs":
        rhs = _checked_operand(rhs, "rhs", rhs_target, src, asked)
    if op not in ("copy_lhs", "copy_rhs"):
        assert lhs is not None and rhs is not None
        _check_pair(lhs, rhs, op, asked)
    return call("sddmm", (src, dst, lhs, rhs), op, lhs_target, rhs_target)


@functools.lru_cache(maxsize=256)
def _asked(op: str, lhs_target: str, rhs_target: str) -> str:
    return f"compute {op} of '{lhs_target}' and '{rhs_target}' for every edge"


def _checked_operand(
    operand: torch.Tensor | None, name: str, target: str, src: torch.Tensor, asked: str
) -> torch.Tensor:
    if operand is None:
        raise InvalidInputError(asked, f"{name} is None", f"pass {name}, which the operation reads")
    if operand.dtype not in DTYPES or operand.dim() == 0 or operand.device != src.device:
        raise InvalidInputError(
            asked,
            f"{name} has shape {tuple(operand.shape)} and dtype {operand.dtype} on "
            f"{operand.device}",
            f"pass rows of float32, float64, float16 or bfloat16 on {src.device}",
        )
    if target == "e" and operand.shape[0] != src.shape[0]:
        raise InvalidInputError(
            asked,
            f"{name} has {len(operand)} rows, but there are {len(src)} edges",
            "pass a row for each edge",
        )
    return operand.contiguous()


def _check_pair(lhs: torch.Tensor, rhs: torch.Tensor, op: str, asked: str) -> None:
    if lhs.dtype != rhs.dtype:
        raise InvalidInputError(
            asked,
            f"lhs has dtype {lhs.dtype} and rhs has dtype {rhs.dtype}",
            "pass both in one dtype",
        )
    left, right = lhs.shape[1:], rhs.shape[1:]
    if op == "dot" and (not left or not right or left[-1] != right[-1]):
        raise InvalidInputError(
            asked,
            f"the rows have shapes {tuple(left)} and {tuple(right)}",
            "pass rows whose last dimension is the same",
        )
    if left != right and any(
        a != b and a != 1 and b != 1 for a, b in zip(reversed(left), reversed(right), strict=False)
    ):
        raise InvalidInputError(
            asked,
            f"the rows have shapes {tuple(left)} and {tuple(right)}",
            "pass shapes that broadcast from the right",
        )

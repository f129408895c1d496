"""An operation on two operands' rows for every edge, on the CPU."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch

from dgl_mgpu.ops.sddmm import op as contract
from dgl_mgpu.ops.sddmm.op import sddmm_op

#: Edges at a time: what is made on the way stays small.
_EDGES = 1 << 16
_OPERATIONS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "dot": lambda left, right: (left * right).sum(-1, keepdim=True),
}


@sddmm_op.cpu
def _sddmm(
    src: torch.Tensor,
    dst: torch.Tensor,
    lhs: torch.Tensor | None,
    rhs: torch.Tensor | None,
    op: str,
    lhs_target: str,
    rhs_target: str,
) -> torch.Tensor:
    left, right = contract.operands(op, lhs, rhs)
    shape = contract.out_shape(op, left.shape[1:], right.shape[1:])
    out = left.new_empty(len(src), *shape)
    for begin in range(0, len(src), _EDGES):
        edges = slice(begin, begin + _EDGES)
        rows: Mapping[str, torch.Tensor | slice] = {"u": src[edges], "e": edges, "v": dst[edges]}
        if op == "copy_lhs":
            assert lhs is not None
            out[edges] = lhs[rows[lhs_target]]
        elif op == "copy_rhs":
            assert rhs is not None
            out[edges] = rhs[rows[rhs_target]]
        else:
            assert lhs is not None and rhs is not None
            left, right = lhs[rows[lhs_target]], rhs[rows[rhs_target]]
            if out.dtype.itemsize == 2:
                left, right = left.float(), right.float()
            dims = 1 + len(shape)
            out[edges] = _OPERATIONS[op](_padded(left, dims), _padded(right, dims))
    return out


def _padded(rows: torch.Tensor, dims: int) -> torch.Tensor:
    """Rows with dimensions of 1 in front of their shape."""
    return rows.reshape(len(rows), *[1] * (dims - rows.dim()), *rows.shape[1:])

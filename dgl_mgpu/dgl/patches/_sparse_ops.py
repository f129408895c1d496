"""SpMM and SDDMM on graphs made of tensors, without DGL's arrays."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.dispatch import is_tensor_backed
from dgl_mgpu.graph.errors import raising_dgl_errors
from dgl_mgpu.graph.originals import originals


@raising_dgl_errors
def _gspmm(gidx: Any, op: str, reduce_op: str, u: Any, e: Any) -> Any:
    if not is_tensor_backed(gidx):
        return originals["dgl._sparse_ops:_gspmm"](gidx, op, reduce_op, u, e)
    from dgl_mgpu.graph.message_passing import sparse_ops as message_passing

    return message_passing.gspmm(gidx, op, reduce_op, u, e)


@raising_dgl_errors
def _gsddmm(
    gidx: Any, op: str, lhs: Any, rhs: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    if not is_tensor_backed(gidx):
        return originals["dgl._sparse_ops:_gsddmm"](gidx, op, lhs, rhs, lhs_target, rhs_target)
    from dgl_mgpu.graph.message_passing import sparse_ops as message_passing

    return message_passing.gsddmm(gidx, op, lhs, rhs, lhs_target, rhs_target)

"""SpMM and SDDMM on graphs made of tensors, without DGL's arrays."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import TENSORS, override


@override("dgl._sparse_ops:_gspmm", TENSORS, takes_index=True)
def _gspmm(gidx: Any, op: str, reduce_op: str, u: Any, e: Any) -> Any:
    from dgl_mgpu.graph.message_passing import operators

    return operators.gspmm_forward(gidx, op, reduce_op, u, e)


@override("dgl._sparse_ops:_gsddmm", TENSORS, takes_index=True)
def _gsddmm(
    gidx: Any, op: str, lhs: Any, rhs: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    from dgl_mgpu.graph.message_passing import operators

    return operators.gsddmm_forward(gidx, op, lhs, rhs, lhs_target, rhs_target)

"""SpMM on graphs made of tensors."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import TENSORS, override


@override("dgl.ops.spmm:gspmm", TENSORS)
def gspmm(g: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
    """In place of ``dgl.ops.gspmm``."""
    from dgl_mgpu.graph.message_passing import operators

    return operators.gspmm(g, op, reduce_op, lhs_data, rhs_data)

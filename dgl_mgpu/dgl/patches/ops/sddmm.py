"""SDDMM on graphs made of tensors."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.dispatch import is_tensor_backed
from dgl_mgpu.graph.errors import raising_dgl_errors
from dgl_mgpu.graph.originals import originals


@raising_dgl_errors
def gsddmm(
    g: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    """In place of ``dgl.ops.gsddmm``."""
    if not is_tensor_backed(g._graph):
        original = originals["dgl.ops.sddmm:gsddmm"]
        return original(g, op, lhs_data, rhs_data, lhs_target, rhs_target)
    from dgl_mgpu.graph.message_passing import operators

    return operators.gsddmm(g, op, lhs_data, rhs_data, lhs_target, rhs_target)

"""SDDMM on graphs made of tensors."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import TENSORS, override


@override("dgl.ops.sddmm:gsddmm", TENSORS)
def gsddmm(
    g: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    """In place of ``dgl.ops.gsddmm``."""
    from dgl_mgpu.graph.message_passing import operators

    return operators.gsddmm(g, op, lhs_data, rhs_data, lhs_target, rhs_target)

"""SpMM on graphs made of tensors."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.dispatch import is_tensor_backed
from dgl_mgpu.graph.errors import raising_dgl_errors
from dgl_mgpu.graph.originals import originals


@raising_dgl_errors
def gspmm(g: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
    """In place of ``dgl.ops.gspmm``."""
    if not is_tensor_backed(g._graph):
        return originals["dgl.ops.spmm:gspmm"](g, op, reduce_op, lhs_data, rhs_data)
    from dgl_mgpu.graph.message_passing import operators

    return operators.gspmm(g, op, reduce_op, lhs_data, rhs_data)

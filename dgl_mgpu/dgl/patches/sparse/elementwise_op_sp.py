"""`SparseMatrix` times and by a number, which leaves scores of attention to be computed."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

from dgl_mgpu.graph.originals import originals
from dgl_mgpu.graph.sparse.attention import scaled

if TYPE_CHECKING:
    from dgl.sparse import SparseMatrix


def multiply(A: SparseMatrix, B: Any) -> SparseMatrix:
    """In place of ``SparseMatrix.__mul__``, with the matrix on either side."""
    product = scaled(A.c_sparse_matrix, B, lambda: A.val * B)
    if product is not None:
        return type(A)(product)
    return originals["dgl.sparse.elementwise_op_sp:SparseMatrix.__mul__"](A, B)


def divide(A: SparseMatrix, B: Any) -> SparseMatrix:
    """In place of ``SparseMatrix.__truediv__``."""
    if isinstance(B, Real) and B != 0:
        quotient = scaled(A.c_sparse_matrix, 1 / B, lambda: A.val / B)
        if quotient is not None:
            return type(A)(quotient)
    return originals["dgl.sparse.elementwise_op_sp:SparseMatrix.__truediv__"](A, B)

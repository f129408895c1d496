"""Transposed sparse-dense product: the contract.

The gradient of a sparse-dense product is a product with the matrix transposed.  This takes the
matrix as it is and adds atomically, which saves the transposed copy, as the layers of WholeGraph
do (Yang et al., SC'22, section III-C).
"""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError, UnavailableError
from dgl_mgpu.ops.check import check_integer
from dgl_mgpu.ops.library import Operator, Size, Sizes, call
from dgl_mgpu.ops.spmm.op import check_entries, message_shape, row_type

OPS = ("copy_lhs", "copy_rhs", "mul")
_ASKED = "add messages up at the other ends of edges"


@Operator
def spmm_transposed_op(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    eids: torch.Tensor | None,
    v: torch.Tensor | None,
    e: torch.Tensor | None,
    num_cols: Size,
    shape: Sizes,
) -> torch.Tensor:
    example: torch.Tensor = e if v is None else v  # type: ignore[assignment]
    return example.new_empty(num_cols, *shape)


def spmm_transposed(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    eids: torch.Tensor | None,
    v: torch.Tensor | None,
    e: torch.Tensor | None,
    num_cols: int,
    op: str,
) -> torch.Tensor:
    """Add what an operation makes of every edge to the node at its other end.

    For every row ``r`` and every entry ``i`` of it, ``op(v[r], e[edge of i])`` is added to row
    ``indices[i]`` of the output.  With a graph's CSC, messages go from destinations to sources.

    Parameters
    ----------
    indptr : Tensor, int32 or int64, shape (num_rows + 1,)
        Where each row's entries begin, and the end of the last.
    indices : Tensor, dtype of ``indptr``, shape (nnz,)
        Row of the output of each entry, in [0, num_cols); not checked.
    eids : Tensor, dtype of ``indptr``, shape (nnz,), or None
        Edge of each entry; None where entry ``i`` is edge ``i``.  Not looked at by ``copy_lhs``.
    v : Tensor, float32, float64, float16 or bfloat16, shape (num_rows, *v_shape), or None
        Not looked at by ``copy_rhs``.
    e : Tensor, dtype of ``v``, shape (num_edges, *e_shape), or None
        Not looked at by ``copy_lhs``.
    num_cols : int
        Rows of the output.
    op : {'copy_lhs', 'copy_rhs', 'mul'}
        ``v``, ``e`` or their product; shapes of rows broadcast against each other as NumPy's do.

    Returns
    -------
    Tensor, dtype of the operands, shape (num_cols, *shape)
        Half types are summed up in float32 and rounded once.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype, shape or device, or ``op`` is unknown.
    UnavailableError
        On CUDA under ``torch.use_deterministic_algorithms(True)``: the order of additions is not
        fixed there, and neither are the last bits of sums.
    """
    if op not in OPS:
        raise InvalidInputError(_ASKED, f"there is no op={op!r}", f"pass one of {', '.join(OPS)}")
    for name, operand, needless in (("v", v, "copy_rhs"), ("e", e, "copy_lhs")):
        if operand is None and op != needless:
            raise InvalidInputError(_ASKED, f"{name} is None", f"pass {name}, which {op!r} reads")
    if op == "copy_rhs":
        v = None
    elif op == "copy_lhs":
        e = eids = None
    shape = message_shape(op, "sum", row_type(v), row_type(e))
    if indices is None:
        raise InvalidInputError(_ASKED, "indices is None", "pass the other end of each edge")
    check_entries(indptr, indices, eids, v, e)
    if v is not None and v.shape[0] != indptr.shape[0] - 1:
        raise InvalidInputError(
            _ASKED,
            f"v has {len(v)} rows, but the matrix has {len(indptr) - 1}",
            "pass a row for each row of entries",
        )
    num_cols = check_integer(num_cols, "num_cols", 0, _ASKED)
    if (
        indptr.is_cuda
        and torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        raise UnavailableError(
            _ASKED,
            "it adds with atomic operations, which come in any order, and"
            " torch.use_deterministic_algorithms(True) forbids that",
            "transpose the matrix and call spmm",
        )
    return call("spmm_transposed", (indptr, indices, eids, v, e), num_cols, shape)

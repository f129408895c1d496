"""Transposed sparse-dense product; see ``kernels/spmm_transposed.cu``.

The gradient of a sparse-dense product is a product with the matrix transposed.  This takes the
matrix as it is and adds atomically, which saves the transposed copy, as the layers of WholeGraph
do (Yang et al., SC'22, section III-C).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError, UnavailableError
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import check_integer
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.library import Operator, Size, Sizes, call
from dgl_mgpu.ops.spmm import MessageOperands, check_entries, message_shape, row_type
from dgl_mgpu.ops.spmm_layout import (
    ELEMENTS,
    VECTOR_BYTES,
    OperandLayout,
    expanded,
    make_layout,
    shares,
)

OPS = ("copy_lhs", "copy_rhs", "mul")
_ACTION = "add messages up at the other ends of edges"


@Operator
def spmm_transposed_op(messages: MessageOperands, num_cols: Size, shape: Sizes) -> Tensor:
    example: Tensor = messages.e if messages.u is None else messages.u  # type: ignore[assignment]
    return example.new_empty(num_cols, *shape)


def spmm_transposed(
    indptr: Tensor,
    indices: Tensor,
    eids: Tensor | None,
    v: Tensor | None,
    e: Tensor | None,
    num_cols: int,
    op: str,
) -> Tensor:
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
        raise InvalidInputError(_ACTION, f"there is no op={op!r}", f"pass one of {', '.join(OPS)}")
    for name, operand, needless in (("v", v, "copy_rhs"), ("e", e, "copy_lhs")):
        if operand is None and op != needless:
            raise InvalidInputError(_ACTION, f"{name} is None", f"pass {name}, which {op!r} reads")
    if op == "copy_rhs":
        v = None
    elif op == "copy_lhs":
        e = eids = None
    shape = message_shape(op, "sum", row_type(v), row_type(e))
    if indices is None:
        raise InvalidInputError(_ACTION, "indices is None", "pass the other end of each edge")
    check_entries(indptr, indices, eids, v, e)
    if v is not None and v.shape[0] != indptr.shape[0] - 1:
        raise InvalidInputError(
            _ACTION,
            f"v has {len(v)} rows, but the matrix has {len(indptr) - 1}",
            "pass a row for each row of entries",
        )
    num_cols = check_integer(num_cols, "num_cols", 0, _ACTION)
    if (
        indptr.is_cuda
        and torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        raise UnavailableError(
            _ACTION,
            "it adds with atomic operations, which come in any order, and"
            " torch.use_deterministic_algorithms(True) forbids that",
            "transpose the matrix and call spmm",
        )
    return call("spmm_transposed", (indptr, indices, eids, v, e), num_cols, shape)


#: Entries at a time: what is made on the way stays small.
_ENTRIES_AT_A_TIME = 1 << 16


@spmm_transposed_op.cpu
def _spmm_transposed_cpu(messages: MessageOperands, num_cols: int, shape: Sequence[int]) -> Tensor:
    indptr, indices, eids, v, e = messages
    assert indices is not None  # as the public function has seen to
    example: Tensor = e if v is None else v  # type: ignore[assignment]
    number = torch.float64 if example.dtype == torch.float64 else torch.float32
    out = torch.zeros(num_cols, *shape, dtype=number)
    count = int(indptr[-1])
    for begin in range(0, count, _ENTRIES_AT_A_TIME):
        entries = torch.arange(begin, min(begin + _ENTRIES_AT_A_TIME, count))
        factors = []
        if v is not None:
            rows = torch.searchsorted(indptr.contiguous(), entries.to(indptr.dtype), right=True) - 1
            factors.append(expanded(v[rows].to(number), shape))
        if e is not None:
            edges = entries if eids is None else eids[entries]
            factors.append(expanded(e[edges].to(number), shape))
        out.index_add_(
            0, indices[entries], factors[0] if len(factors) == 1 else torch.mul(*factors)
        )
    return out.to(example.dtype)


_THREADS = 256
_WARPS = _THREADS // 32


@spmm_transposed_op.cuda
def _spmm_transposed_cuda(messages: MessageOperands, num_cols: int, shape: Sequence[int]) -> Tensor:
    indptr, indices, eids, v, e = messages
    assert indices is not None
    example: Tensor = e if v is None else v  # type: ignore[assignment]
    number = torch.float64 if example.dtype == torch.float64 else torch.float32
    out = example.new_zeros((num_cols, *shape), dtype=number)
    if out.numel() and indices.numel():
        indptr, indices = indptr.contiguous(), indices.contiguous()
        eids, v, e = [None if tensor is None else tensor.contiguous() for tensor in (eids, v, e)]
        kernel, layout = _plan(
            example.dtype,
            indptr.dtype,
            tuple(shape),
            None if v is None else v.shape[1:],
            None if e is None else e.shape[1:],
            0 if v is None else v.data_ptr() % VECTOR_BYTES,
            0 if e is None else e.data_ptr() % VECTOR_BYTES,
        )
        if layout.expand:
            v, e = [None if rows is None else expanded(rows, shape) for rows in (v, e)]
        num_rows = indptr.shape[0] - 1
        length, row_bytes = num_rows + indices.shape[0], layout.width * out.element_size()
        share, num_shares = shares(length, row_bytes, indptr.device)
        request = gpu.struct(
            indptr, indices, eids, v, e, out, num_rows, share, num_shares, then=layout.numbers
        )
        kernel(-(-num_shares * layout.tiles // _WARPS), _THREADS, request, device=indptr.device)
    return out.to(example.dtype)


@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: torch.dtype,
    id_dtype: torch.dtype,
    shape: tuple[int, ...],
    v_shape: tuple[int, ...] | None,
    e_shape: tuple[int, ...] | None,
    v_offset: int,
    e_offset: int,
) -> tuple[Kernel, OperandLayout]:
    layout = make_layout(dtype, shape, v_shape or (), e_shape, v_offset, e_offset)
    left = "Absent" if v_shape is None else layout.left
    types = f"{c_type(id_dtype)}, {ELEMENTS[dtype]}, dgl_mgpu::{left}, dgl_mgpu::{layout.right}"
    sizes = f"{layout.vector}, {layout.lanes}"
    kernel = Kernel("spmm_transposed.cu", f"dgl_mgpu::spmm_transposed<{types}, {sizes}>")
    return kernel, layout

"""Transposed sparse-dense product on CUDA; see ``kernels/spmm_transposed.cu``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.spmm.layout import (
    ELEMENTS,
    VECTOR_BYTES,
    OperandLayout,
    expanded,
    make_layout,
    shares,
)
from dgl_mgpu.ops.spmm_transposed.op import spmm_transposed_op

_THREADS = 256
_WARPS = _THREADS // 32


@spmm_transposed_op.cuda
def _spmm_transposed(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    eids: torch.Tensor | None,
    v: torch.Tensor | None,
    e: torch.Tensor | None,
    num_cols: int,
    shape: Sequence[int],
) -> torch.Tensor:
    example: torch.Tensor = e if v is None else v  # type: ignore[assignment]
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

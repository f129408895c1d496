"""Transposed sparse-dense product."""

from __future__ import annotations

from dgl_mgpu.ops.spmm_transposed import cpu as _cpu  # noqa: F401  (registers the CPU kernel)
from dgl_mgpu.ops.spmm_transposed import cuda as _cuda  # noqa: F401  (registers the CUDA kernel)
from dgl_mgpu.ops.spmm_transposed.op import spmm_transposed

__all__ = ["spmm_transposed"]

"""Generalised sparse-dense product."""

from __future__ import annotations

from dgl_mgpu.ops.spmm import cpu as _cpu  # noqa: F401  (registers the CPU kernels)
from dgl_mgpu.ops.spmm import cuda as _cuda  # noqa: F401  (registers the CUDA kernels)
from dgl_mgpu.ops.spmm.op import add_spmm, spmm, spmm_shares

__all__ = ["add_spmm", "spmm", "spmm_shares"]

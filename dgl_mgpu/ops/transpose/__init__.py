"""Edges grouped by one end, grouped by the other."""

from __future__ import annotations

from dgl_mgpu.ops.transpose import cpu as _cpu  # noqa: F401  (registers the CPU kernel)
from dgl_mgpu.ops.transpose import cuda as _cuda  # noqa: F401  (registers the CUDA kernel)
from dgl_mgpu.ops.transpose.op import transpose

__all__ = ["transpose"]

"""An operation on two operands' rows for every edge."""

from __future__ import annotations

from dgl_mgpu.ops.sddmm import cpu as _cpu  # noqa: F401  (registers the CPU kernels)
from dgl_mgpu.ops.sddmm import cuda as _cuda  # noqa: F401  (registers the CUDA kernels)
from dgl_mgpu.ops.sddmm.op import sddmm

__all__ = ["sddmm"]

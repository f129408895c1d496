"""Row gather over tiers."""

from __future__ import annotations

from dgl_mgpu.ops.gather import cpu as _cpu  # noqa: F401  (registers the CPU kernels)
from dgl_mgpu.ops.gather import cuda as _cuda  # noqa: F401  (registers the CUDA kernels)
from dgl_mgpu.ops.gather.op import count_tiers, gather_rows
from dgl_mgpu.ops.gather.pick import pick_rows

__all__ = ["count_tiers", "gather_rows", "pick_rows"]

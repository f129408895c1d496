"""Neighbour sampling by edge weight."""

from __future__ import annotations

from dgl_mgpu.ops.sample_weighted import cpu as _cpu  # noqa: F401  (registers the CPU kernels)
from dgl_mgpu.ops.sample_weighted import cuda as _cuda  # noqa: F401  (registers the CUDA kernels)
from dgl_mgpu.ops.sample_weighted.op import EdgeTimes, check_weights

__all__ = ["EdgeTimes", "check_weights"]

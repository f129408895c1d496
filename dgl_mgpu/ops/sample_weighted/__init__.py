"""Neighbour sampling by edge weight."""

from __future__ import annotations

from dgl_mgpu.ops.sample_weighted import cpu as _cpu  # noqa: F401  (registers the CPU kernels)
from dgl_mgpu.ops.sample_weighted.op import check_weights

__all__ = ["check_weights"]

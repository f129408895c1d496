"""Negative sampling: pairs of nodes without an edge."""

from __future__ import annotations

from dgl_mgpu.ops.negative import cpu as _cpu  # noqa: F401  (registers the CPU kernels)
from dgl_mgpu.ops.negative import cuda as _cuda  # noqa: F401  (registers the CUDA kernels)
from dgl_mgpu.ops.negative.op import NegativeEdges, negative_destinations, negative_edges

__all__ = ["NegativeEdges", "negative_destinations", "negative_edges"]

"""Softmax over the entries of each row."""

from __future__ import annotations

from dgl_mgpu.ops.edge_softmax import cpu as _cpu  # noqa: F401  (registers the CPU kernels)
from dgl_mgpu.ops.edge_softmax import cuda as _cuda  # noqa: F401  (registers the CUDA kernels)
from dgl_mgpu.ops.edge_softmax.op import edge_softmax, edge_softmax_backward

__all__ = ["edge_softmax", "edge_softmax_backward"]

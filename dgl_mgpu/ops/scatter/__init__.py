"""Writing and training rows of tables over tiers."""

from __future__ import annotations

from dgl_mgpu.ops.scatter import cpu as _cpu  # noqa: F401  (registers the CPU kernels)
from dgl_mgpu.ops.scatter import cuda as _cuda  # noqa: F401  (registers the CUDA kernels)
from dgl_mgpu.ops.scatter.op import SGD, Adagrad, Adam, AlignedTables, scatter_rows, update_rows

__all__ = ["SGD", "Adagrad", "Adam", "AlignedTables", "scatter_rows", "update_rows"]

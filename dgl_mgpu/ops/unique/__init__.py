"""Append-unique: relabel the nodes of a sample."""

from __future__ import annotations

from dgl_mgpu.ops.unique import cpu as _cpu  # noqa: F401  (registers the CPU kernel)
from dgl_mgpu.ops.unique import cuda as _cuda  # noqa: F401  (registers the CUDA kernels)
from dgl_mgpu.ops.unique.op import append_unique

__all__ = ["append_unique"]

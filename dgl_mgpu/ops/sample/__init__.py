"""Neighbour sampling."""

from __future__ import annotations

from dgl_mgpu.ops.sample import cpu as _cpu  # noqa: F401  (registers the CPU kernel)
from dgl_mgpu.ops.sample import cuda as _cuda  # noqa: F401  (registers the CUDA kernels)
from dgl_mgpu.ops.sample.op import SampledNeighbors, sample_etype_neighbors, sample_neighbors

__all__ = ["SampledNeighbors", "sample_etype_neighbors", "sample_neighbors"]

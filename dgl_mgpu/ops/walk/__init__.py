"""Random walks and PinSAGE's neighbour selection."""

from __future__ import annotations

from dgl_mgpu.ops.walk import cpu as _cpu  # noqa: F401  (registers the CPU kernels)
from dgl_mgpu.ops.walk import cuda as _cuda  # noqa: F401  (registers the CUDA kernels)
from dgl_mgpu.ops.walk.op import VisitedNeighbors, pinsage_neighbors, random_walk

__all__ = ["VisitedNeighbors", "pinsage_neighbors", "random_walk"]

"""All layers of a PinSAGE mini-batch."""

from __future__ import annotations

from dgl_mgpu.ops.walk_blocks import cpu as _cpu  # noqa: F401  (registers the CPU version)
from dgl_mgpu.ops.walk_blocks import cuda as _cuda  # noqa: F401  (registers the CUDA version)
from dgl_mgpu.ops.walk_blocks.op import VisitedBlock, pinsage_blocks, pinsage_blocks_async

__all__ = ["VisitedBlock", "pinsage_blocks", "pinsage_blocks_async"]

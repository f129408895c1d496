"""All hops of a mini-batch over edge types, by weight or by time."""

from __future__ import annotations

from dgl_mgpu.ops.etype_blocks import cpu as _cpu  # noqa: F401  (registers the CPU version)
from dgl_mgpu.ops.etype_blocks import cuda as _cuda  # noqa: F401  (registers the CUDA version)
from dgl_mgpu.ops.etype_blocks.op import (
    BlockEdges,
    EtypeBlock,
    sample_etype_blocks,
    sample_etype_blocks_async,
)

__all__ = ["BlockEdges", "EtypeBlock", "sample_etype_blocks", "sample_etype_blocks_async"]

"""All hops of a mini-batch."""

from __future__ import annotations

from dgl_mgpu.ops.blocks import cpu as _cpu  # noqa: F401  (registers the CPU version)
from dgl_mgpu.ops.blocks import cuda as _cuda  # noqa: F401  (registers the CUDA kernel)
from dgl_mgpu.ops.blocks.op import SampledBlock, sample_blocks, sample_blocks_async
from dgl_mgpu.ops.blocks.padded import PaddedBlock, sample_padded_blocks

__all__ = [
    "PaddedBlock",
    "SampledBlock",
    "sample_blocks",
    "sample_blocks_async",
    "sample_padded_blocks",
]

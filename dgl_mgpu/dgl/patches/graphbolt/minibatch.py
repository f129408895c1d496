"""What models read of GraphBolt's mini-batches."""

from __future__ import annotations

from typing import Any


@property  # type: ignore[misc]
def blocks(self: Any) -> Any:
    """In place of ``MiniBatch.blocks``; a mini-batch that was not sampled has None."""
    if not self.sampled_subgraphs:
        return None
    from dgl_mgpu.dgl.graphbolt.blocks import blocks_of

    return blocks_of(self.sampled_subgraphs)

"""Batches of items."""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.graph.originals import originals


def collate_batch(self: Any, buffer: Any, indices: Any, offsets: Any = None) -> Any:
    """In place of ``ItemShufflerAndBatcher._collate_batch``."""
    if type(buffer) is tuple and all(type(items) is torch.Tensor for items in buffer):
        return tuple(items.index_select(0, indices) for items in buffer)
    name = "dgl.graphbolt.item_sampler:ItemShufflerAndBatcher._collate_batch"
    return originals[name](self, buffer, indices, offsets)

"""Files that hold GraphBolt's graphs: they are read without running what is in them."""

from __future__ import annotations

from types import ModuleType

import torch

from dgl_mgpu.dgl.graphbolt.graph import FusedCSCSamplingGraph


def allow(graphbolt: ModuleType) -> None:
    """Let ``torch.load`` make GraphBolt's own objects, and no others, of what a file names."""
    torch.serialization.add_safe_globals([graphbolt.FusedCSCSamplingGraph, FusedCSCSamplingGraph])

"""The GPU cache of features."""

from __future__ import annotations

from dgl_mgpu.graph.pinning.gpu_cache import GPUCache

__all__ = ["GPUCache"]

"""Features behind a cache on a GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dgl_mgpu.graph.originals import originals
from dgl_mgpu.graph.stored_tensors import stored_on


def read(self: Any, ids: Tensor | None = None) -> Any:
    """In place of ``GPUCachedFeature.read``: past the cache, if a store has the feature."""
    rows = getattr(self._fallback_feature, "_tensor", None)
    if ids is not None and rows is not None and stored_on(ids.device, rows) is not None:
        return self._fallback_feature.read(ids)
    return originals["dgl.graphbolt.impl.gpu_cached_feature:GPUCachedFeature.read"](self, ids)

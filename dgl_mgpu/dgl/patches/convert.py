"""Conversions of graphs of several types."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import on_whole_graph
from dgl_mgpu.graph.originals import originals


@on_whole_graph
def to_homogeneous(G: Any, *arguments: Any, **options: Any) -> Any:
    """In place of ``dgl.to_homogeneous``."""
    return originals["dgl.convert:to_homogeneous"](G, *arguments, **options)

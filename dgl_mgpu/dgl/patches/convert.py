"""Conversions of graphs of several types."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import on_whole_graph
from dgl_mgpu.graph.originals import originals


@on_whole_graph
def to_homogeneous(
    G: Any, ndata: Any = None, edata: Any = None, store_type: bool = True,
    return_count: bool = False,
) -> Any:  # fmt: skip
    """In place of ``dgl.to_homogeneous``: also of a graph partitioned under ``--partition``."""
    original = originals["dgl.convert:to_homogeneous"]
    return original(G, ndata, edata, store_type, return_count)

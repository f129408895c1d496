"""Transforms that are modules, of parts of a partitioned graph."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import is_partitioned
from dgl_mgpu.graph.originals import originals


def drop_edges(self: Any, g: Any) -> Any:
    """In place of ``DropEdge.__call__``: each process drops some of its own edges."""
    from dgl_mgpu.graph import distributed

    if not isinstance(g._graph, distributed.DistributedGraphIndex) or is_partitioned(g):
        return originals["dgl.transforms.module:DropEdge.__call__"](self, g)
    return distributed.drop_edges(g, self.p)

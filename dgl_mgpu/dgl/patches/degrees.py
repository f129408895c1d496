"""Degrees of all nodes of a graph on a GPU: one kernel, and no waiting for it."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.originals import originals


def out_degrees(self: Any, u: Any = "__ALL__", etype: Any = None) -> Any:
    """In place of ``DGLGraph.out_degrees``: all nodes of a graph exist."""
    from dgl.base import is_all

    from dgl_mgpu.graph.index import TensorIndex

    if not (is_all(u) and isinstance(self._graph, TensorIndex)):
        return originals["dgl.heterograph:DGLGraph.out_degrees"](self, u, etype)
    return self._graph.out_degrees(self.get_etype_id(etype), None)


def in_degrees(self: Any, v: Any = "__ALL__", etype: Any = None) -> Any:
    """In place of ``DGLGraph.in_degrees``."""
    from dgl.base import is_all

    from dgl_mgpu.graph.index import TensorIndex

    if not (is_all(v) and isinstance(self._graph, TensorIndex)):
        return originals["dgl.heterograph:DGLGraph.in_degrees"](self, v, etype)
    return self._graph.in_degrees(self.get_etype_id(etype), None)

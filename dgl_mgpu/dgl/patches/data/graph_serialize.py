"""Saving graphs: parts of a partitioned graph are refused."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.originals import originals


def save_graphs(filename: Any, g_list: Any, labels: Any = None, formats: Any = None) -> None:
    """In place of ``dgl.save_graphs``: a part of a graph is refused, whatever its class."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    for graph in g_list if isinstance(g_list, list) else [g_list]:
        index = getattr(graph, "_graph", None)
        if isinstance(index, DistributedGraphIndex):
            index.refuse_to_copy()
    originals["dgl.data.graph_serialize:save_graphs"](filename, g_list, labels, formats)

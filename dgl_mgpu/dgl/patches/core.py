"""User-defined functions on partitioned graphs."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.originals import originals


def invoke_edge_udf(graph: Any, eid: Any, etype: Any, func: Any, *, orig_eid: Any = None) -> Any:
    """In place of ``dgl.core.invoke_edge_udf``: rows of sources may be on other ranks."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    if not isinstance(graph._graph, DistributedGraphIndex):
        original = originals["dgl.core:invoke_edge_udf"]
        return original(graph, eid, etype, func, orig_eid=orig_eid)
    from dgl_mgpu.graph.distributed import of_edges

    return of_edges(graph, func, eid, etype, orig_eid)


def invoke_udf_reduce(graph: Any, func: Any, msgdata: Any, *, orig_nid: Any = None) -> Any:
    """In place of ``dgl.core.invoke_udf_reduce``: where there are no edges, too, it has columns."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    if not isinstance(graph._graph, DistributedGraphIndex):
        original = originals["dgl.core:invoke_udf_reduce"]
        return original(graph, func, msgdata, orig_nid=orig_nid)
    from dgl_mgpu.graph.distributed import reduced

    return reduced(graph, func, msgdata, orig_nid)

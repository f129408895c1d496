"""User-defined functions on partitioned graphs."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import DISTRIBUTED, override


@override("dgl.core:invoke_edge_udf", DISTRIBUTED)
def invoke_edge_udf(graph: Any, eid: Any, etype: Any, func: Any, *, orig_eid: Any = None) -> Any:
    """In place of ``dgl.core.invoke_edge_udf``: rows of sources may be on other ranks."""
    from dgl_mgpu.graph.distributed import apply_edge_udf

    return apply_edge_udf(graph, func, eid, etype, orig_eid)


@override("dgl.core:invoke_udf_reduce", DISTRIBUTED)
def invoke_udf_reduce(graph: Any, func: Any, msgdata: Any, *, orig_nid: Any = None) -> Any:
    """In place of ``dgl.core.invoke_udf_reduce``: results have columns even without edges."""
    from dgl_mgpu.graph.distributed import apply_reduce_udf

    return apply_reduce_udf(graph, func, msgdata, orig_nid)

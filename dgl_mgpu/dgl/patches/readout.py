"""What a whole graph amounts to, also where this process has a part of it."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.originals import originals


def distributed_index(graph: Any) -> Any:
    """The graph's index, if other processes have parts of the graph."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    return graph._graph if isinstance(graph._graph, DistributedGraphIndex) else None


def _weighted(data: Any, feat: str, weight: str | None) -> Any:
    return data[feat] if weight is None else data[feat] * data[weight]


def readout_nodes(
    graph: Any, feat: str, weight: str | None = None, *, op: str = "sum", ntype: Any = None
) -> Any:
    """In place of ``dgl.readout_nodes``."""
    index = distributed_index(graph)
    if index is None:
        return originals["dgl.readout:readout_nodes"](graph, feat, weight, op=op, ntype=ntype)
    return index.readout(_weighted(graph.nodes[ntype].data, feat, weight), op)


def readout_edges(
    graph: Any, feat: str, weight: str | None = None, *, op: str = "sum", etype: Any = None
) -> Any:
    """In place of ``dgl.readout_edges``."""
    index = distributed_index(graph)
    if index is None:
        return originals["dgl.readout:readout_edges"](graph, feat, weight, op=op, etype=etype)
    return index.readout(_weighted(graph.edges[etype].data, feat, weight), op)


def softmax_nodes(graph: Any, feat: str, *, ntype: Any = None) -> Any:
    """In place of ``dgl.softmax_nodes``."""
    index = distributed_index(graph)
    if index is None:
        return originals["dgl.readout:softmax_nodes"](graph, feat, ntype=ntype)
    return index.softmax(graph.nodes[ntype].data[feat])


def softmax_edges(graph: Any, feat: str, *, etype: Any = None) -> Any:
    """In place of ``dgl.softmax_edges``."""
    index = distributed_index(graph)
    if index is None:
        return originals["dgl.readout:softmax_edges"](graph, feat, etype=etype)
    return index.softmax(graph.edges[etype].data[feat])


def broadcast_nodes(graph: Any, graph_feat: Any, *, ntype: Any = None) -> Any:
    """In place of ``dgl.broadcast_nodes``."""
    if distributed_index(graph) is None:
        return originals["dgl.readout:broadcast_nodes"](graph, graph_feat, ntype=ntype)
    return _repeated(graph_feat, graph.num_nodes(ntype))


def broadcast_edges(graph: Any, graph_feat: Any, *, etype: Any = None) -> Any:
    """In place of ``dgl.broadcast_edges``."""
    if distributed_index(graph) is None:
        return originals["dgl.readout:broadcast_edges"](graph, graph_feat, etype=etype)
    return _repeated(graph_feat, graph.num_edges(etype))


def _repeated(graph_feat: Any, count: int) -> Any:
    row = graph_feat if len(graph_feat) == 1 else graph_feat.unsqueeze(0)  # as DGL takes it
    return row.repeat_interleave(count, 0)


def _topk_on(
    graph: Any,
    typestr: str,
    feat: str,
    k: int,
    descending: bool,
    sortby: int | None,
    ntype_or_etype: Any,
) -> Any:
    """In place of what ``dgl.topk_nodes`` and ``dgl.topk_edges`` call."""
    if distributed_index(graph) is not None:
        raise refuse_for_partition(
            f"find the first of all {typestr}", "gather their rows, and use torch.topk"
        )
    original = originals["dgl.readout:_topk_on"]
    return original(graph, typestr, feat, k, descending, sortby, ntype_or_etype)


def refuse_for_partition(asked: str, fix: str) -> Exception:
    """The error of a call that needs the whole graph."""
    from dgl_mgpu.errors import UnsupportedByPartitionError

    found = "the graph is partitioned, and each rank has a part of it"
    return UnsupportedByPartitionError(asked, found, fix)

"""Readout of a whole graph, also where this process has a part of it."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import DISTRIBUTED, override


def _weighted(data: Any, feat: str, weight: str | None) -> Any:
    return data[feat] if weight is None else data[feat] * data[weight]


@override("dgl.readout:readout_nodes", DISTRIBUTED)
def readout_nodes(
    graph: Any, feat: str, weight: str | None = None, *, op: str = "sum", ntype: Any = None
) -> Any:
    """In place of ``dgl.readout_nodes``."""
    return graph._graph.readout(_weighted(graph.nodes[ntype].data, feat, weight), op)


@override("dgl.readout:readout_edges", DISTRIBUTED)
def readout_edges(
    graph: Any, feat: str, weight: str | None = None, *, op: str = "sum", etype: Any = None
) -> Any:
    """In place of ``dgl.readout_edges``."""
    return graph._graph.readout(_weighted(graph.edges[etype].data, feat, weight), op)


@override("dgl.readout:softmax_nodes", DISTRIBUTED)
def softmax_nodes(graph: Any, feat: str, *, ntype: Any = None) -> Any:
    """In place of ``dgl.softmax_nodes``."""
    return graph._graph.softmax(graph.nodes[ntype].data[feat])


@override("dgl.readout:softmax_edges", DISTRIBUTED)
def softmax_edges(graph: Any, feat: str, *, etype: Any = None) -> Any:
    """In place of ``dgl.softmax_edges``."""
    return graph._graph.softmax(graph.edges[etype].data[feat])


@override("dgl.readout:broadcast_nodes", DISTRIBUTED)
def broadcast_nodes(graph: Any, graph_feat: Any, *, ntype: Any = None) -> Any:
    """In place of ``dgl.broadcast_nodes``."""
    return _repeated(graph_feat, graph.num_nodes(ntype))


@override("dgl.readout:broadcast_edges", DISTRIBUTED)
def broadcast_edges(graph: Any, graph_feat: Any, *, etype: Any = None) -> Any:
    """In place of ``dgl.broadcast_edges``."""
    return _repeated(graph_feat, graph.num_edges(etype))


def _repeated(graph_feat: Any, count: int) -> Any:
    row = graph_feat if len(graph_feat) == 1 else graph_feat.unsqueeze(0)  # as DGL takes it
    return row.repeat_interleave(count, 0)


@override("dgl.readout:_topk_on", DISTRIBUTED)
def _topk_on(
    graph: Any, typestr: str, feat: str, k: int, descending: bool, sortby: int | None,
    ntype_or_etype: Any,
) -> Any:  # fmt: skip
    """In place of what ``dgl.topk_nodes`` and ``dgl.topk_edges`` call.

    Its ids are those of the whole graph.
    """
    from dgl_mgpu.errors import InvalidInputError

    index = graph._graph
    if typestr == "nodes":
        rows = graph.nodes[ntype_or_etype].data[feat]
        ids = index.node_ids(graph.get_ntype_id(ntype_or_etype))
    else:
        rows = graph.edges[ntype_or_etype].data[feat]
        ids = index.edge_ids(graph.get_etype_id(ntype_or_etype))
    if rows.dim() != 2:
        raise InvalidInputError(
            f"find the first of all {typestr}",
            f"their feature {feat!r} has shape {tuple(rows.shape)}",
            "use a feature of one row of numbers each",
        )
    return index.topk(rows, ids, k, descending, sortby)


def refuse_for_partition(action: str, fix: str) -> Exception:
    """The error of a call that needs the whole graph."""
    from dgl_mgpu.errors import UnsupportedByPartitionError

    found = "the graph is partitioned, and each rank has a part of it"
    return UnsupportedByPartitionError(action, found, fix)

"""Message passing on graphs made of tensors, without a detour through DGL's arrays."""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.graph.dispatch import is_tensor_backed
from dgl_mgpu.graph.errors import raising_dgl_errors
from dgl_mgpu.graph.originals import originals

# What implements these imports DGL, which imports this: so it is imported when it is called.


@raising_dgl_errors
def _gspmm(gidx: Any, op: str, reduce_op: str, u: Any, e: Any) -> Any:
    if not is_tensor_backed(gidx):
        return originals["dgl._sparse_ops:_gspmm"](gidx, op, reduce_op, u, e)
    from dgl_mgpu.graph.message_passing import sparse_ops as message_passing

    return message_passing.gspmm(gidx, op, reduce_op, u, e)


@raising_dgl_errors
def _gsddmm(
    gidx: Any, op: str, lhs: Any, rhs: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    if not is_tensor_backed(gidx):
        return originals["dgl._sparse_ops:_gsddmm"](gidx, op, lhs, rhs, lhs_target, rhs_target)
    from dgl_mgpu.graph.message_passing import sparse_ops as message_passing

    return message_passing.gsddmm(gidx, op, lhs, rhs, lhs_target, rhs_target)


@raising_dgl_errors
def backend_gspmm(gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
    """In place of ``dgl.backend.pytorch.sparse.gspmm``: without autograd where it has no part."""
    if not is_tensor_backed(gidx):
        original = originals["dgl.backend.pytorch.sparse:gspmm"]
        return original(gidx, op, reduce_op, lhs_data, rhs_data)
    from dgl_mgpu.graph.message_passing import operators

    return operators.backend_gspmm(gidx, op, reduce_op, lhs_data, rhs_data)


@raising_dgl_errors
def backend_gsddmm(
    gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    """In place of ``dgl.backend.pytorch.sparse.gsddmm``."""
    if not is_tensor_backed(gidx):
        original = originals["dgl.backend.pytorch.sparse:gsddmm"]
        return original(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)
    from dgl_mgpu.graph.message_passing import operators

    return operators.backend_gsddmm(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)


@raising_dgl_errors
def gspmm(g: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
    """In place of ``dgl.ops.gspmm``."""
    if not is_tensor_backed(g._graph):
        return originals["dgl.ops.spmm:gspmm"](g, op, reduce_op, lhs_data, rhs_data)
    from dgl_mgpu.graph.message_passing import operators

    return operators.gspmm(g, op, reduce_op, lhs_data, rhs_data)


@raising_dgl_errors
def gsddmm(
    g: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    """In place of ``dgl.ops.gsddmm``."""
    if not is_tensor_backed(g._graph):
        original = originals["dgl.ops.sddmm:gsddmm"]
        return original(g, op, lhs_data, rhs_data, lhs_target, rhs_target)
    from dgl_mgpu.graph.message_passing import operators

    return operators.gsddmm(g, op, lhs_data, rhs_data, lhs_target, rhs_target)


@raising_dgl_errors
def edge_softmax(
    gidx: Any, logits: torch.Tensor, eids: Any = "__ALL__", norm_by: str = "dst"
) -> Any:
    """In place of ``dgl.backend.pytorch.sparse.edge_softmax``."""
    if not is_tensor_backed(gidx):
        return originals["dgl.backend.pytorch.sparse:edge_softmax"](gidx, logits, eids, norm_by)
    from dgl_mgpu.graph.message_passing import operators

    return operators.edge_softmax(gidx, logits, eids, norm_by)


@raising_dgl_errors
def edge_softmax_hetero(
    gidx: Any, eids: Any = "__ALL__", norm_by: str = "dst", *logits: Any
) -> Any:
    """In place of ``dgl.backend.pytorch.sparse.edge_softmax_hetero``, for parts of graphs."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    if not isinstance(gidx, DistributedGraphIndex):
        original = originals["dgl.backend.pytorch.sparse:edge_softmax_hetero"]
        return original(gidx, eids, norm_by, *logits)
    from dgl_mgpu.graph.message_passing import operators

    return operators.edge_softmax_hetero(gidx, eids, norm_by, *logits)


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


def update_all(
    self: Any, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
) -> None:
    """In place of ``DGLGraph.update_all``: a graph of one relation is not sliced to that first."""
    index = self._graph
    if is_tensor_backed(index) and index.is_single:
        from dgl_mgpu.graph.message_passing import operators

        operators.update_all(self, message_func, reduce_func, apply_node_func, etype)
    else:
        original = originals["dgl.heterograph:DGLGraph.update_all"]
        original(self, message_func, reduce_func, apply_node_func, etype)


def apply_edges(self: Any, func: Any, edges: Any = "__ALL__", etype: Any = None) -> None:
    """In place of ``DGLGraph.apply_edges``, for all edges of a graph of one relation."""
    from dgl.base import is_all

    index = self._graph
    if is_tensor_backed(index) and index.is_single and etype is None and is_all(edges):
        from dgl_mgpu.graph.message_passing import operators

        if operators.is_message(func):
            operators.apply_edges(self, func)
            return
    originals["dgl.heterograph:DGLGraph.apply_edges"](self, func, edges, etype)

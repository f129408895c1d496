"""Message passing on graphs made of tensors, without a detour through DGL's arrays."""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.backend.compat.importer import originals
from dgl_mgpu.backend.compat.overrides.autocast import (
    _cast_if_autocast_enabled,
    _disable_autocast_if_enabled,
)
from dgl_mgpu.backend.errors import raising_dgl_errors


@raising_dgl_errors
def _gspmm(gidx: Any, op: str, reduce_op: str, u: Any, e: Any) -> Any:
    from dgl_mgpu.backend.structure.index import TensorIndex

    if isinstance(gidx, TensorIndex):
        from dgl_mgpu.backend.computation.message_passing import gspmm

        return gspmm(gidx, op, reduce_op, u, e)
    return originals["dgl._sparse_ops:_gspmm"](gidx, op, reduce_op, u, e)


@raising_dgl_errors
def _gsddmm(
    gidx: Any, op: str, lhs: Any, rhs: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    from dgl_mgpu.backend.structure.index import TensorIndex

    if isinstance(gidx, TensorIndex):
        from dgl_mgpu.backend.computation.message_passing import gsddmm

        return gsddmm(gidx, op, lhs, rhs, lhs_target, rhs_target)
    return originals["dgl._sparse_ops:_gsddmm"](gidx, op, lhs, rhs, lhs_target, rhs_target)


@raising_dgl_errors
def gspmm(g: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
    """In place of ``dgl.ops.gspmm``: the sum or mean of neighbours is one operator."""
    from dgl_mgpu.backend.structure.index import TensorIndex
    from dgl_mgpu.backend.structure.spread import SpreadIndex

    index = g._graph
    if isinstance(index, SpreadIndex):
        lhs_data, rhs_data = _cast_if_autocast_enabled(lhs_data, rhs_data)
        with _disable_autocast_if_enabled():
            return index.gspmm(op, reduce_op, lhs_data, rhs_data)
    if (
        op != "copy_lhs"
        or reduce_op not in ("sum", "mean")
        or not isinstance(index, TensorIndex)
        or len(index.relations) != 1
        or not isinstance(lhs_data, torch.Tensor)
    ):
        return originals["dgl.ops.spmm:gspmm"](g, op, reduce_op, lhs_data, rhs_data)
    from dgl_mgpu.backend.computation.message_passing import aggregate

    (u,) = _cast_if_autocast_enabled(lhs_data)
    with _disable_autocast_if_enabled():
        return aggregate(index, reduce_op, u)


@raising_dgl_errors
def gsddmm(
    g: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    """In place of ``dgl.ops.gsddmm``: operands of sources may be on other ranks."""
    from dgl_mgpu.backend.structure.spread import SpreadIndex

    if isinstance(g._graph, SpreadIndex):
        lhs_data, rhs_data = _cast_if_autocast_enabled(lhs_data, rhs_data)
        with _disable_autocast_if_enabled():
            return g._graph.gsddmm(op, lhs_data, rhs_data, lhs_target, rhs_target)
    original = originals["dgl.ops.sddmm:gsddmm"]
    return original(g, op, lhs_data, rhs_data, lhs_target, rhs_target)


@raising_dgl_errors
def edge_softmax(
    gidx: Any, logits: torch.Tensor, eids: Any = "__ALL__", norm_by: str = "dst"
) -> Any:
    """In place of ``dgl.backend.pytorch.sparse.edge_softmax``: one operator, not four."""
    from dgl_mgpu.backend.structure.index import TensorIndex

    if not isinstance(gidx, TensorIndex):
        return originals["dgl.backend.pytorch.sparse:edge_softmax"](gidx, logits, eids, norm_by)
    from dgl.backend.pytorch import sparse
    from dgl.base import is_all

    from dgl_mgpu.backend.computation.message_passing import EdgeSoftmax
    from dgl_mgpu.backend.structure.spread import SpreadIndex

    if isinstance(gidx, SpreadIndex) and is_all(eids):
        (logits,) = sparse._cast_if_autocast_enabled(logits)
        with sparse._disable_autocast_if_enabled():
            return gidx.edge_softmax(logits, norm_by)
    if not is_all(eids):
        gidx = gidx.edge_subgraph([eids], True).graph
    if norm_by == "src":
        gidx = gidx.reverse()
    (logits,) = sparse._cast_if_autocast_enabled(logits)
    with sparse._disable_autocast_if_enabled():
        return EdgeSoftmax.apply(gidx, logits)


def invoke_edge_udf(graph: Any, eid: Any, etype: Any, func: Any, *, orig_eid: Any = None) -> Any:
    """In place of ``dgl.core.invoke_edge_udf``: rows of sources may be on other ranks."""
    from dgl_mgpu.backend.structure.spread import SpreadIndex

    if not isinstance(graph._graph, SpreadIndex):
        original = originals["dgl.core:invoke_edge_udf"]
        return original(graph, eid, etype, func, orig_eid=orig_eid)
    from dgl_mgpu.backend.structure.spread import edge_batch

    return func(edge_batch(graph, eid, etype, orig_eid))


def invoke_udf_reduce(graph: Any, func: Any, msgdata: Any, *, orig_nid: Any = None) -> Any:
    """In place of ``dgl.core.invoke_udf_reduce``: where there are no edges, too, it has columns."""
    from dgl_mgpu.backend.structure.spread import SpreadIndex

    if not isinstance(graph._graph, SpreadIndex):
        original = originals["dgl.core:invoke_udf_reduce"]
        return original(graph, func, msgdata, orig_nid=orig_nid)
    from dgl_mgpu.backend.structure.spread import reduced

    return reduced(graph, func, msgdata, orig_nid)


def update_all(
    self: Any, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
) -> None:
    """In place of ``DGLGraph.update_all``: a graph of one relation is not sliced to that first."""
    from dgl_mgpu.backend.structure.index import TensorIndex

    index = self._graph
    if not isinstance(index, TensorIndex) or not index.is_single:
        original = originals["dgl.heterograph:DGLGraph.update_all"]
        original(self, message_func, reduce_func, apply_node_func, etype)
        return
    from dgl import backend as F
    from dgl import core
    from dgl.base import ALL

    if etype is not None:
        self.get_etype_id(etype)  # raises if there is none
    results = core.message_passing(self, message_func, reduce_func, apply_node_func)
    if results and core.is_builtin(reduce_func) and reduce_func.name in ("min", "max"):
        name = next(iter(results))
        results[name] = F.replace_inf_with_zero(results[name])
    self._set_n_repr(index.schema.ends[0][1], ALL, results)

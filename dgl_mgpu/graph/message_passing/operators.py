"""DGL's operators and DGLGraph's methods of message passing, on graphs made of tensors.

DGL makes views of all features, and checks what it has made itself: for a mini-batch that takes the
host longer than the GPU takes.
"""

from __future__ import annotations

from typing import Any

import torch
from dgl import backend as F
from dgl import core, ops
from dgl.backend.pytorch.sparse import _cast_if_autocast_enabled, _disable_autocast_if_enabled
from dgl.base import ALL, is_all
from dgl.function.message import CopyMessageFunction, MessageFunction
from dgl.function.reducer import SimpleReduceFunction
from dgl.heterograph import DGLGraph

from dgl_mgpu.graph.distributed import DistributedGraphIndex
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.message_passing import sparse_ops as message_passing
from dgl_mgpu.graph.message_passing.aggregation import aggregate
from dgl_mgpu.graph.message_passing.sparse_ops import EdgeSoftmax, Features, is_recorded
from dgl_mgpu.graph.originals import originals


def update_all(graph: DGLGraph, message: Any, reduce: Any, apply: Any, etype: Any) -> None:
    """``DGLGraph.update_all`` of a graph of one relation."""
    if etype is not None:
        graph.get_etype_id(etype)  # raises if there is none
    _, destinations = graph._graph.schema.ends[0]
    operator = None if apply is not None else _operator(message, reduce)
    if operator is None:
        results = core.message_passing(graph, message, reduce, apply)
        if results and core.is_builtin(reduce) and reduce.name in ("min", "max"):
            name = next(iter(results))
            results[name] = F.replace_inf_with_zero(results[name])
        graph._set_n_repr(destinations, ALL, results)
        return
    found = operator(graph, *_operands(graph, message))
    if reduce.name in ("min", "max"):
        found = F.replace_inf_with_zero(found)
    graph._node_frames[destinations].update_column(reduce.out_field, found)


def apply_edges(graph: DGLGraph, message: MessageFunction) -> None:
    """``DGLGraph.apply_edges`` of a function of DGL's for all edges of a graph of one relation."""
    found = getattr(ops, message.name)(graph, *_operands(graph, message))
    graph._edge_frames[0].update_column(message.out_field, found)


def is_message(function: Any) -> bool:
    """Whether a function of edges is one of DGL's own."""
    return isinstance(function, MessageFunction)


def _operator(message: Any, reduce: Any) -> Any:
    """What DGL has for two of its functions together, or None."""
    if (
        not isinstance(message, MessageFunction)
        or not isinstance(reduce, SimpleReduceFunction)
        or message.out_field != reduce.msg_field  # which DGL raises for
    ):
        return None
    return getattr(ops, f"{message.name}_{reduce.name}", None)


def _operands(graph: DGLGraph, message: MessageFunction) -> tuple[Any, ...]:
    """The features that a function of DGL's reads of a graph of one relation."""
    source, destination = graph._graph.schema.ends[0]
    nodes = graph._node_frames
    frames = nodes[source], nodes[destination], graph._edge_frames[0]  # as TargetCode numbers them
    if isinstance(message, CopyMessageFunction):
        return (frames[message.target][message.in_field],)
    return frames[message.lhs][message.lhs_field], frames[message.rhs][message.rhs_field]


def gspmm(graph: DGLGraph, op: str, reduce: str, lhs: Any, rhs: Any) -> Any:
    """``dgl.ops.gspmm``: the sum or mean of neighbours is one operator."""
    index = graph._graph
    if isinstance(index, DistributedGraphIndex):
        lhs, rhs = _cast_if_autocast_enabled(lhs, rhs)
        with _disable_autocast_if_enabled():
            return index.gspmm(op, reduce, lhs, rhs)
    if (
        op != "copy_lhs"
        or reduce not in ("sum", "mean")
        or len(index.relations) != 1
        or not isinstance(lhs, torch.Tensor)
    ):
        return originals["dgl.ops.spmm:gspmm"](graph, op, reduce, lhs, rhs)
    if not torch.is_autocast_enabled("cuda"):
        return aggregate(index, reduce, lhs)
    (lhs,) = _cast_if_autocast_enabled(lhs)
    with _disable_autocast_if_enabled():
        return aggregate(index, reduce, lhs)


def gsddmm(
    graph: DGLGraph, op: str, lhs: Any, rhs: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    """``dgl.ops.gsddmm``: operands of sources may be on other ranks."""
    index = graph._graph
    if isinstance(index, DistributedGraphIndex):
        lhs, rhs = _cast_if_autocast_enabled(lhs, rhs)
        with _disable_autocast_if_enabled():
            return index.gsddmm(op, lhs, rhs, lhs_target, rhs_target)
    return originals["dgl.ops.sddmm:gsddmm"](graph, op, lhs, rhs, lhs_target, rhs_target)


def edge_softmax(index: TensorIndex, logits: torch.Tensor, eids: Any, norm_by: str) -> torch.Tensor:
    """``edge_softmax`` of DGL's backend: one operator, not four."""
    (logits,) = _cast_if_autocast_enabled(logits)
    with _disable_autocast_if_enabled():
        if is_all(eids):
            if isinstance(index, DistributedGraphIndex):
                return index.edge_softmax(logits, norm_by)
        else:
            index = index.edge_subgraph([eids], True).graph
        return EdgeSoftmax.apply(index.reverse() if norm_by == "src" else index, logits)


def edge_softmax_hetero(
    index: DistributedGraphIndex, eids: Any, norm_by: str, *logits: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """``edge_softmax_hetero`` of DGL's backend, of several relations."""
    if not is_all(eids):
        index.edge_subgraph([eids], True)  # which a part refuses
    logits = _cast_if_autocast_enabled(*logits)
    with _disable_autocast_if_enabled():
        return index.edge_softmax_over_relations(logits, norm_by)


def is_direct(op: str, *operands: Features) -> bool:
    """Whether the operator itself is what DGL's autograd function of it would return."""
    return (
        op not in ("sub", "div")  # which DGL makes of others
        and not is_recorded(*operands)
        and not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))
    )


def backend_gspmm(index: TensorIndex, op: str, reduce: str, lhs: Features, rhs: Features) -> Any:
    """``gspmm`` of DGL's backend, which DGL's gradients call."""
    if reduce != "sum" and len(index.relations) == 1 and not index.num_edges(0):
        # Of no edges at all DGL leaves zeros, also of the highest.  Those of a sum are as many, and
        # have a gradient of zeros; the highest's would go to the first row, if there is one.
        reduce = "sum"
    if is_direct(op, lhs, rhs):
        return message_passing.gspmm(index, op, reduce, lhs, rhs)[0]
    original = originals["dgl.backend.pytorch.sparse:gspmm"]
    return original(index, op, reduce, lhs, rhs)


def backend_gsddmm(
    index: TensorIndex, op: str, lhs: Features, rhs: Features, lhs_target: str, rhs_target: str
) -> Any:
    """``gsddmm`` of DGL's backend."""
    if is_direct(op, lhs, rhs):
        return message_passing.gsddmm(index, op, lhs, rhs, lhs_target, rhs_target)
    original = originals["dgl.backend.pytorch.sparse:gsddmm"]
    return original(index, op, lhs, rhs, lhs_target, rhs_target)

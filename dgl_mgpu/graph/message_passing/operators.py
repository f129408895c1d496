"""Message passing on graphs made of tensors: DGL's operators, and DGLGraph's methods for them.

DGL makes views of all features, and checks what it has made itself: for a mini-batch that takes the
host longer than the GPU takes.  So sums and means of in-neighbours have an autograd function of
their own.  Other gradients are DGL's: its autograd functions call `gspmm_forward` and
`gsddmm_forward` for the forward pass and, with the reversed graph, for the backward one.
"""

from __future__ import annotations

from typing import Any

import torch
from dgl import backend as F
from dgl import core, ops
from dgl.backend.pytorch import sparse as backend
from dgl.backend.pytorch.sparse import _cast_if_autocast_enabled, _disable_autocast_if_enabled
from dgl.base import ALL, DGLError, is_all
from dgl.function.base import TargetCode
from dgl.function.message import CopyMessageFunction, MessageFunction
from dgl.function.reducer import SimpleReduceFunction
from dgl.heterograph import DGLGraph

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.distributed import DistributedGraphIndex, Features
from dgl_mgpu.graph.errors import as_dgl_error
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.originals import originals
from dgl_mgpu.graph.relation import Relation
from dgl_mgpu.ops import (
    edge_softmax,
    edge_softmax_backward,
    sddmm,
    spmm,
    spmm_shares,
    spmm_transposed,
)

# -- methods of DGLGraph, for graphs of one relation ------------------------------------------


def update_all(graph: DGLGraph, message: Any, reduce: Any, apply: Any, etype: Any) -> None:
    """``DGLGraph.update_all``."""
    if etype is not None:
        graph.get_etype_id(etype)  # raises if there is none
    _, destinations = graph._graph.schema.ends[0]
    if apply is not None or not _have_operator(message, reduce):
        results = core.message_passing(graph, message, reduce, apply)
        if results and core.is_builtin(reduce) and reduce.name in ("min", "max"):
            name = next(iter(results))
            results[name] = F.replace_inf_with_zero(results[name])
        graph._set_n_repr(destinations, ALL, results)
        return
    lhs, *rhs = _operands(graph, message)
    try:
        if rhs:
            out = gspmm(graph, message.binary_op, reduce.name, lhs, rhs[0])
        elif message.target == TargetCode.SRC:
            out = gspmm(graph, "copy_lhs", reduce.name, lhs, None)
        else:
            out = gspmm(graph, "copy_rhs", reduce.name, None, lhs)
    except InvalidInputError as error:
        raise as_dgl_error(error) from error
    if reduce.name in ("min", "max"):
        out = F.replace_inf_with_zero(out)
    graph._node_frames[destinations].update_column(reduce.out_field, out)


def apply_edges(graph: DGLGraph, message: MessageFunction) -> None:
    """``DGLGraph.apply_edges`` of a function of DGL's for all edges."""
    out = getattr(ops, message.name)(graph, *_operands(graph, message))
    graph._edge_frames[0].update_column(message.out_field, out)


def is_message(function: Any) -> bool:
    """Whether a function of edges is one of DGL's own."""
    return isinstance(function, MessageFunction)


def _have_operator(message: Any, reduce: Any) -> bool:
    return (
        isinstance(message, MessageFunction)
        and isinstance(reduce, SimpleReduceFunction)
        and message.out_field == reduce.msg_field  # else DGL raises
        and hasattr(ops, f"{message.name}_{reduce.name}")
    )


def _operands(graph: DGLGraph, message: MessageFunction) -> tuple[Any, ...]:
    """The one or two features that a function of DGL's reads."""
    source, destination = graph._graph.schema.ends[0]
    nodes = graph._node_frames
    frames = nodes[source], nodes[destination], graph._edge_frames[0]  # as TargetCode numbers them
    if isinstance(message, CopyMessageFunction):
        return (frames[message.target][message.in_field],)
    return frames[message.lhs][message.lhs_field], frames[message.rhs][message.rhs_field]


# -- dgl.ops ----------------------------------------------------------------------------------


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
        return aggregate(index.relations[0], reduce, lhs)
    (lhs,) = _cast_if_autocast_enabled(lhs)
    with _disable_autocast_if_enabled():
        return aggregate(index.relations[0], reduce, lhs)


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


def aggregate(relation: Relation, reduce: str, u: torch.Tensor) -> torch.Tensor:
    """The sum or mean over every node's in-neighbours, 0 where there are none; differentiable."""
    _check_rows(u, relation.num_src, "source node")
    if is_recorded(u):
        return _Aggregate.apply(relation, reduce, False, u)
    return _aggregate_forward(relation, reduce, False, u)


class _Aggregate(torch.autograd.Function):
    """Sum or mean of what every node's in-neighbours have; or the transpose of that.

    Both are linear, and the gradient of each is the other, of any order.
    """

    @staticmethod
    def forward(
        ctx: Any, relation: Relation, reduce: str, transposed: bool, features: torch.Tensor
    ) -> torch.Tensor:
        ctx.transpose = relation, reduce, not transposed
        return _aggregate_forward(relation, reduce, transposed, features)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:  # type: ignore[override]
        relation, reduce, transposed = ctx.transpose
        # With gradients, for a gradient of the gradient.
        function = _Aggregate.apply if torch.is_grad_enabled() else _aggregate_forward
        return None, None, None, function(relation, reduce, transposed, gradient)


def _aggregate_forward(
    relation: Relation, reduce: str, transposed: bool, features: torch.Tensor
) -> torch.Tensor:
    columns = features.unsqueeze(-1) if features.dim() == 1 else features
    out = (_scatter_to_sources if transposed else _sum_at_destinations)(relation, reduce, columns)
    return out.squeeze(-1) if features.dim() == 1 else out


def _sum_at_destinations(relation: Relation, reduce: str, u: torch.Tensor) -> torch.Tensor:
    if _has_csr_alone(relation):
        total = spmm_transposed(*relation.csr(), u, None, relation.num_dst, "copy_lhs")
        return total if reduce == "sum" else _divide(total, relation.in_degrees().clamp(min=1))
    indptr, indices, _ = relation.csc()
    return spmm(indptr, indices, None, u, None, "copy_lhs", reduce)[0]


def _scatter_to_sources(relation: Relation, reduce: str, v: torch.Tensor) -> torch.Tensor:
    """What in-neighbours get of the nodes' ``v``: the whole each, or of a mean an equal share."""
    has_csc_alone = relation.held("csr") is None and _has_csr_alone(relation.reverse())
    if reduce == "mean":
        csc = relation.held("csc")
        if csc is not None and not has_csc_alone:
            indptr, indices, _ = relation.csr()
            return spmm_shares(indptr, indices, csc[0], v)
        # Nodes without in-edges have shares that nobody looks at.
        v = _divide(v, relation.in_degrees())
    if has_csc_alone:
        return spmm_transposed(*relation.csc(), v, None, relation.num_src, "copy_lhs")
    indptr, indices, _ = relation.csr()
    return spmm(indptr, indices, None, v, None, "copy_lhs", "sum")[0]


def _divide(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    counts = counts.view(-1, *[1] * (rows.dim() - 1))
    if rows.dtype.itemsize < 4:  # a half type, which could not hold the counts
        return (rows / counts.float()).to(rows.dtype)
    return rows / counts


# -- dgl.backend.pytorch.sparse: with gradients -----------------------------------------------


def backend_gspmm(index: TensorIndex, op: str, reduce: str, lhs: Features, rhs: Features) -> Any:
    """``gspmm`` of DGL's backend, which DGL's gradients call."""
    if reduce != "sum" and len(index.relations) == 1 and not index.num_edges(0):
        # Of no edges at all DGL leaves zeros, also of the highest.  Those of a sum are as many, and
        # have a gradient of zeros; the highest's would go to the first row, if there is one.
        reduce = "sum"
    if _needs_no_autograd(op, lhs, rhs):
        return gspmm_forward(index, op, reduce, lhs, rhs)[0]
    return originals["dgl.backend.pytorch.sparse:gspmm"](index, op, reduce, lhs, rhs)


def backend_gsddmm(
    index: TensorIndex, op: str, lhs: Features, rhs: Features, lhs_target: str, rhs_target: str
) -> Any:
    """``gsddmm`` of DGL's backend."""
    if _needs_no_autograd(op, lhs, rhs):
        return gsddmm_forward(index, op, lhs, rhs, lhs_target, rhs_target)
    original = originals["dgl.backend.pytorch.sparse:gsddmm"]
    return original(index, op, lhs, rhs, lhs_target, rhs_target)


def _needs_no_autograd(op: str, *operands: Features) -> bool:
    """Whether the operator itself is what DGL's autograd function of it would return."""
    return (
        op not in ("sub", "div")  # which DGL makes of others
        and not is_recorded(*operands)
        and not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))
    )


def is_recorded(*features: Features) -> bool:
    """Whether autograd, of either mode, or a transform is to see what is made of features.

    Where nothing is, their functions can be called themselves: an autograd function takes the host
    as long as a kernel's launch.
    """
    return (
        (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in features))
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


def backend_edge_softmax(
    index: TensorIndex, logits: torch.Tensor, eids: Any, norm_by: str
) -> torch.Tensor:
    """``edge_softmax`` of DGL's backend: one operator, not four."""
    (logits,) = _cast_if_autocast_enabled(logits)
    with _disable_autocast_if_enabled():
        if is_all(eids):
            if isinstance(index, DistributedGraphIndex):
                return index.edge_softmax(logits, norm_by)
        else:
            index = index.edge_subgraph([eids], True).graph
        return _EdgeSoftmax.apply(index.reverse() if norm_by == "src" else index, logits)


def backend_edge_softmax_hetero(
    index: DistributedGraphIndex, eids: Any, norm_by: str, *logits: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """``edge_softmax_hetero`` of DGL's backend, of several relations."""
    if not is_all(eids):
        index.edge_subgraph([eids], True)  # which a part refuses
    logits = _cast_if_autocast_enabled(*logits)
    with _disable_autocast_if_enabled():
        return index.edge_softmax_over_relations(logits, norm_by)


class _EdgeSoftmax(torch.autograd.Function):
    """Softmax of edge scores over the in-edges of every node."""

    @staticmethod
    def forward(ctx: Any, index: TensorIndex, scores: torch.Tensor) -> torch.Tensor:
        _check_rows(scores, index.relations[0].num_edges, "edge")
        indptr, _, eids = index.relations[0].csc()
        out = edge_softmax(indptr, eids, scores)
        ctx.index = index
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a gradient of the gradient
            weighted = out * gradient
            total = backend.gspmm(ctx.index, "copy_rhs", "sum", None, weighted)
            return None, weighted - backend.gsddmm(ctx.index, "mul", out, total, "e", "v")
        indptr, _, eids = ctx.index.relations[0].csc()
        return None, edge_softmax_backward(indptr, eids, out, gradient)


# -- dgl._sparse_ops: without gradients -------------------------------------------------------


def gspmm_forward(
    index: TensorIndex, op: str, reduce: str, u: Features, e: Features
) -> tuple[torch.Tensor, tuple[Features, Features]]:
    """Messages ``op(u, e)`` of the only relation, reduced at their destinations.

    ``u`` has a row for each source and ``e`` one for each edge.  ``op`` is add, sub, mul, div,
    copy_lhs or copy_rhs, and ``reduce`` sum, max or min.  The highest or lowest of no messages is
    infinite; for these the result comes with the source and the edge that each element is from.
    """
    relation = _only_relation(index, "gspmm")
    u, e = (None, e) if op == "copy_rhs" else (u, None) if op == "copy_lhs" else (u, e)
    _check_dtypes(u, e)
    _check_rows(u, relation.num_src, "source node")
    _check_rows(e, relation.num_edges, "edge")
    u, expanded_u = _with_columns(u)
    e, expanded_e = _with_columns(e)
    arg_u = arg_e = None
    if reduce == "sum" and op in ("copy_lhs", "copy_rhs", "mul") and _has_csr_alone(relation):
        out = spmm_transposed(*relation.csr(), u, e, relation.num_dst, op)
    else:
        indptr, indices, eids = relation.csc()
        sources, edges = None if u is None else indices, None if e is None else eids
        out, arg_u, arg_e = spmm(indptr, sources, edges, u, e, op, reduce)
    if expanded_u and expanded_e:
        out = out.squeeze(-1)
    if arg_u is not None and u is not None and expanded_u:
        arg_u = arg_u.squeeze(-1)
    if arg_e is not None and e is not None and expanded_e:
        arg_e = arg_e.squeeze(-1)
    return out, (arg_u, arg_e)


def gsddmm_forward(
    index: TensorIndex,
    op: str,
    lhs: Features,
    rhs: Features,
    lhs_target: str = "u",
    rhs_target: str = "v",
) -> torch.Tensor:
    """``op(lhs, rhs)`` for every edge of the only relation.

    ``op`` is add, sub, mul, div, dot, copy_lhs or copy_rhs; targets are u, e or v.
    """
    relation = _only_relation(index, "gsddmm")
    lhs, rhs = (None, rhs) if op == "copy_rhs" else (lhs, None) if op == "copy_lhs" else (lhs, rhs)
    _check_dtypes(lhs, rhs)
    lhs_target, rhs_target = as_target(lhs_target), as_target(rhs_target)
    rows = {
        "u": (relation.num_src, "source node"),
        "e": (relation.num_edges, "edge"),
        "v": (relation.num_dst, "destination node"),
    }
    _check_rows(lhs, *rows[lhs_target])
    _check_rows(rhs, *rows[rhs_target])
    lhs, expanded_lhs = _with_columns(lhs)
    rhs, expanded_rhs = _with_columns(rhs)
    src, dst = relation.coo()
    out = sddmm(src, dst, lhs, rhs, op, lhs_target, rhs_target)
    return out.squeeze(-1) if expanded_lhs and expanded_rhs else out


def as_target(target: str | int) -> str:
    """u, e or v, which DGL numbers in C functions and also calls src, edge and dst."""
    if isinstance(target, int):
        return "uev"[target]
    return {"src": "u", "edge": "e", "dst": "v"}.get(target, target)


def _only_relation(index: TensorIndex, name: str) -> Relation:
    if len(index.relations) != 1:
        raise DGLError(f"We only support {name} on graph with one edge type")
    return index.relations[0]


def _has_csr_alone(relation: Relation) -> bool:
    """Whether a CSC would be made for one sum alone, of which the order of additions may differ."""
    return (
        relation.held("csc") is None
        and "csc" not in relation.formats
        and relation.held("csr") is not None
        and not torch.are_deterministic_algorithms_enabled()
    )


def _check_dtypes(first: Features, second: Features) -> None:
    if first is not None and second is not None and first.dtype != second.dtype:
        raise DGLError(
            f"The features' data types {first.dtype} and {second.dtype} don't match, please"
            " convert them to the same type."
        )


def _check_rows(features: Features, count: int, owner: str) -> None:
    if features is not None and (features.dim() == 0 or features.shape[0] != count):
        rows = len(features) if features.dim() else "a number"
        raise DGLError(f"Expect a row of features for each of {count} {owner}s, got {rows}")


def _with_columns(features: Features) -> tuple[Features, bool]:
    """Features with at least two dimensions, and whether one was added or there are none."""
    if features is None or features.dim() > 1:
        return features, features is None
    return features.unsqueeze(-1), True

"""Message passing on graphs made of tensors: what DGL's ``_sparse_ops`` does through C++.

The gradients are DGL's: its autograd functions call these for the forward pass and, with the
reversed graph, for the backward one.  Sums and means of neighbours have a function of their own,
in `aggregation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from dgl.base import DGLError

from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.relation import Relation
from dgl_mgpu.ops import edge_softmax, edge_softmax_backward, sddmm, spmm, spmm_transposed

_TARGETS = ("u", "e", "v")
Features = torch.Tensor | None


def gspmm(
    index: TensorIndex, op: str, reduce: str, u: Features, e: Features
) -> tuple[torch.Tensor, tuple[Features, Features]]:
    """Messages ``op(u, e)`` reduced at their destinations, over one relation.

    Parameters
    ----------
    index : TensorIndex
    op : str
        add, sub, mul, div, copy_lhs or copy_rhs.
    reduce : str
        sum, max or min.
    u : Tensor or None, shape (num_src, \\*shape)
    e : Tensor or None, shape (num_edges, \\*shape)

    Returns
    -------
    out : Tensor, shape (num_dst, \\*shape)
        The highest or lowest of no messages is infinite.
    arg_u, arg_e : Tensor or None
        For max and min, the source and the edge each element is from.
    """
    relation = only_relation(index, "gspmm")
    u, e = (None, e) if op == "copy_rhs" else (u, None) if op == "copy_lhs" else (u, e)
    _check_dtypes(u, e)
    check_rows(u, relation.num_src, "source node")
    check_rows(e, relation.num_edges, "edge")
    u, expanded_u = _with_columns(u)
    e, expanded_e = _with_columns(e)
    arg_u = arg_e = None
    if reduce == "sum" and op in ("copy_lhs", "copy_rhs", "mul") and has_csr_alone(relation):
        out = spmm_transposed(*relation.csr(), u, e, relation.num_dst, op)
    else:
        indptr, indices, eids = relation.csc()
        out, arg_u, arg_e = spmm(
            indptr,
            None if u is None else indices,
            None if e is None else eids,
            u,
            e,
            op,
            reduce,
        )
    if expanded_u and expanded_e:
        out = out.squeeze(-1)
    if arg_u is not None and u is not None and expanded_u:
        arg_u = arg_u.squeeze(-1)
    if arg_e is not None and e is not None and expanded_e:
        arg_e = arg_e.squeeze(-1)
    return out, (arg_u, arg_e)


def gsddmm(
    index: TensorIndex,
    op: str,
    lhs: Features,
    rhs: Features,
    lhs_target: str = "u",
    rhs_target: str = "v",
) -> torch.Tensor:
    """``op(lhs, rhs)`` for every edge of one relation.

    Parameters
    ----------
    index : TensorIndex
    op : str
        add, sub, mul, div, dot, copy_lhs or copy_rhs.
    lhs, rhs : Tensor or None
        A row for each source node, edge or destination node.
    lhs_target, rhs_target : str
        u, e or v.

    Returns
    -------
    Tensor, shape (num_edges, \\*shape)
    """
    relation = only_relation(index, "gsddmm")
    lhs, rhs = (None, rhs) if op == "copy_rhs" else (lhs, None) if op == "copy_lhs" else (lhs, rhs)
    _check_dtypes(lhs, rhs)
    rows = {
        "u": (relation.num_src, "source node"),
        "e": (relation.num_edges, "edge"),
        "v": (relation.num_dst, "destination node"),
    }
    check_rows(lhs, *rows[_target(lhs_target)])
    check_rows(rhs, *rows[_target(rhs_target)])
    lhs, expanded_lhs = _with_columns(lhs)
    rhs, expanded_rhs = _with_columns(rhs)
    src, dst = relation.coo()
    out = sddmm(src, dst, lhs, rhs, op, _target(lhs_target), _target(rhs_target))
    return out.squeeze(-1) if expanded_lhs and expanded_rhs else out


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


def only_relation(index: TensorIndex, name: str) -> Relation:
    if len(index.relations) != 1:
        raise DGLError(f"We only support {name} on graph with one edge type")
    return index.relations[0]


def has_csr_alone(relation: Relation) -> bool:
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


def check_rows(features: Features, count: int, what: str) -> None:
    if features is not None and (features.dim() == 0 or features.shape[0] != count):
        found = len(features) if features.dim() else "a number"
        raise DGLError(f"Expect a row of features for each of {count} {what}s, got {found}")


def _with_columns(features: Features) -> tuple[Features, bool]:
    """Features with at least two dimensions, and whether one was added or there are none."""
    if features is None:
        return None, True
    if features.dim() == 1:
        return features.unsqueeze(-1), True
    return features, False


def _target(target: str | int) -> str:
    if isinstance(target, int):
        return _TARGETS[target]
    return {"src": "u", "edge": "e", "dst": "v"}.get(target, target)


class EdgeSoftmax(torch.autograd.Function):
    """Softmax of edge scores over the in-edges of every node."""

    @staticmethod
    def forward(ctx: Any, index: TensorIndex, scores: torch.Tensor) -> torch.Tensor:
        check_rows(scores, index.relations[0].num_edges, "edge")
        indptr, _, eids = index.relations[0].csc()
        out = edge_softmax(indptr, eids, scores)
        ctx.index = index
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # asked for a gradient of the gradient
            return None, _composed_backward(ctx.index, out, gradient)
        indptr, _, eids = ctx.index.relations[0].csc()
        return None, edge_softmax_backward(indptr, eids, out, gradient)


def _composed_backward(
    index: TensorIndex, out: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    from dgl.backend.pytorch.sparse import gsddmm, gspmm

    weighted = out * gradient
    total = gspmm(index, "copy_rhs", "sum", None, weighted)
    return weighted - gsddmm(index, "mul", out, total, "e", "v")


# -- as C functions: results go into arguments ------------------------------------------------


def _given(array: Any) -> Features:
    """A features argument; DGL passes an array of no elements where there is none."""
    return array if isinstance(array, torch.Tensor) and array.dim() > 1 else None


def spmm_into(
    index: TensorIndex, op: str, reduce: str, u: Any, e: Any, out: Any, arg_u: Any, arg_e: Any
) -> None:
    """`gspmm`, with its results written to ``out``, ``arg_u`` and ``arg_e``."""
    found, args = gspmm(index, op, reduce, _given(u), _given(e))
    out.copy_(found.view_as(out))
    for target, arg in zip((arg_u, arg_e), args, strict=True):
        if arg is not None:
            target.copy_(arg.view_as(target))


def sddmm_into(
    index: TensorIndex, op: str, lhs: Any, rhs: Any, out: Any, lhs_target: int, rhs_target: int
) -> None:
    """`gsddmm`, with its result written to ``out``."""
    found = gsddmm(index, op, _given(lhs), _given(rhs), _target(lhs_target), _target(rhs_target))
    out.copy_(found.view_as(out))


def edge_softmax_into(index: TensorIndex, op: str, u: Any, scores: Any, out: Any) -> None:
    """Edge softmax of ``scores``, written to ``out``."""
    indptr, _, eids = index.relations[0].csc()
    out.copy_(edge_softmax(indptr, eids, scores))


def edge_softmax_backward_into(
    index: TensorIndex, op: str, out: Any, weighted: Any, gradient: Any, unused: Any
) -> None:
    """Gradient of edge softmax from its result and that times the gradient of it."""
    indptr, _, eids = index.relations[0].csc()
    total = spmm(indptr, None, eids, None, weighted, "copy_rhs", "sum")[0]
    src, dst = index.relations[0].coo()
    gradient.copy_(weighted - sddmm(src, dst, out, total, "mul", "e", "v"))


def spmm_hetero_into(
    index: TensorIndex,
    op: str,
    reduce: str,
    u: Sequence[Any],
    e: Sequence[Any],
    out: Sequence[Any],
    arg_u: Sequence[Any],
    arg_e: Sequence[Any],
    arg_u_ntype: Sequence[Any],
    arg_e_etype: Sequence[Any],
) -> None:
    """Messages over all relations, reduced at their destinations across relations.

    Outputs have one tensor a node type.  For max and min the arguments say which node and which
    edge an element is from, and of which node and edge type.
    """
    if reduce != "sum":
        worst = -torch.inf if reduce == "max" else torch.inf
        for dst in {dst for _, dst in index.schema.ends}:
            out[dst].fill_(worst)
    for etype, (src, dst) in enumerate(index.schema.ends):
        if index.num_edges(etype) == 0:
            continue
        found, (from_u, from_e) = gspmm(
            index.get_relation_graph(etype), op, reduce, _given(u[src]), _given(e[etype])
        )
        if reduce == "sum":
            out[dst].add_(found)
            continue
        better = found > out[dst] if reduce == "max" else found < out[dst]
        out[dst].copy_(torch.where(better, found, out[dst]))
        for chosen, arg, types, kind in (
            (from_u, arg_u, arg_u_ntype, src),
            (from_e, arg_e, arg_e_etype, etype),
        ):
            if chosen is not None:
                arg[dst].copy_(torch.where(better, chosen, arg[dst]))
                types[dst].masked_fill_(better, kind)


def sddmm_hetero_into(
    index: TensorIndex,
    op: str,
    lhs: Sequence[Any],
    rhs: Sequence[Any],
    out: Sequence[Any],
    lhs_target: int,
    rhs_target: int,
) -> None:
    """`gsddmm` for every relation; operands have one tensor a node type or an edge type."""
    for etype, (src, dst) in enumerate(index.schema.ends):
        if index.num_edges(etype) == 0:
            continue
        place = (src, etype, dst)
        sddmm_into(
            index.get_relation_graph(etype),
            op,
            lhs[place[lhs_target]] if lhs else None,
            rhs[place[rhs_target]] if rhs else None,
            out[etype],
            lhs_target,
            rhs_target,
        )


def update_grad_minmax_hetero(
    index: TensorIndex,
    op: str,
    gradients: Sequence[Any],
    args: Sequence[Any],
    types: Sequence[Any],
    out: Sequence[Any],
) -> None:
    """Gradients of max and min over relations, added to the rows that were chosen.

    Parameters
    ----------
    index : TensorIndex
        The reversed graph: its sources are where messages were reduced.
    gradients, args, types : list of Tensor
        Of each node type's results, the row each is from, and the node type (or with copy_rhs the
        edge type) of that row.
    out : list of Tensor
        Zeros, one tensor a node type, or with copy_rhs an edge type.
    """
    by_edge = op == "copy_rhs"
    done = set()
    for etype, (reduced, sent) in enumerate(index.schema.ends):
        kind = etype if by_edge else sent
        if (reduced, kind) in done:
            continue
        done.add((reduced, kind))
        is_of_type = types[reduced] == kind
        gradient = gradients[reduced] * is_of_type
        out[kind].scatter_add_(0, args[reduced].long() * is_of_type, gradient)

"""Sums and means of in-neighbours, with their gradients.

A function of their own: a mini-batch's take a GPU less time than DGL's Python takes to have them
computed.
"""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.message_passing.sparse_ops import (
    check_rows,
    has_csr_alone,
    is_recorded,
    only_relation,
)
from dgl_mgpu.graph.relation import Relation
from dgl_mgpu.ops import spmm, spmm_shares, spmm_transposed


def aggregate(index: TensorIndex, reduce: str, u: torch.Tensor) -> torch.Tensor:
    """The sum or mean over every node's in-neighbours, differentiable.

    Parameters
    ----------
    index : TensorIndex
        Of one relation.
    reduce : {'sum', 'mean'}
    u : Tensor, shape (num_src, \\*shape)

    Returns
    -------
    Tensor, shape (num_dst, \\*shape)
        0 for nodes without in-edges.
    """
    relation = only_relation(index, "gspmm")
    check_rows(u, relation.num_src, "source node")
    if is_recorded(u):
        return Aggregation.apply((relation, reduce, False), u)
    return _aggregated(relation, reduce, False, u)


class Aggregation(torch.autograd.Function):
    """Sum or mean of what every node's in-neighbours have; or the transpose of that.

    Both are linear, and the gradient of each is the other, of any order.
    """

    @staticmethod
    def forward(ctx: Any, way: tuple[Relation, str, bool], features: torch.Tensor) -> torch.Tensor:
        ctx.way = way
        return _aggregated(*way, features)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        relation, reduce, transposed = ctx.way
        if torch.is_grad_enabled():  # asked for a gradient of the gradient
            return None, Aggregation.apply((relation, reduce, not transposed), gradient)
        return None, _aggregated(relation, reduce, not transposed, gradient)


def _aggregated(
    relation: Relation, reduce: str, transposed: bool, features: torch.Tensor
) -> torch.Tensor:
    columns = features.unsqueeze(-1) if features.dim() == 1 else features
    out = (_spread if transposed else _gathered)(relation, reduce, columns)
    return out.squeeze(-1) if features.dim() == 1 else out


def _gathered(relation: Relation, reduce: str, u: torch.Tensor) -> torch.Tensor:
    if has_csr_alone(relation):
        total = spmm_transposed(*relation.csr(), u, None, relation.num_dst, "copy_lhs")
        return total if reduce == "sum" else _shares(total, relation.in_degrees().clamp(min=1))
    indptr, indices, _ = relation.csc()
    return spmm(indptr, indices, None, u, None, "copy_lhs", reduce)[0]


def _spread(relation: Relation, reduce: str, v: torch.Tensor) -> torch.Tensor:
    """What in-neighbours get of the nodes' ``v``: the whole each, or of a mean an equal share."""
    has_csc_alone = relation.held("csr") is None and has_csr_alone(relation.reverse())
    if reduce == "mean":
        csc = relation.held("csc")
        if csc is not None and not has_csc_alone:
            indptr, indices, _ = relation.csr()
            return spmm_shares(indptr, indices, csc[0], v)
        # Nodes without in-edges have shares that nobody looks at.
        v = _shares(v, relation.in_degrees())
    if has_csc_alone:
        return spmm_transposed(*relation.csc(), v, None, relation.num_src, "copy_lhs")
    indptr, indices, _ = relation.csr()
    return spmm(indptr, indices, None, v, None, "copy_lhs", "sum")[0]


def _shares(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows divided by counts."""
    counts = counts.view(-1, *[1] * (rows.dim() - 1))
    if rows.dtype.itemsize < 4:  # a half type, which could not hold the counts
        return (rows / counts.float()).to(rows.dtype)
    return rows / counts

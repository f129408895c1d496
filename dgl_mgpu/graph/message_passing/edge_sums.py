"""Sums over in-edges of what edges have, by weights of several heads: no head has rows of its own.

Composed of dgl.ops, each edge's row would be written once for each head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dgl_mgpu.graph.relation import Relation
from dgl_mgpu.ops import sddmm, spmm
from dgl_mgpu.ops.autograd import differentiable_once

_MAX_INT32 = 2**31 - 1


def edge_sums(relation: Relation, rows: Tensor, weights: Tensor) -> Tensor:
    """For each destination and head, the sum of its in-edges' rows times their weights.

    Parameters
    ----------
    rows : Tensor, shape (num_edges, width)
    weights : Tensor, dtype of the rows, shape (num_edges, heads)

    Returns
    -------
    Tensor, dtype of the rows, shape (num_dst, heads, width)
    """
    out: Tensor = _EdgeSums.apply(relation, rows, weights)
    return out


class _EdgeSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, relation: Relation, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.relation = relation
        ctx.save_for_backward(rows, weights)
        by_destination = relation.csc()
        # An edge is its own source.
        edges = by_destination.edge_ids()
        out, _, _ = spmm(
            by_destination.indptr, edges, edges, rows.unsqueeze(1), weights.unsqueeze(2), "mul",
            "sum",
        )  # fmt: skip
        return out

    @staticmethod
    @differentiable_once("sums of edges", "pass get_attention=True to the layer")
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        rows, weights = ctx.saved_tensors
        _, destinations = ctx.relation.coo()
        grad, (count, heads) = grad.contiguous(), weights.shape
        of_rows = of_weights = None
        if ctx.needs_input_grad[2]:
            edges = _numbers(count, destinations)
            found = sddmm(edges, destinations, rows.unsqueeze(1), grad, "dot", "u", "v")
            of_weights = found.squeeze(2)
        if ctx.needs_input_grad[1]:
            # An entry for each edge and head, that adds up heads at once.
            if max(count, len(grad)) * heads > _MAX_INT32:
                destinations = destinations.long()
            ends = (destinations * heads).unsqueeze(1) + _numbers(heads, destinations)
            starts, shares = heads * _numbers(count + 1, destinations), weights.reshape(-1, 1)
            of_rows, _, _ = spmm(
                starts, ends.flatten(), None, grad.flatten(0, 1), shares, "mul", "sum"
            )
        return None, of_rows, of_weights


def _numbers(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=like.dtype, device=like.device)

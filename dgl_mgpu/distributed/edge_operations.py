"""Operations on sources and on what destinations or edges have, in the rounds of an exchange."""

from __future__ import annotations

from typing import Any

import torch
from dgl import DGLGraph
from dgl.ops import gsddmm, gspmm

from dgl_mgpu.distributed.exchange.schedule import (
    CommSchedule,
    EdgeProducts,
    Gather,
    Scatter,
    Tile,
)
from dgl_mgpu.ops import sddmm


def edge_operation(
    rounds: CommSchedule,
    graph: DGLGraph,
    op: str,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    of_sources: tuple[bool, bool],
    target: str,
) -> torch.Tensor:
    """What an operation makes of two operands for each edge, as ``dgl.ops.gsddmm``; collective.

    Parameters
    ----------
    rounds : CommSchedule
    graph : DGLGraph
        The part, from its own and halo rows to its own.
    op : {'add', 'sub', 'mul', 'div', 'dot'}
    lhs, rhs : Tensor, shape (rows, \\*shape)
        Their shapes broadcast.
    of_sources : tuple of bool
        Whether the left, and whether the right operand is of own sources; one is at least.
    target : {'e', 'v'}
        What the other one is of: edges, or own destinations.

    Returns
    -------
    Tensor, shape (num_edges, \\*shape)
        Differentiable any number of times.
    """
    if op == "div":  # as DGL does
        op, rhs = "mul", 1.0 / rhs
    elif op == "sub":
        op, rhs = "add", -rhs
    is_scalar = lhs.dim() == rhs.dim() == 1
    count = max(lhs.dim(), rhs.dim(), 2)
    lhs, rhs = (x.reshape(len(x), *[1] * (count - x.dim()), *x.shape[1:]) for x in (lhs, rhs))
    if all(of_sources):
        found = Gather.apply(rounds, lhs + rhs if op == "add" else lhs * rhs)
    else:
        rows, other = (lhs, rhs) if of_sources[0] else (rhs, lhs)
        if op == "dot" and target == "v" and rows.shape[1:] == other.shape[1:]:
            shape = torch.Size((*rows.shape[1:-1], 1))
            found = EdgeProducts.apply(rounds, shape, rows, other)
            return found.squeeze(1) if is_scalar else found
        kind = "add" if op == "add" else "mul"
        found = EdgeOperation.apply(rounds, graph, kind, target, rows, other)
    if op == "dot":
        found = found.sum(-1, keepdim=True)
    return found.squeeze(1) if is_scalar else found


class EdgeOperation(torch.autograd.Function):
    """The sum or product of sources' rows and others', which have as many dimensions."""

    @staticmethod
    def forward(
        ctx: Any,
        rounds: CommSchedule,
        graph: DGLGraph,
        op: str,
        target: str,
        rows: torch.Tensor,
        other: torch.Tensor,
    ) -> torch.Tensor:
        ctx.about = rounds, graph, op, target
        ctx.shapes = rows.shape[1:], other.shape[1:]
        ctx.save_for_backward(*((rows, other) if op == "mul" else ()))
        shape = torch.broadcast_shapes(*ctx.shapes)
        out = rows.new_empty(rounds.part.relation.num_edges, *shape)

        def operate(_: int, tile: Tile, arrived: torch.Tensor) -> None:
            operand = tile.of(other) if target == "e" else other
            assert operand is not None
            tile.put(out, sddmm(*tile.relation.coo(), arrived, operand, op, "u", target))

        rounds.visit(rows, operate)
        return out

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[None, None, None, None, torch.Tensor | None, torch.Tensor | None]:
        rounds, graph, op, target = ctx.about
        row_shape, other_shape = ctx.shapes
        of_rows = of_other = None
        if ctx.needs_input_grad[4]:
            of_edges = gradient
            if op == "mul":
                of_edges = gsddmm(graph, "mul", gradient, ctx.saved_tensors[1], "e", target)
            of_rows = Scatter.apply(rounds, _summed_to(of_edges, row_shape))
        if ctx.needs_input_grad[5]:
            of_edges = gradient
            if op == "mul":
                rows = ctx.saved_tensors[0]
                of_edges = EdgeOperation.apply(rounds, graph, "mul", "e", rows, gradient)
            of_other = _summed_to(of_edges, other_shape)
            if target == "v":
                of_other = gspmm(graph, "copy_rhs", "sum", None, of_other)
        return None, None, None, None, of_rows, of_other


def _summed_to(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Rows added up over the dimensions in which ``shape`` was broadcast."""
    wide = [dim for dim, size in enumerate(shape, 1) if size != rows.shape[dim]]
    return (rows.sum(wide, keepdim=True) if wide else rows).contiguous()

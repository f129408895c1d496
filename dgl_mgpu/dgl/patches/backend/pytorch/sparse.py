"""Overrides in `dgl.backend.pytorch.sparse`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dgl_mgpu.dgl.patches import DISTRIBUTED, TENSORS, override


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """Cast floating CUDA tensors to autocast's dtype, as torch does for its own operators.

    On CPUs DGL leaves types as they are, and refuses operands of which linear layers under autocast
    have cast only some: they get the widest of their types.
    """
    if torch.is_autocast_enabled("cpu"):
        types = {tensor.dtype for tensor in _tensors(args) if _is_cast(tensor, "cpu")}
        if len(types) > 1:
            args = _cast(args, "cpu", functools.reduce(torch.promote_types, types))
    if torch.is_autocast_enabled("cuda"):
        args = _cast(args, "cuda", torch.get_autocast_dtype("cuda"))
    return args


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _is_cast(tensor: torch.Tensor, kind: str) -> bool:
    is_there = tensor.is_cuda if kind == "cuda" else tensor.is_cpu
    return is_there and tensor.is_floating_point() and tensor.dtype != torch.float64


def _cast(value: Any, kind: str, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if _is_cast(value, kind) else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, kind, dtype) for item in value)
    return value


def _disable_autocast_if_enabled() -> AbstractContextManager[Any]:
    """The arguments have been cast: no nested autocast."""
    if torch.is_autocast_enabled("cuda"):
        return torch.autocast("cuda", enabled=False)
    return nullcontext()


@override("dgl.backend.pytorch.sparse:gspmm", TENSORS, takes_index=True)
def gspmm(gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
    """In place of ``dgl.backend.pytorch.sparse.gspmm``: without autograd where it has no part."""
    from dgl_mgpu.graph.message_passing import operators

    return operators.backend_gspmm(gidx, op, reduce_op, lhs_data, rhs_data)


@override("dgl.backend.pytorch.sparse:gsddmm", TENSORS, takes_index=True)
def gsddmm(
    gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    """In place of ``dgl.backend.pytorch.sparse.gsddmm``."""
    from dgl_mgpu.graph.message_passing import operators

    return operators.backend_gsddmm(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)


@override("dgl.backend.pytorch.sparse:edge_softmax", TENSORS, takes_index=True)
def edge_softmax(
    gidx: Any, logits: torch.Tensor, eids: Any = "__ALL__", norm_by: str = "dst"
) -> Any:
    """In place of ``dgl.backend.pytorch.sparse.edge_softmax``."""
    from dgl_mgpu.graph.message_passing import operators

    return operators.backend_edge_softmax(gidx, logits, eids, norm_by)


@override("dgl.backend.pytorch.sparse:edge_softmax_hetero", DISTRIBUTED, takes_index=True)
def edge_softmax_hetero(
    gidx: Any, eids: Any = "__ALL__", norm_by: str = "dst", *logits: Any
) -> Any:
    """In place of ``dgl.backend.pytorch.sparse.edge_softmax_hetero``, for parts of graphs."""
    from dgl_mgpu.graph.message_passing import operators

    return operators.backend_edge_softmax_hetero(gidx, eids, norm_by, *logits)

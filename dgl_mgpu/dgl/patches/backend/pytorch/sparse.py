"""Overrides in `dgl.backend.pytorch.sparse`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dgl_mgpu.graph.dispatch import is_tensor_backed
from dgl_mgpu.graph.errors import raising_dgl_errors
from dgl_mgpu.graph.originals import originals


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """Cast floating CUDA tensors to autocast's dtype, as torch does for its own operators.

    On CPUs DGL leaves types as they are, and refuses what linear layers under autocast make of some
    operands and not of others: they get the widest of their types.
    """
    if torch.is_autocast_enabled("cpu"):
        types = {each.dtype for each in _tensors(args) if _is_cast(each, "cpu")}
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


@raising_dgl_errors
def gspmm(gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
    """In place of ``dgl.backend.pytorch.sparse.gspmm``: without autograd where it has no part."""
    if not is_tensor_backed(gidx):
        original = originals["dgl.backend.pytorch.sparse:gspmm"]
        return original(gidx, op, reduce_op, lhs_data, rhs_data)
    from dgl_mgpu.graph.message_passing import operators

    return operators.backend_gspmm(gidx, op, reduce_op, lhs_data, rhs_data)


@raising_dgl_errors
def gsddmm(
    gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Any:
    """In place of ``dgl.backend.pytorch.sparse.gsddmm``."""
    if not is_tensor_backed(gidx):
        original = originals["dgl.backend.pytorch.sparse:gsddmm"]
        return original(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)
    from dgl_mgpu.graph.message_passing import operators

    return operators.backend_gsddmm(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)


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

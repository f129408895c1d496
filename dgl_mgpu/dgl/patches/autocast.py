"""DGL's sparse operators under autocast, with the names torch has for it since 2.4."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


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

"""DGL's sparse operators under CUDA autocast, with the names torch has for it since 2.4."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """Cast floating CUDA tensors to autocast's dtype, as torch does for its own operators."""
    if not torch.is_autocast_enabled("cuda"):
        return args
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(_cast(arg, dtype) for arg in args)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        casts = value.is_cuda and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if casts else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _disable_autocast_if_enabled() -> AbstractContextManager[Any]:
    """The arguments have been cast: no nested autocast."""
    if torch.is_autocast_enabled("cuda"):
        return torch.autocast("cuda", enabled=False)
    return nullcontext()

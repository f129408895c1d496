"""Bindings to DGL's C functions that give calls with GPU tensors to this package."""

from __future__ import annotations

from typing import Any


def get_global_func(name: str, allow_missing: bool = False) -> Any:
    """In place of DGL's: a dispatcher for each function of the C API."""
    from dgl_mgpu.dgl.capi.dispatch import get_global_func

    return get_global_func(name, allow_missing)

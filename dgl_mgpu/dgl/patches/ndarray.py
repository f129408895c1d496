"""Arrays on GPUs, and shared memory that goes with its process."""

from __future__ import annotations

from typing import Any

import torch
from dgl._ffi.runtime_ctypes import DGLContext

from dgl_mgpu.graph.originals import originals
from dgl_mgpu.graph.shared_memory import map_shared_memory

_CPU = DGLContext(1, 0)


def array(arr: Any, ctx: Any = _CPU) -> Any:
    """In place of ``dgl.ndarray.array``: an array on a GPU is a tensor."""
    if ctx.device_type == _CPU.device_type:  # its array, with DGL's binary or without
        return originals["dgl.ndarray:array"](arr, ctx)
    from dgl import backend as F

    return torch.as_tensor(arr, device=F.to_backend_ctx(ctx))


def create_shared_mem_array(name: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """In place of DGL's, which unlinks the name with the last tensor, whoever has it by then."""
    return map_shared_memory(name, True, tuple(shape), dtype)

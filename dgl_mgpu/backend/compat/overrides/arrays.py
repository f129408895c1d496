"""Tensors on a GPU reach C functions as they are, not as DGL's NDArray, which needs C++ for GPUs."""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.backend.compat.importer import originals

_TENSOR = "dgl.backend.pytorch.tensor:"


def zerocopy_to_dgl_ndarray(data: torch.Tensor) -> Any:
    """DGL's array of a tensor on the CPU; a tensor on a GPU itself."""
    from dgl_mgpu.backend.capi.dispatch import stays_tensor

    if stays_tensor(data):
        return data.byte() if data.dtype == torch.bool else data.contiguous()
    return originals[_TENSOR + "zerocopy_to_dgl_ndarray"](data)


def zerocopy_to_dgl_ndarray_for_write(data: torch.Tensor) -> Any:
    """The same, for an array that is written to."""
    from dgl_mgpu.backend.capi.dispatch import stays_tensor

    if stays_tensor(data):
        return data
    return originals[_TENSOR + "zerocopy_to_dgl_ndarray_for_write"](data)


def zerocopy_from_dgl_ndarray(data: Any) -> torch.Tensor:
    """A tensor of DGL's array; a tensor itself."""
    if isinstance(data, torch.Tensor):
        return data
    return originals[_TENSOR + "zerocopy_from_dgl_ndarray"](data)


def array(arr: Any, ctx: Any = None) -> Any:
    """In place of ``dgl.ndarray.array``: an array on a GPU is a tensor."""
    original = originals["dgl.ndarray:array"]
    if ctx is None:
        return original(arr)
    if ctx.device_type == 1:
        return original(arr, ctx)
    from dgl import backend as F

    return torch.as_tensor(arr, device=F.to_backend_ctx(ctx))

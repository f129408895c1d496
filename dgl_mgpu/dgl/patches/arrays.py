"""Tensors on a GPU reach C functions as they are: DGL's NDArray would need C++ for GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from dgl._ffi.runtime_ctypes import DGLContext

from dgl_mgpu.graph.originals import originals

_CPU = DGLContext(1, 0)
_TENSOR = "dgl.backend.pytorch.tensor:"


def zerocopy_to_dgl_ndarray(data: torch.Tensor) -> Any:
    """DGL's array of a tensor on the CPU; a tensor on a GPU itself."""
    from dgl_mgpu.graph.dispatch import is_passed_as_tensor

    if is_passed_as_tensor(data):
        return data.byte() if data.dtype == torch.bool else data.contiguous()
    return originals[_TENSOR + "zerocopy_to_dgl_ndarray"](data)


def zerocopy_to_dgl_ndarray_for_write(input: torch.Tensor) -> Any:  # DGL's name
    """The same, for an array that is written to."""
    from dgl_mgpu.graph.dispatch import is_passed_as_tensor

    if is_passed_as_tensor(input):
        return input
    return originals[_TENSOR + "zerocopy_to_dgl_ndarray_for_write"](input)


def zerocopy_from_numpy(np_array: np.ndarray) -> torch.Tensor:  # DGL's name
    """A tensor that shares an array's memory, on the CPU whatever torch's default device is."""
    return torch.as_tensor(np_array, device="cpu")


def zerocopy_from_dgl_ndarray(data: Any) -> torch.Tensor:
    """A tensor of DGL's array; a tensor itself."""
    if isinstance(data, torch.Tensor):
        return data
    return originals[_TENSOR + "zerocopy_from_dgl_ndarray"](data)


def asnumpy(self: Any) -> np.ndarray:
    """In place of ``NDArray.asnumpy``: an array on a GPU is one that shares a tensor's memory."""
    if self.ctx.device_type == _CPU.device_type:
        return originals["dgl._ffi.ndarray:NDArrayBase.asnumpy"](self)
    return zerocopy_from_dgl_ndarray(self).cpu().numpy()


def array(arr: Any, ctx: Any = _CPU) -> Any:
    """In place of ``dgl.ndarray.array``: an array on a GPU is a tensor."""
    if ctx.device_type == _CPU.device_type:
        return originals["dgl.ndarray:array"](arr, ctx)
    from dgl import backend as F

    return torch.as_tensor(arr, device=F.to_backend_ctx(ctx))

"""On a GPU, work is queued on torch's streams."""

from __future__ import annotations

import ctypes

import torch
from dgl._ffi.runtime_ctypes import DGLContext

_CPU = 1  # DGL's number


def _dgl_get_stream(ctx: DGLContext) -> ctypes.c_void_p:
    """The stream that is current on a device: on a GPU torch's, on the CPU none."""
    if ctx.device_type == _CPU:
        return ctypes.c_void_p()
    return ctypes.c_void_p(torch.cuda.current_stream(ctx.device_id).cuda_stream)

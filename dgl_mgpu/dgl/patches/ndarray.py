"""Arrays on GPUs, and shared memory that goes with its process."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from dgl._ffi.runtime_ctypes import DGLContext

from dgl_mgpu.graph.originals import originals

_CPU = DGLContext(1, 0)


def array(arr: Any, ctx: Any = _CPU) -> Any:
    """In place of ``dgl.ndarray.array``: an array on a GPU is a tensor."""
    if ctx.device_type == _CPU.device_type:  # its array, with DGL's binary or without
        return originals["dgl.ndarray:array"](arr, ctx)
    from dgl import backend as F

    return torch.as_tensor(arr, device=F.to_backend_ctx(ctx))


# By name of memory, the process that created it last, and its file's inode.
_created: dict[str, tuple[int, int]] = {}


def create_shared_mem_array(name: str, shape: Any, dtype: Any) -> Any:
    """In place of DGL's, which unlinks it with the last tensor: at exit some are never freed."""
    array = originals["dgl.ndarray:create_shared_mem_array"](name, shape, dtype)
    is_known = _created.get(name, (0, 0))[0] == os.getpid()
    _created[name] = os.getpid(), _file(name).stat().st_ino
    if not is_known:
        # Also run in processes of multiprocessing, which leave without atexit's functions.
        Finalize(None, _unlink, (name,), exitpriority=0)
    return array


def _unlink(name: str) -> None:
    """Remove the memory, unless DGL has, and another process has made some of this name."""
    with suppress(FileNotFoundError):
        if _file(name).stat().st_ino == _created[name][1]:
            _file(name).unlink()


def _file(name: str) -> Path:
    return Path("/dev/shm") / name.lstrip("/")

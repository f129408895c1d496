"""Tensors in shared memory that other processes find by its name."""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from math import prod
from multiprocessing.util import Finalize
from pathlib import Path

import torch

from dgl_mgpu.graph.errors import InvalidCallError

_POSIX = Path("/dev/shm")


def map_shared_memory(
    name: str, is_create: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor in shared memory, made or found; it is removed with the tensor that made it.

    Or with its process: autograd may keep a tensor until then, which nothing frees.
    """
    path = shared_memory_path(name)
    num_bytes = max(1, prod(shape) * dtype.itemsize)
    if is_create:
        path.unlink(missing_ok=True)  # others may have the one of before, and keep it
    elif not path.exists():
        raise InvalidCallError(
            f"open shared memory {name!r}", "there is none of this name", "create it first"
        )
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_create else 0) | getattr(os, "O_BINARY", 0)
    file = os.open(path, flags, 0o600)
    try:
        if is_create:
            os.truncate(file, num_bytes)
        elif os.fstat(file).st_size < num_bytes:
            raise InvalidCallError(
                f"open shared memory {name!r} of {num_bytes} bytes",
                f"it has {os.fstat(file).st_size}",
                "ask for the shape and dtype that it was created with",
            )
        memory = mmap.mmap(file, num_bytes)
        inode = os.fstat(file).st_ino
    finally:
        os.close(file)
    if is_create:
        # Also at the end of processes of multiprocessing, which leave without atexit's functions.
        Finalize(memory, _unlink, (path, inode), exitpriority=0)
    elements = torch.frombuffer(memory, dtype=dtype, count=-1 if prod(shape) else 0)
    return elements.reshape(shape)


def shared_memory_path(name: str) -> Path:
    """The file that stands for shared memory of a name."""
    folder = _POSIX if _POSIX.is_dir() else Path(tempfile.gettempdir())
    return folder / name.lstrip("/")


def exists_shared_memory(name: str) -> bool:
    """Whether there is shared memory of a name."""
    return shared_memory_path(name).exists()


def _unlink(path: Path, inode: int) -> None:
    """Remove what a process has made, unless another has made some of this name meanwhile."""
    with suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()

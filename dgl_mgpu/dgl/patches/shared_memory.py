"""Shared memory that DGL makes by name, as for ``NodeEmbedding``, goes with the process."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from dgl_mgpu.graph.originals import originals

#: The process that made memory of a name last, and the file that it is.
_made: dict[str, tuple[int, int]] = {}


def create_shared_mem_array(name: str, shape: Any, dtype: Any) -> Any:
    """In place of DGL's, which unlinks it with the last tensor: at exit some are never freed."""
    array = originals["dgl.ndarray:create_shared_mem_array"](name, shape, dtype)
    is_known = _made.get(name, (0, 0))[0] == os.getpid()
    _made[name] = os.getpid(), _file(name).stat().st_ino
    if not is_known:
        # Also run in processes of multiprocessing, which leave without atexit's functions.
        Finalize(None, _unlink, (name,), exitpriority=0)
    return array


def _unlink(name: str) -> None:
    """Remove the memory, unless DGL has, and another process has made some of this name."""
    with suppress(FileNotFoundError):
        if _file(name).stat().st_ino == _made[name][1]:
            _file(name).unlink()


def _file(name: str) -> Path:
    return Path("/dev/shm") / name.lstrip("/")

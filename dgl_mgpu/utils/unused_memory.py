"""Memory that nobody needs, which Python's garbage and the C library keep for later."""

from __future__ import annotations

import ctypes
import gc

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_memory_back() -> None:
    """Have the system get it now, where the C library can (glibc)."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Have the system get what the C library keeps, without looking for Python's garbage."""
    if _trim is not None:
        _trim(0)

"""Memory that nobody needs, which Python's garbage and the C library keep for later."""

from __future__ import annotations

import ctypes
import gc


def give_memory_back() -> None:
    """Have the system get it now, where the C library can (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

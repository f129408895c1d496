"""Working memory that operators keep between calls.

Fresh pages cost more than the work done in them: the operating system clears each one at
first touch.  A buffer kept by a thread costs nothing the second time.
"""

from __future__ import annotations

import threading

import numpy as np

_kept = threading.local()


def scratch(name: str, size: int) -> np.ndarray:
    """An uninitialised int64 array of ``size``, overwritten by the next call with ``name``.

    It belongs to the calling thread: pass it to kernels, never return it to a user.
    """
    buffer = getattr(_kept, name, None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(size + size // 4, dtype=np.int64)
        setattr(_kept, name, buffer)
    return buffer[:size]

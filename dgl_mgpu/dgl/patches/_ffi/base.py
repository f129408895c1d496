"""What DGL's C++ does with signals."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dgl_mgpu.dgl.capi.libxsmm import strangers_file

#: More bytes than any system's ``struct sigaction`` has.
_SIGACTION_BYTES = 512


@contextmanager
def abort_ends_the_process() -> Iterator[None]:
    """Execute ``dgl._ffi.base``, and leave SIGABRT as it was.

    The library that DGL sums on CPUs with, libxsmm, handles it from its first use on: it frees what
    it has, within the signal, and waits for ever where that interrupted an allocation.  It asks for
    the signal once, when it is initialised, which takes a millisecond.  It opens files then: where
    somebody else has put one of these, it is not initialised, and not used.
    """
    yield
    initialise = getattr(sys.modules["dgl._ffi.base"]._LIB, "libxsmm_init", None)
    # DGL is built without it for other processors than x86.
    if initialise is None or strangers_file() is not None:
        return
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(signal.SIGABRT, None, before)
    initialise()
    libc.sigaction(signal.SIGABRT, before, None)

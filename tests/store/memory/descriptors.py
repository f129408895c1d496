"""Memory as of GPUs that NVLink joins over machines, on one machine: by file descriptors.

The driver's calls are the same but for the kind of handle, and for how it comes to others.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

from dgl_mgpu.comm.fabric import FabricMemory

_HANDLE = struct.Struct("<qq")  # process and descriptor
_PIDFD_GETFD = 438  # system call, of x86-64 and Arm


class DescriptorMemory(FabricMemory):
    """Memory that other processes of this user and machine can map."""

    kind = "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"

    def _to_bytes(self, exported: Any) -> bytes:
        return _HANDLE.pack(os.getpid(), int(exported))

    def _import(self, handle: bytes) -> Any:
        process, descriptor = _HANDLE.unpack(handle)
        opened = os.pidfd_open(process)
        libc = ctypes.CDLL(None, use_errno=True)
        ours = libc.syscall(_PIDFD_GETFD, opened, descriptor, 0)
        os.close(opened)
        if ours < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            return self._call("cuMemImportFromShareableHandle", ours, self._kind)
        finally:
            os.close(ours)

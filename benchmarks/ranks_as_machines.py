"""Ranks of one host that stand in for machines, also on one GPU."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

import torch

from dgl_mgpu.comm import communicator
from dgl_mgpu.comm.fabric import FabricMemory

_HANDLE = struct.Struct("<qq")  # process and descriptor
_PIDFD_GETFD = 438  # system call, of x86-64 and Arm


def be_machine(rank: int, size: int) -> torch.device:
    """Have this process, a rank of a job of so many, be a machine of its own; its device.

    Call it before torch.distributed is initialised.
    """
    communicator._machine_id = lambda: str(rank)
    return take_gpu(rank, size) if torch.cuda.is_available() else torch.device("cpu")


def take_gpu(rank: int, size: int) -> torch.device:
    """Have this rank use a GPU of its own, or share one where there are too few.

    Ranks that share one have to be of several machines.  Call it before torch.distributed is
    initialised.
    """
    gpus = torch.cuda.device_count()
    if size > gpus:
        # NCCL, as this package, takes no two ranks of a machine on one GPU.
        os.environ["NCCL_HOSTID"] = str(rank)
        communicator._gpu_of = lambda device: f"{rank}" if device.type == "cuda" else ""
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device


class DescriptorMemory(FabricMemory):
    """Memory as of GPUs that NVLink joins over machines, for processes of this user and host.

    The driver's calls are the same but for the kind of handle, and for how it comes to others.
    """

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

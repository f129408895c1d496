"""The memory of GPUs, real or not (fake_gpu.py), with what a process has not given back yet."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import Runtime
from tests.store.memory.fake_gpu import FakeRuntime

#: What a test of GPUs that needs no real ones runs on.
KINDS = [
    "fake",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
            reason="no GPU, or no CuPy",
        ),
    ),
]

_INVALID_RESOURCE_HANDLE = 400
# As /proc names files in /dev/shm that have no name.
_NAMELESS = re.compile(r"/dev/shm/#\d+")


class CountingRuntime(Runtime):
    """CUDA, and what this process holds of it.

    What is free on a GPU tells of every process that uses it.

    Parameters
    ----------
    blind : bool
        Whether CUDA refuses to map other processes' memory.
    """

    def __init__(self, blind: bool = False) -> None:
        super().__init__()
        self.blocks: dict[int, int] = {}
        self.opened: set[int] = set()
        self.registered: dict[int, int] = {}
        if blind:
            self._runtime = _Blind(self._runtime)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is allocated, mapped or registered."""
        return not (self.blocks or self.opened or self.registered)

    def allocate(self, nbytes: int, joined: bool = False) -> int:
        address = super().allocate(nbytes, joined)
        self.blocks[address] = nbytes
        return address

    def free(self, address: int) -> None:
        super().free(address)
        del self.blocks[address]

    def open(self, handle: bytes) -> int:
        address = super().open(handle)
        self.opened.add(address)
        return address

    def close(self, address: int) -> None:
        super().close(address)
        self.opened.remove(address)

    def register(self, address: int, nbytes: int) -> None:
        super().register(address, nbytes)
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        super().unregister(address)
        del self.registered[address]


class _Blind:
    """CUDA's runtime that maps no other process's memory."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        raise self._runtime.CUDARuntimeError(_INVALID_RESOURCE_HANDLE)


def make_runtime(
    kind: str, ranks: Communicator, blind: bool = False
) -> FakeRuntime | CountingRuntime:
    """This rank's GPU, of one of :data:`KINDS`; a ``blind`` one maps no other's memory."""
    if kind == "cuda":
        return CountingRuntime(blind)
    refused = [(ranks.rank, other) for other in range(ranks.size)] if blind else ()
    return FakeRuntime(ranks.rank, ranks.size, refused=refused)


def mapped_segments() -> int:
    """How many segments of shared memory this process has open or mapped."""
    files = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    }
    maps = Path("/proc/self/maps").read_text()
    return len({*_NAMELESS.findall(maps), *_NAMELESS.findall("\n".join(files))})


def fail(address: int, data: np.ndarray) -> None:
    """An upload that does not go well."""
    raise RuntimeError("the bus is on fire")

"""GPU memory that the ranks of one store share: allocated by one, mapped by others, freed last.

A rank allocates one block for all it holds; another maps the whole of it.  Memory that some
process still maps must not be freed, so every store has a board in shared memory on which each
rank stands with its process until it has unmapped what it read.  A rank frees its block when it
is the last on the board; processes that were killed do not count, for the driver has unmapped
what they had.  A process is told from a later one of the same number by when it was started.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from pathlib import Path
from typing import NoReturn

import numpy as np

from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.errors import StoreClosedError
from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.utils.fork_safe import freed_at_fork

# How long a rank that ends or closes a store waits for the others to unmap its memory.
_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.002
# Linux numbers processes below 2**22.
_PID_BITS = 22


class DeviceSegment:
    """A run of bytes in a GPU's memory, as this process has it mapped.

    Attributes
    ----------
    address : int
        On the GPU.
    nbytes : int
    """

    def __init__(self, runtime: Runtime, address: int, nbytes: int) -> None:
        self._runtime = runtime
        self.address = address
        self.nbytes = nbytes

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy an array's bytes to ``offset``."""
        self._runtime.upload(self.address + offset, np.ascontiguousarray(data))

    def read(self, offset: int, dtype: np.dtype | type, count: int) -> np.ndarray:
        """A copy of ``count`` elements at ``offset``."""
        nbytes = count * np.dtype(dtype).itemsize
        return self._runtime.download(self.address + offset, nbytes).view(dtype)

    def __reduce__(self) -> NoReturn:
        raise not_in_workers()


class DeviceMemory:
    """What one rank has allocated, mapped and registered on its GPU for one store.

    All of it goes back when :meth:`close` is called, when nothing refers to the object any
    more, or when the process ends.

    Parameters
    ----------
    runtime : Runtime
    board : Segment
        int64, one entry a rank, all zero at first.
    rank : int
    """

    def __init__(self, runtime: Runtime, board: Segment, rank: int) -> None:
        self.runtime = runtime
        self._held = _Held(runtime, board, rank)
        _all_held.append(self._held)
        self._finalizer = weakref.finalize(self, _Held.release, self._held)
        # At exit the others are waited for, see below.
        self._finalizer.atexit = False

    @property
    def block(self) -> int:
        """Address of this rank's own memory; 0 while there is none."""
        return self._held.block

    @property
    def is_mine(self) -> bool:
        """Whether this is the process it was made in and not a fork of it."""
        return self._held.is_mine

    def allocate(self, nbytes: int) -> None:
        """Allocate this rank's block.

        Raises
        ------
        DeviceMemoryError
        """
        self._held.block = self.runtime.allocate(nbytes)

    def share(self) -> bytes:
        """The handle of this rank's block for other processes.

        Raises
        ------
        PeerAccessError
        """
        return self.runtime.share(self._held.block)

    def open(self, handle: bytes) -> int:
        """Map another rank's block and return its address here.

        Raises
        ------
        PeerAccessError
        """
        if handle not in self._held.opened:
            self._held.opened[handle] = self.runtime.open(handle)
        return self._held.opened[handle]

    def register(self, segment: Segment) -> None:
        """Let kernels use a segment of host memory at its address.

        Raises
        ------
        DeviceMemoryError
        """
        if segment.nbytes:
            self.runtime.register(segment.address, segment.nbytes)
            self._held.registered.append(segment)

    def unregister(self, segment: Segment) -> None:
        """Take that back for one segment."""
        if segment in self._held.registered:
            self.runtime.synchronize()
            self._held.registered.remove(segment)
            self.runtime.unregister(segment.address)

    def close(self) -> None:
        """Unmap all, and free this rank's block once the others did the same.

        Where they do not for some seconds, it is freed later or when the process ends.  In a fork
        of this process there is nothing to give back.
        """
        if not self.is_mine:
            return
        self._finalizer()
        _await(self._held)
        self.runtime.trim()


class _Held:
    """What has to be given back, apart from who refers to it."""

    def __init__(self, runtime: Runtime, board: Segment, rank: int) -> None:
        self._runtime = runtime
        self._pid = os.getpid()
        self._entries = board.array(np.int64, (board.nbytes // 8,))
        self._rank = rank
        self.block = 0
        self.opened: dict[bytes, int] = {}
        self.registered: list[Segment] = []
        self._entries[rank] = _mark_of(self._pid)

    @property
    def is_mine(self) -> bool:
        """Whether this is the process it was made in and not a fork of it."""
        return os.getpid() == self._pid

    def release(self) -> None:
        """Unmap what other ranks hold, then free what can be freed."""
        if not self.is_mine or not self._entries[self._rank]:
            return
        try:
            self._runtime.synchronize()
            while self.opened:
                self._runtime.close(self.opened.popitem()[1])
            while self.registered:
                self._runtime.unregister(self.registered.pop().address)
        finally:
            # Also when the GPU fails, and with it every kernel that would read: the others need
            # not wait for it.
            self._entries[self._rank] = 0
        sweep()

    @property
    def is_mapped(self) -> bool:
        """Whether some process has not unmapped the own block yet."""
        return any(_is_alive(mark) for mark in self._entries.tolist())

    def free(self) -> None:
        """Free the own block."""
        if self.block:
            block, self.block = self.block, 0
            self._runtime.free(block)


#: What has not been given back yet, in this process.
_all_held: list[_Held] = []
# A finalizer may run at any time, also while its own thread sweeps.
_sweeping = freed_at_fork(threading.RLock())

os.register_at_fork(after_in_child=_all_held.clear)  # nothing of a fork's is its own


def sweep() -> None:
    """Free the blocks of stores given up earlier that other ranks no longer map."""
    with _sweeping:
        for held in list(_all_held):
            if held.is_mapped:
                continue
            try:
                _all_held.remove(held)
            except ValueError:  # a finalizer has run meanwhile and freed it
                continue
            held.free()


def _await(held: _Held) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while held in _all_held and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        sweep()


@atexit.register
def _at_exit() -> None:
    # The memory of a process that has ended is not there for others to read.
    for held in list(_all_held):
        held.release()
        _await(held)


def _mark_of(pid: int) -> int:
    """What tells a process from all others, also from a later one with its number; 0 if it has
    ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # From the third field on: the second is a name and may hold anything.
    fields = status.rpartition(")")[2].split()
    state, started = fields[0], int(fields[19])
    # What has ended may still be listed until its parent looks.
    return 0 if state in "ZX" else started << _PID_BITS | pid


def _is_alive(mark: int) -> bool:
    """Whether the process with a mark runs."""
    return mark != 0 and _mark_of(mark % (1 << _PID_BITS)) == mark


def not_in_workers() -> StoreClosedError:
    """What to raise where another process is to read a store in GPU memory."""
    return StoreClosedError(
        "read a store in GPU memory from another process, such as a DataLoader's worker",
        "GPU memory is mapped in the rank that built the store only",
        "use num_workers=0 (sampling runs on the GPU), or keep the store in shared memory "
        "(store.device=cpu)",
    )

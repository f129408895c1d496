"""GPU memory that the ranks of one store share: allocated by one, mapped by others, freed last.

A rank allocates one block for all of its shards; other ranks map the whole block.  Memory that a
process still maps must not be freed, so every store counts its users in shared memory: a rank is
counted until it has unmapped what it read, and frees its block when no other rank is counted.
Killed processes do not count: the driver has unmapped their memory.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from dgl_mgpu.comm.communicator import Communicator, error_text
from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.errors import StoreClosedError
from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.utils.fork_safe import freed_at_fork

# How long a rank that ends or closes a store waits for the others to unmap its memory.
_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.002
# Linux numbers processes below 2**22.
_PID_BITS = 22
# Two parts for other ranks' data, used in turn, and one for the first rank's own.
_PART_BYTES = 16 << 20
_OWN = 2

#: Rank, offset in its block, number of bytes and part of the window; None at the end.
_Order = tuple[int, int, int, int] | None


@dataclass(frozen=True)
class DeviceSegment:
    """A run of bytes in a GPU's memory, as this process has it mapped."""

    runtime: Runtime
    address: int
    nbytes: int

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy an array's bytes to ``offset``."""
        self.runtime.upload(self.address + offset, np.ascontiguousarray(data))

    def read(self, offset: int, dtype: np.dtype | type, count: int) -> np.ndarray:
        """A copy of ``count`` elements at ``offset``."""
        nbytes = count * np.dtype(dtype).itemsize
        return self.runtime.download(self.address + offset, nbytes).view(dtype)

    def __reduce__(self) -> NoReturn:
        raise not_in_workers()


class DeviceMemory:
    """What one rank has allocated, mapped and registered on its GPU for one store.

    All of it goes back when :meth:`close` is called, when nothing refers to the object any
    more, or when the process ends.
    """

    def __init__(self, runtime: Runtime, ref_counts: Segment, rank: int) -> None:
        self.runtime = runtime
        self._allocations = _Allocations(runtime, RefCounts(ref_counts, rank))
        _unreleased.append(self._allocations)
        self._finalizer = weakref.finalize(self, _Allocations.release, self._allocations)
        # _at_exit also waits for the other ranks.
        self._finalizer.atexit = False

    @property
    def block(self) -> int:
        """Address of this rank's own memory; 0 while there is none."""
        return self._allocations.block

    @property
    def is_mine(self) -> bool:
        """Whether this is the process it was made in and not a fork of it."""
        return self._allocations.is_mine

    def allocate(self, nbytes: int, joined: bool = False) -> None:
        """Allocate this rank's block, or raise DeviceMemoryError.

        With ``joined`` machines that NVLink joins can map it.
        """
        self._allocations.block = self.runtime.allocate(nbytes, joined)

    def share(self) -> bytes:
        """The handle of this rank's block for other processes, or PeerAccessError."""
        return self.runtime.share(self._allocations.block)

    def open(self, handle: bytes) -> int:
        """Map another rank's block and return its address here, or raise PeerAccessError."""
        if handle not in self._allocations.opened:
            self._allocations.opened[handle] = self.runtime.open(handle)
        return self._allocations.opened[handle]

    def unmap(self, handles: Iterable[bytes]) -> None:
        """Undo :meth:`open` of each handle of which it was done."""
        self.runtime.synchronize()
        for handle in handles:
            if handle in self._allocations.opened:
                self.runtime.close(self._allocations.opened.pop(handle))

    def register(self, segment: Segment) -> None:
        """Let kernels use a segment of host memory at its address, or raise DeviceMemoryError."""
        if segment.nbytes:
            self.runtime.register(segment.address, segment.nbytes)
            self._allocations.registered.append(segment)

    def unregister(self, segment: Segment) -> None:
        """Undo :meth:`register`."""
        if segment in self._allocations.registered:
            self.runtime.synchronize()
            self._allocations.registered.remove(segment)
            self.runtime.unregister(segment.address)

    def close(self) -> None:
        """Unmap all, and free this rank's block once the other ranks have unmapped it.

        If they do not within some seconds, the block is freed later or when the process ends.  In
        a fork of this process this does nothing.
        """
        if not self.is_mine:
            return
        self._finalizer()
        _wait_until_freed(self._allocations)
        self.runtime.trim()


class RefCounts:
    """The processes that use the GPU memory of a store, in shared memory.

    Each rank has an entry: the stamp of its process while it uses the memory, else 0.  Entries of
    processes that have ended do not count.  ``segment`` has one int64 a rank, all zero at first,
    and ``rank`` is counted from now on.
    """

    def __init__(self, segment: Segment, rank: int) -> None:
        self._stamps = segment.array(np.int64, (segment.nbytes // 8,))
        self._rank = rank
        self._stamps[rank] = _process_stamp(os.getpid())

    @property
    def counts_this_rank(self) -> bool:
        """Whether :meth:`drop` was not called yet."""
        return bool(self._stamps[self._rank])

    def drop(self) -> None:
        """Count this rank no longer."""
        self._stamps[self._rank] = 0

    @property
    def is_used(self) -> bool:
        """Whether some running process is counted."""
        return any(_is_alive(stamp) for stamp in self._stamps.tolist())


class _Allocations:
    """The memory that one rank has to give back; outlives the :class:`DeviceMemory`."""

    def __init__(self, runtime: Runtime, ref_counts: RefCounts) -> None:
        self._runtime, self.ref_counts = runtime, ref_counts
        self._pid = os.getpid()
        self.block = 0
        self.opened: dict[bytes, int] = {}
        self.registered: list[Segment] = []

    @property
    def is_mine(self) -> bool:
        """Whether this is the process it was made in and not a fork of it."""
        return os.getpid() == self._pid

    def release(self) -> None:
        """Unmap the blocks of other ranks, then free what no other rank maps."""
        if not self.is_mine or not self.ref_counts.counts_this_rank:
            return
        try:
            self._runtime.synchronize()
            while self.opened:
                self._runtime.close(self.opened.popitem()[1])
            while self.registered:
                self._runtime.unregister(self.registered.pop().address)
        finally:
            # Also if the GPU fails: no kernel of this rank reads any more, so others need not wait.
            self.ref_counts.drop()
        sweep()

    def free(self) -> None:
        """Free this rank's block."""
        if self.block:
            block, self.block = self.block, 0
            self._runtime.free(block)


#: Blocks of this process that are not freed yet.
_unreleased: list[_Allocations] = []
# Reentrant: a finalizer may run while its own thread sweeps.
_sweeping = freed_at_fork(threading.RLock())

os.register_at_fork(after_in_child=_unreleased.clear)  # a fork owns no GPU memory


def sweep() -> None:
    """Free the blocks of closed stores that other ranks no longer map."""
    with _sweeping:
        for allocations in list(_unreleased):
            if allocations.ref_counts.is_used:
                continue
            try:
                _unreleased.remove(allocations)
            except ValueError:  # a finalizer has freed it in the meantime
                continue
            allocations.free()


def _wait_until_freed(allocations: _Allocations) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while allocations in _unreleased and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        sweep()


@atexit.register
def _at_exit() -> None:
    # Other ranks cannot read the memory of a process that has ended.
    for allocations in list(_unreleased):
        allocations.release()
        _wait_until_freed(allocations)


def _process_stamp(pid: int) -> int:
    """A number of the process, and of no later one with the same pid; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # From the third field on: the second is a name and may hold anything.
    fields = status.rpartition(")")[2].split()
    state, started = fields[0], int(fields[19])
    # A process that has ended is listed until its parent waits for it.
    return 0 if state in "ZX" else started << _PID_BITS | pid


def _is_alive(stamp: int) -> bool:
    """Whether the process with this stamp runs."""
    return stamp != 0 and _process_stamp(stamp % (1 << _PID_BITS)) == stamp


def not_in_workers() -> StoreClosedError:
    """The error for a store in GPU memory that another process is to read."""
    return StoreClosedError(
        "read a store in GPU memory from another process, such as a DataLoader's worker",
        "GPU memory is mapped in the rank that built the store only",
        "use num_workers=0 (sampling runs on the GPU), or keep the store in shared memory "
        "(store.device=cpu)",
    )


class UploadChannel:
    """Uploads data that the first rank reads into every rank's GPU memory.

    The first rank copies a run of bytes into a window in shared memory, which is registered with
    every GPU, and announces the rank that they are for.  That rank uploads them while the first
    rank fills the other half of the window.  So every rank writes to its own GPU only, each byte
    crosses the bus once, and the window is all the memory that this takes, for any number of ranks.

    ``window`` has :attr:`window_bytes`, and ``block`` is the address of this rank's own block.
    """

    window_bytes = 3 * _PART_BYTES

    def __init__(self, ranks: Communicator, runtime: Runtime, window: Segment, block: int) -> None:
        self._ranks = ranks
        self._runtime = runtime
        self._block = block
        self._parts = window.array(np.uint8, (3, _PART_BYTES))
        self._turn = 0
        self._failed = False

    def run(self, fill: Callable[[], None] | None) -> None:
        """Call ``fill``, which writes to targets, on the first rank; upload for it on the others.

        Collective; raises on every rank when an upload fails on one.
        """
        if fill is None:
            return self._serve()
        try:
            fill()
        finally:
            if not self._failed:
                self._exchange(None)

    def write(self, rank: int, offset: int, data: np.ndarray) -> None:
        """Copy an array's bytes to ``offset`` of a rank's block."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        for begin in range(0, len(flat), _PART_BYTES):
            run = flat[begin : begin + _PART_BYTES]
            part = _OWN if rank == 0 else self._turn
            self._parts[part, : len(run)] = run
            if rank == 0:
                self._upload(offset + begin, len(run), part)
            else:
                # A rank comes to this exchange once it has uploaded the previous run, so the other
                # part of the window is free then.
                self._exchange((rank, offset + begin, len(run), part))
                self._turn = 1 - self._turn

    def _serve(self) -> None:
        failure: Exception | None = None
        while order := self._exchange(None, failure):
            rank, offset, nbytes, part = order
            if rank == self._ranks.rank:
                try:
                    self._upload(offset, nbytes, part)
                except Exception as error:
                    failure = error

    def _exchange(self, order: _Order, failure: Exception | None = None) -> _Order:
        """Send the first rank's order and every rank's failure; raise if there is one."""
        reason = "" if failure is None else error_text(failure)
        exchanged = self._ranks.all_gather((order, reason))
        for rank, (_, rank_reason) in enumerate(exchanged):
            if rank_reason:
                self._failed = True
                raise failure or self._ranks.failed("fill GPU memory", rank, rank_reason)
        return exchanged[0][0]

    def _upload(self, offset: int, nbytes: int, part: int) -> None:
        self._runtime.upload(self._block + offset, self._parts[part, :nbytes])


@dataclass(frozen=True)
class UploadTarget:
    """Memory at ``offset`` of a rank's block, for the first rank to write to."""

    channel: UploadChannel
    rank: int
    offset: int

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy an array's bytes to ``offset``."""
        self.channel.write(self.rank, self.offset + offset, data)

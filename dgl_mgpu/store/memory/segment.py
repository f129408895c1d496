"""A segment: one run of bytes in memory that several processes map.

Shared memory and files are the same thing here: a file without a name, in ``/dev/shm`` or in
a folder on disk, readable by this user alone.  Having no name it cannot be guessed, found or
left behind: whatever ends the processes (Ctrl-C, ``kill -9``), the system takes the memory
back with the last of them.  Ranks reach each other's segments through ``/proc``.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np

from dgl_mgpu.errors import SharedMemoryError, StoreClosedError
from dgl_mgpu.machine.numa import interleave, memory_nodes
from dgl_mgpu.machine.shared_memory import (
    SHARED_MEMORY,
    SharedMemory,
    free_shared_bytes,
    unusable_shared_memory,
)

#: Bytes from which memory is spread over sockets: what GPUs read much of is larger.
_MIN_SPREAD = 16 << 20


class Segment:
    """A mapped run of bytes, shared with every process that attaches to it.

    A pickled segment reaches processes that this one starts, by ``spawn`` as by ``fork``, and other
    processes of this user while this one has it.  ``bytes`` is the mapping itself, uint8, shape
    (nbytes,).
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        # An empty mapping is not allowed: a segment without rows still maps one byte.
        self._map = mmap.mmap(fd, max(nbytes, 1))
        self._fd = fd  # from here on the segment's own, and closed with it
        self.nbytes = nbytes
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)[:nbytes]

    @classmethod
    def create(cls, nbytes: int, folder: Path = SHARED_MEMORY) -> Segment:
        """Create a segment of ``nbytes`` bytes of zeros with mode 0600.

        The memory is reserved at once: a full ``/dev/shm`` is an error here and now, not a
        bus error at the first write.  On a machine of several sockets it lies on all of them.

        Raises SharedMemoryError if ``folder`` does not exist, cannot be written, has too little
        room, or lies on a file system without nameless files.
        """
        try:
            fd = os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _not_usable(folder, nbytes, error) from error
        try:
            if folder == SHARED_MEMORY:
                _spread(fd, nbytes)
            os.posix_fallocate(fd, 0, max(nbytes, 1))
            return cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            if error.errno == errno.ENOSPC:
                raise _no_room(folder, nbytes) from error
            if error.errno == errno.ENOMEM:
                raise _not_mapped(nbytes, error) from error
            raise _not_usable(folder, nbytes, error) from error

    @property
    def path(self) -> Path:
        """Where other processes of this user find it while this one lives."""
        return Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    @classmethod
    def attach(cls, path: Path, nbytes: int) -> Segment:
        """Map the segment that another process has at ``path``.

        Raises SharedMemoryError if that cannot be reached or has another size.
        """
        action = f"map the shared segment {path} of {nbytes} bytes"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SharedMemoryError(
                action,
                error.strerror or str(error),
                "run the ranks as one user in one container (one PID namespace), and see why "
                "the rank that owned it ended",
            ) from error
        size = os.fstat(fd).st_size
        if size != max(nbytes, 1):
            os.close(fd)
            raise SharedMemoryError(
                action,
                f"the segment has {size} bytes",
                "build the store with the same plan on every rank",
            )
        try:
            return cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise _not_mapped(nbytes, error) from error

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return self.bytes.ctypes.data

    def own_bytes(self) -> np.ndarray:
        """All bytes, uint8, of which those that this process changes become its own.

        It takes memory for the pages that are changed.  Nobody may write to the segment any more.
        """
        private = mmap.mmap(self._fd, max(self.nbytes, 1), flags=mmap.MAP_PRIVATE)
        return np.frombuffer(private, dtype=np.uint8)[: self.nbytes]

    def array(self, dtype: np.dtype | type, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        """A writable array over part of the segment, without a copy."""
        return np.ndarray(shape, dtype, buffer=self._map, offset=offset)

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy an array's bytes to ``offset``."""
        self.array(data.dtype, data.shape, offset)[...] = data

    def read(self, offset: int, dtype: np.dtype | type, count: int) -> np.ndarray:
        """A copy of ``count`` elements at ``offset``."""
        return self.array(dtype, (count,), offset).copy()

    def __reduce__(self):
        if get_spawning_popen() is not None:  # the process that is started inherits it
            return _inherited, (reduction.DupFd(self._fd), self.nbytes)
        status = os.fstat(self._fd)
        return _unpickled, (self.path, (status.st_dev, status.st_ino), self.nbytes)

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)


def _spread(fd: int, nbytes: int) -> None:
    """Have shared memory, of which nothing is reserved yet, lie on all of the machine's sockets."""
    nodes = memory_nodes()
    if nbytes < _MIN_SPREAD or len(nodes) < 2:
        return
    os.ftruncate(fd, nbytes)
    with mmap.mmap(fd, nbytes) as mapped:
        # The file keeps the policy, for all who map it.
        interleave(ctypes.addressof(ctypes.c_char.from_buffer(mapped)), nbytes, nodes)


def _inherited(shared_fd: Any, nbytes: int) -> Segment:
    return Segment(shared_fd.detach(), nbytes)


def _unpickled(path: Path, file: tuple[int, int], nbytes: int) -> Segment:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _gone(error.strerror or str(error)) from error
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != file:  # another file has its number by now
        os.close(fd)
        raise _gone("it has closed it")
    return Segment(fd, nbytes)


def _gone(reason: str) -> StoreClosedError:
    return StoreClosedError(
        "read a pickled store",
        f"the process that has its memory ended, is another user's or closed the store ({reason})",
        "unpickle it while that process has the store open; build it anew elsewhere, or share it "
        "with ranks",
    )


def require_room(nbytes: int, folder: Path = SHARED_MEMORY) -> None:
    """Raise SharedMemoryError, before anything is created, if ``folder`` has too little room."""
    if nbytes > _free_bytes(folder, nbytes):
        raise _no_room(folder, nbytes)


def _free_bytes(folder: Path, nbytes: int) -> int:
    if folder == SHARED_MEMORY:
        return free_shared_bytes()
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise _not_usable(folder, nbytes, error) from error
    return status.f_bavail * status.f_frsize


def _not_mapped(nbytes: int, error: OSError) -> SharedMemoryError:
    return SharedMemoryError(
        f"map {nbytes} bytes of shared memory",
        error.strerror or str(error),
        "raise the limits on address space and memory (ulimit -v, the container's)",
    )


def _not_usable(folder: Path, nbytes: int, error: OSError) -> SharedMemoryError:
    if folder == SHARED_MEMORY:
        return unusable_shared_memory(error.strerror or str(error))
    return SharedMemoryError(
        f"place {nbytes} bytes in {folder}",
        error.strerror or str(error),
        "choose an existing folder that this user can write, on a local file system",
    )


def _no_room(folder: Path, nbytes: int) -> SharedMemoryError:
    mib = 1 << 20
    free = _free_bytes(folder, nbytes)
    fix = f"free space in {folder}"
    if folder == SHARED_MEMORY:
        fix = SharedMemory.of_this_machine().advice(nbytes)
    return SharedMemoryError(
        f"place {nbytes / mib:.1f} MiB in {folder}",
        f"{free / mib:.1f} MiB are free, {(nbytes - free) / mib:.1f} MiB too few",
        fix,
    )

"""What memory that processes share can hold on this machine: that of ``/dev/shm``."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from multiprocessing import synchronize
from pathlib import Path

from dgl_mgpu.errors import SharedMemoryError
from dgl_mgpu.utils.units import human_bytes

#: Where shared memory lives on Linux.
SHARED_MEMORY = Path("/dev/shm")

# Share of what is free that is left to others.
_SPARE = 0.1
_READ_ONLY = "it is mounted read-only"


@dataclass(frozen=True)
class SharedMemory:
    """Memory that processes share."""

    room: int  # bytes that may be taken
    ram: int  # bytes that it could be enlarged to, by a mount option or a container's

    @classmethod
    def of_this_machine(cls) -> SharedMemory:
        """What is free of ``/dev/shm`` and of the host's memory, less a tenth for others.

        Raises SharedMemoryError if there is no ``/dev/shm``, or it is read-only.
        """
        free, ram = free_shared_bytes(), int(free_host_bytes() * (1 - _SPARE))
        return cls(min(int(free * (1 - _SPARE)), ram), ram)

    def advice(self, nbytes: int) -> str:
        """How to make room for so many bytes, which do not fit."""
        if nbytes <= self.ram:
            return (
                f"enlarge {SHARED_MEMORY} (docker run --shm-size=…; mount -o remount,size=… "
                f"{SHARED_MEMORY})"
            )
        return f"use a machine or a container with more memory ({human_bytes(self.ram)} here)"


def free_host_bytes() -> int:
    """Bytes of the host's memory that are free, and of this process's cgroup's."""
    free = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free.append(max(int(text) - int(used.read_text()), 0))
    return min(free)


def free_shared_bytes() -> int:
    """Bytes of ``/dev/shm`` that are free.

    Raises SharedMemoryError if there is no ``/dev/shm``, or it is read-only.
    """
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        raise unusable_shared_memory(error.strerror or str(error)) from error
    if status.f_flag & os.ST_RDONLY:
        raise unusable_shared_memory(_READ_ONLY)
    return status.f_bavail * status.f_frsize


def lacks_shared_memory(error: BaseException) -> bool:
    """Whether torch, or multiprocessing for a semaphore, ran out of room in ``/dev/shm``."""
    if "unable to allocate shared memory" in str(error):
        return True
    modules = [f.f_globals.get("__name__") for f, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, OSError) and modules[-1:] == [synchronize.__name__]


def unusable_shared_memory(found: str) -> SharedMemoryError:
    """The error for a ``/dev/shm`` in which nothing can be placed at all."""
    return SharedMemoryError(
        f"share memory between processes in {SHARED_MEMORY}",
        found,
        f"mount it for all to write (mount -t tmpfs -o mode=1777 tmpfs {SHARED_MEMORY}; "
        f"docker run --tmpfs {SHARED_MEMORY}:rw), and see what dgl-mgpu doctor says",
    )

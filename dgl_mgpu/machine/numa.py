"""The machine's NUMA nodes, and memory that is spread over them.

Every GPU reads rows of all of a store's host memory.  Where a machine has several sockets, memory
lies by default on the socket of the process that writes it first: one socket's memory, and the link
between sockets, would then carry what all GPUs read.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")
#: The system calls ``mbind`` and ``get_mempolicy``, which the C library lacks, by processor.
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
#: Policies: what a process has from the start, pages in turn, and on the node of who writes first.
_DEFAULT, _INTERLEAVED, _LOCAL = 0, 3, 4
_WORD_BITS = 64


def memory_nodes(folder: Path = NODES) -> list[int]:
    """Nodes with processors and memory of their own; none where the system does not tell.

    Memory without processors is a GPU's, as on a Grace Hopper.
    """
    try:
        listed = [(folder / name).read_text() for name in ("has_cpu", "has_memory")]
    except OSError:
        return []
    with_processors, with_memory = map(_numbers, listed)
    return sorted(with_processors & with_memory)


def _numbers(text: str) -> set[int]:
    """Numbers of a list as the kernel writes it, such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def interleave(address: int, nbytes: int, nodes: Sequence[int]) -> bool:
    """Spread pages of memory that have not been written yet over nodes, one after another.

    Parameters
    ----------
    address, nbytes : int
        Mapped memory, from the beginning of a page.  If it is shared, all processes' is.

    Returns
    -------
    bool
        Whether the system does so.  Containers may forbid it, and who starts the process may have
        chosen nodes (``numactl``); the memory works all the same.
    """
    calls = _CALLS.get(platform.machine())
    if calls is None or not nodes or not nbytes:
        return False
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    bind, get = calls
    own = ctypes.c_int()
    nothing = ctypes.c_void_p(), ctypes.c_ulong(), ctypes.c_void_p(), ctypes.c_ulong()
    failure = _failure(get, ctypes.byref(own), *nothing)
    if failure is None and own.value not in (_DEFAULT, _LOCAL):
        failure = "the process has a policy of its own"
    if failure is None:
        failure = _failure(
            bind,
            ctypes.c_void_p(address),
            ctypes.c_ulong(nbytes),
            ctypes.c_int(_INTERLEAVED),
            words,
            ctypes.c_ulong(len(words) * _WORD_BITS + 1),  # the kernel looks at one bit less
            ctypes.c_uint(),
        )
    if failure is not None:
        log.info("host memory is not spread over NUMA nodes %s: %s", [*nodes], failure)
    return failure is None


def _failure(number: int, *arguments: Any) -> str | None:
    """Why a system call failed; None if it did not."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(ctypes.c_long(number), *arguments)
    return os.strerror(ctypes.get_errno()) if failed else None

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

log = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")
#: The system call ``mbind``, which the C library lacks, by processor; policies of memory.
_MBIND = {"x86_64": 237, "aarch64": 235}
_INTERLEAVED = 3
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
        Whether the system does so: containers may forbid it, and the memory works all the same.
    """
    call = _MBIND.get(platform.machine())
    if call is None or not nodes or not nbytes:
        return False
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(call),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_INTERLEAVED),
        words,
        ctypes.c_ulong(len(words) * _WORD_BITS + 1),  # the kernel looks at one bit less
        ctypes.c_uint(0),
    )
    if failed:
        reason = os.strerror(ctypes.get_errno())
        log.info("host memory is not spread over NUMA nodes %s: %s", [*nodes], reason)
    return not failed

"""Who is at the other end of connections within this machine.

Gloo takes whoever connects first for the rank that it waits for.  On one machine the kernel tells
which user has each end of a connection, so a group whose connections all end at sockets of this
user is this user's own: nobody else can read what is sent on them, or send.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dgl_mgpu.errors import RankFailedError

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = 1
# How long another rank gets to accept a connection, and how often it is looked for.
_ACCEPT_SECONDS, _LOOK_SECONDS = 30.0, 0.02
_ASKED = "connect to the other ranks"


class _Socket(NamedTuple):
    """A TCP socket of this machine, as the kernel lists it."""

    local: tuple[str, int]
    remote: tuple[str, int]
    state: int
    user: int
    inode: int


@contextlib.contextmanager
def connections_are_ours(count: int) -> Iterator[None]:
    """Raise unless what this process connects to inside, on this machine, is this user's too.

    Other machines' ends are theirs to look at. ``count``: how many connections are made inside, at
    least. Raises RankFailedError.
    """
    before = _own_inodes()
    yield
    inodes = _own_inodes() - before
    deadline = time.monotonic() + _ACCEPT_SECONDS
    while True:
        sockets = _sockets()
        ends = {(end.local, end.remote): end for end in sockets}
        own = [end for end in sockets if end.inode in inodes and end.state == _ESTABLISHED]
        peers = [ends.get((end.remote, end.local)) for end in own]
        # Until a process has accepted a connection, and when it has closed it, the kernel lists
        # the socket as nobody's: user 0, no inode.
        waits = any(
            (other is None or not other.inode) and _is_of_this_machine(end)
            for end, other in zip(own, peers, strict=True)
        )
        if not waits or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_SECONDS)
    if len(own) < count:
        raise RankFailedError(
            _ASKED,
            f"{len(own)} of {count} connections are there once the group is made, so that nobody "
            "can tell yet who is at their other ends",
            "see why a rank ended; or unset TORCH_GLOO_LAZY_INIT, which has gloo connect later",
        )
    strangers = {other.user for other in peers if other and other.inode} - {os.geteuid()}
    if strangers:
        raise RankFailedError(
            _ASKED,
            f"user {min(strangers)} took the place of one of them",
            "find out who that is (ss -tep, as root), and start the run again",
        )
    if waits:
        raise RankFailedError(
            _ASKED,
            f"nobody accepted a connection within {_ACCEPT_SECONDS:g} s, or it was closed at once",
            "see why a rank ended, and start the run again",
        )


def _own_inodes() -> set[int]:
    """Inodes of the sockets that this process has."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, by another thread
            kind, _, inode = os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")
            if kind == "socket":
                inodes.add(int(inode.rstrip("]")))
    return inodes


def _sockets() -> list[_Socket]:
    sockets = []
    for table in _TABLES:
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in table.read_text().splitlines()[1:]:
                _, local, remote, state, _, _, _, user, _, inode, *_ = line.split()
                sockets.append(
                    _Socket(_end(local), _end(remote), int(state, 16), int(user), int(inode))
                )
    return sockets


def _end(text: str) -> tuple[str, int]:
    """Address and port, from hexadecimal words of the machine's own byte order."""
    address, _, port = text.partition(":")
    words = bytes.fromhex(address)
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    ip = ipaddress.ip_address(packed)
    mapped = getattr(ip, "ipv4_mapped", None)
    return str(mapped or ip), int(port, 16)


def _is_of_this_machine(connection: _Socket) -> bool:
    """Whether its other end has to be on this machine: it is reached at an address of its own."""
    here, there = connection.local[0], connection.remote[0]
    return here == there or ipaddress.ip_address(there).is_loopback

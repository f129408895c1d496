"""How ranks on other machines connect to the first one, and are told from strangers.

The first rank asks everybody who connects with a nonce; a rank answers with its number and an
HMAC of both (RFC 2104) by a key that only ranks have.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from dgl_mgpu.errors import RankFailedError

_CONNECT_SECONDS = 30.0
# A rank answers at once; others that try the port are not kept for long, nor are many of them.
_HELLO_SECONDS = 5.0
_MOST_STRANGERS = 64
_LOOK_SECONDS = 0.1
_NONCE_BYTES = 32
_HELLO = struct.Struct("!32si")
_FIX = "let all machines connect to any port of the first one (MASTER_ADDR)"


def listen() -> socket.socket:
    """A listener that other machines can reach, on any free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def connect(address: str, port: int, key: bytes, rank: int) -> socket.socket:
    """Connect to the first rank. ``rank``: this one's number. Raises RankFailedError."""
    try:
        peer = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        with peer.makefile("rb") as asks:
            nonce = asks.read(_NONCE_BYTES)
        peer.sendall(_hello(key, nonce, rank))
    except OSError as error:
        raise RankFailedError(
            f"connect to the first rank at {address}, port {port}", str(error), _FIX
        ) from error
    return peer


def accept(listener: socket.socket, key: bytes, count: int) -> dict[socket.socket, int]:
    """Connections of ``count`` ranks that know the key, and their numbers.

    The listener is closed. All who connect are heard at once: one that says nothing keeps no other
    waiting. Raises RankFailedError if they do not all come within 30 s.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    with listener, _Callers(listener, key) as callers:
        while len(callers.known) < count:
            if time.monotonic() > deadline:
                raise RankFailedError(
                    f"wait for the connections of {count} other ranks",
                    f"{len(callers.known)} came within {_CONNECT_SECONDS:g} s",
                    _FIX,
                )
            callers.hear(count + _MOST_STRANGERS)
        return callers.known


def _hello(key: bytes, nonce: bytes, rank: int) -> bytes:
    """What a rank answers a nonce with."""
    signed = hmac.digest(key, nonce + rank.to_bytes(4, "big", signed=True), "sha256")
    return _HELLO.pack(signed, rank)


@dataclass
class _Asked:
    """A connection whose hello is to come, perhaps in parts."""

    nonce: bytes
    until: float
    hello: bytes = b""


class _Callers:
    """Those who have connected: ranks, and those who have yet to say that they are."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self.known: dict[socket.socket, int] = {}
        self._asked: dict[socket.socket, _Asked] = {}
        self._listener, self._key = listener, key
        self._ready = selectors.DefaultSelector()
        listener.setblocking(False)
        self._ready.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Callers:
        return self

    def __exit__(self, *exception: object) -> None:
        for peer in list(self._asked):
            self._turn_away(peer)
        self._ready.close()

    def hear(self, most: int) -> None:
        """Take what has come for a moment; turn away who is late, or the first of too many."""
        for key, _ in self._ready.select(_LOOK_SECONDS):
            if key.fileobj is self._listener:
                self._ask()
            elif key.fileobj in self._asked:
                self._hear(key.fileobj)
        now = time.monotonic()
        late = [peer for peer, asked in self._asked.items() if now > asked.until]
        for peer in late or list(self._asked)[: max(0, len(self._asked) - most)]:
            self._turn_away(peer)

    def _ask(self) -> None:
        try:
            peer = self._listener.accept()[0]
        except OSError:  # it is gone again
            return
        peer.setblocking(False)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._asked[peer] = _Asked(nonce, time.monotonic() + _HELLO_SECONDS)
        self._ready.register(peer, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # the next look finds that it is gone
            peer.send(nonce)

    def _hear(self, peer: Any) -> None:
        asked, part = self._asked[peer], b""
        with contextlib.suppress(OSError):
            part = peer.recv(_HELLO.size - len(asked.hello))
        asked.hello += part
        if len(asked.hello) == _HELLO.size:
            rank = _HELLO.unpack(asked.hello)[1]
            if hmac.compare_digest(asked.hello, _hello(self._key, asked.nonce, rank)):
                self.known[peer] = rank
                self._ready.unregister(peer)
                del self._asked[peer]
            else:
                self._turn_away(peer)
        elif not part:
            self._turn_away(peer)

    def _turn_away(self, peer: socket.socket) -> None:
        self._ready.unregister(peer)
        del self._asked[peer]
        peer.close()

"""Detects machines that are lost silently, by a failure of power, a cable or a switch.

Connections to such a machine stay open, and ranks that wait for its tensors go on waiting: gloo for
half an hour.  So every rank has a further, idle connection to the first one, which the operating
systems at both ends probe (TCP keepalive).  No thread of a rank has to answer, so that a busy rank
is not taken for a lost one.

The first rank challenges everybody who connects with a nonce; a rank answers with its number and an
HMAC of both (RFC 2104) by a key that only ranks have.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.signing import job_secret
from dgl_mgpu.errors import RankFailedError
from dgl_mgpu.train.launch.preemption import Stopped
from dgl_mgpu.utils import safe_json

# A connection is probed after so many idle seconds, then this often and so many times: a machine
# is lost after 15 s.
_IDLE_SECONDS, _BETWEEN_SECONDS, _PROBES = 5, 2, 5
# How long the other ranks get to report the end of a rank themselves.
_OWN_REPORT_SECONDS = 5.0
# Messages are lines: TCP may deliver two of them at once, or one in two parts.
_GOODBYE = b".\n"
# Far more than an error needs.
_MAX_LINE_BYTES = 1 << 20
_QUOTED_BYTES = 80
_CONNECT_SECONDS = 30.0
# A rank answers at once; other connections are kept for a short time, and few of them.
_HELLO_SECONDS = 5.0
_MAX_UNAUTHENTICATED = 64
_LOOK_SECONDS = 0.1
_NONCE_BYTES = 32
_HELLO = struct.Struct("!32si")
_FIX = "let all machines connect to any port of the first one (MASTER_ADDR)"


class PeerMonitor:
    """Watches the ranks of the job on other machines, while it is used as a context manager.

    Collective over ``ranks``, all of the job.  All machines reach the first rank's at ``address``.
    ``on_loss`` is called on a thread of its own, on all ranks that can still be reached, with the
    error that names the lost rank.  Raises RankFailedError if a rank cannot reach the first one.
    """

    def __init__(
        self, ranks: Communicator, address: str, on_loss: Callable[[RankFailedError], Any]
    ) -> None:
        self._on_loss = on_loss
        self._is_first = ranks.rank == 0
        self._is_closed = False
        listener = listen() if self._is_first else None
        port, token = ranks.broadcast_from_rank0(
            "watch the other ranks",
            lambda: (listener.getsockname()[1], secrets.token_bytes(32)),  # type: ignore[union-attr]
        )
        # The token has crossed the network; the job's secret, if there is one, has not.
        key = hmac.digest(job_secret(), token, "sha256")
        self._peers = ranks.run_all(
            "connect to the first rank",
            lambda: (
                {connect(address, port, key, ranks.rank): 0}
                if listener is None
                else accept(listener, key, ranks.size - 1)
            ),
        )
        for peer in self._peers:
            _probe(peer)
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def __enter__(self) -> PeerMonitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._is_closed = True
        is_well = kind is None or issubclass(kind, Stopped)
        for peer in self._peers:
            with contextlib.suppress(OSError):  # the other one was first
                if is_well:
                    peer.sendall(_GOODBYE)
                peer.shutdown(socket.SHUT_RDWR)

    def _look(self) -> None:
        with contextlib.ExitStack() as closing, selectors.DefaultSelector() as open_peers:
            for peer in self._peers:
                closing.enter_context(peer)
                open_peers.register(peer, selectors.EVENT_READ)
            while open_peers.get_map():
                for key, _ in open_peers.select():
                    open_peers.unregister(key.fileobj)
                    self._receive(key.fileobj)

    def _receive(self, peer: Any) -> None:
        """Receive the first message of a rank; what follows, such as its goodbye, adds nothing."""
        rank = self._peers[peer]
        try:
            with peer.makefile("rb") as lines:
                line = lines.readline(_MAX_LINE_BYTES)
        except ConnectionResetError:
            line = b""
        except OSError as error:
            lost = "its machine, or the way to it, is lost"
            self._report_loss(rank, f"is silent ({error.strerror}): {lost}")
            return
        if line == _GOODBYE:
            return
        if line.endswith(b"\n") or len(line) == _MAX_LINE_BYTES:
            failure = _failure_of(line)
            if failure is None:
                self._report_loss(rank, f"reports what is no error: {line[:_QUOTED_BYTES]!r}")
                return
            self._pass_on(failure, rank)
            self._on_loss(failure)
            return
        if not self._is_closed:
            # Ranks that exchange tensors with it over TCP raise by themselves; over NCCL they wait.
            time.sleep(_OWN_REPORT_SECONDS)
        if not self._is_closed:
            self._report_loss(rank, "has ended before its work was done")

    def _report_loss(self, rank: int, problem: str) -> None:
        loss = RankFailedError(
            "train with ranks on other machines",
            f"rank {rank} {problem}",
            "see why, or start on fewer machines; trainer.resume goes on from the last checkpoint",
        )
        self._pass_on(loss, rank)
        self._on_loss(loss)

    def report(self, error: RankFailedError) -> None:
        """Send an error to all ranks of other machines, which end with it."""
        self._send(error, self._peers)

    def _pass_on(self, error: RankFailedError, source: int) -> None:
        """Send what the first rank has found of another one, or received from it, to the others."""
        if self._is_first:
            self._send(error, [peer for peer, rank in self._peers.items() if rank != source])

    def _send(self, error: RankFailedError, peers: Iterable[socket.socket]) -> None:
        line = json.dumps([error.asked, error.found, error.fix]).encode() + b"\n"
        for peer in peers:
            with contextlib.suppress(OSError):  # it has ended, or is lost as well
                peer.sendall(line)


def _failure_of(line: bytes) -> RankFailedError | None:
    """The error that a rank reports in a line; None if it is none."""
    try:
        parts = safe_json.loads(line)
    except ValueError:
        return None
    if not (isinstance(parts, list) and len(parts) == 3 and all(type(x) is str for x in parts)):
        return None
    return RankFailedError(*parts)


def _probe(peer: socket.socket) -> None:
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


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

    The listener is closed.  Callers are served side by side: one that sends nothing keeps no other
    waiting.  Raises RankFailedError if they do not all come within 30 s.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    with listener, _Connections(listener, key) as connections:
        while len(connections.ranks) < count:
            if time.monotonic() > deadline:
                raise RankFailedError(
                    f"wait for the connections of {count} other ranks",
                    f"{len(connections.ranks)} came within {_CONNECT_SECONDS:g} s",
                    _FIX,
                )
            connections.serve(count + _MAX_UNAUTHENTICATED)
        return connections.ranks


def _hello(key: bytes, nonce: bytes, rank: int) -> bytes:
    """A rank's answer to a nonce."""
    signed = hmac.digest(key, nonce + rank.to_bytes(4, "big", signed=True), "sha256")
    return _HELLO.pack(signed, rank)


@dataclass
class _Challenged:
    """A connection whose hello is to come, perhaps in parts."""

    nonce: bytes
    until: float
    hello: bytes = b""


class _Connections:
    """Connections to the listener: authenticated ranks, and those yet to authenticate."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self.ranks: dict[socket.socket, int] = {}
        self._challenged: dict[socket.socket, _Challenged] = {}
        self._listener, self._key = listener, key
        self._ready = selectors.DefaultSelector()
        listener.setblocking(False)
        self._ready.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Connections:
        return self

    def __exit__(self, *exception: object) -> None:
        for peer in list(self._challenged):
            self._reject(peer)
        self._ready.close()

    def serve(self, most: int) -> None:
        """Take what has come for a moment; turn away who is late, or the first of too many."""
        for key, _ in self._ready.select(_LOOK_SECONDS):
            if key.fileobj is self._listener:
                self._challenge()
            elif key.fileobj in self._challenged:
                self._receive(key.fileobj)
        now = time.monotonic()
        late = [peer for peer, caller in self._challenged.items() if now > caller.until]
        for peer in late or list(self._challenged)[: max(0, len(self._challenged) - most)]:
            self._reject(peer)

    def _challenge(self) -> None:
        try:
            peer = self._listener.accept()[0]
        except OSError:  # it is gone again
            return
        peer.setblocking(False)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._challenged[peer] = _Challenged(nonce, time.monotonic() + _HELLO_SECONDS)
        self._ready.register(peer, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # the next look finds that it is gone
            peer.send(nonce)

    def _receive(self, peer: Any) -> None:
        caller, part = self._challenged[peer], b""
        with contextlib.suppress(OSError):
            part = peer.recv(_HELLO.size - len(caller.hello))
        caller.hello += part
        if len(caller.hello) == _HELLO.size:
            rank = _HELLO.unpack(caller.hello)[1]
            if hmac.compare_digest(caller.hello, _hello(self._key, caller.nonce, rank)):
                self.ranks[peer] = rank
                self._ready.unregister(peer)
                del self._challenged[peer]
            else:
                self._reject(peer)
        elif not part:
            self._reject(peer)

    def _reject(self, peer: socket.socket) -> None:
        self._ready.unregister(peer)
        del self._challenged[peer]
        peer.close()

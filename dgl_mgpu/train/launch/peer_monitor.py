"""Notice of machines that are lost without a word: their power, a cable, a switch.

Connections to such a machine stay open, and who waits for its tensors waits on: gloo for half an
hour.  So every rank has one more connection to the first one, on which nothing is sent, and which
the operating systems at both ends probe.  No thread of a rank has to answer, so that no rank
seems lost only because it is busy.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.signing import job_secret
from dgl_mgpu.errors import RankFailedError
from dgl_mgpu.train.launch.handshake import accept, connect, listen
from dgl_mgpu.train.launch.preemption import Stopped
from dgl_mgpu.utils import safe_json

# A connection is probed after so many idle seconds, then this often and so many times: a machine
# is lost after 15 s.
_IDLE_SECONDS, _BETWEEN_SECONDS, _PROBES = 5, 2, 5
# How long the other ranks get to say themselves what a rank's end means for them.
_OWN_WORD_SECONDS = 5.0
# What a rank says is a line: TCP may bring two of them at once, or one in two parts.
_GOODBYE = b".\n"
# Far more than an error and its advice take.
_MAX_LINE_BYTES = 1 << 20
_QUOTED_BYTES = 80


class PeerMonitor:
    """Watches the ranks of the job on other machines, while it is used as a context manager.

    Collective. ``ranks``: all ranks of the job, on several machines. ``address``: under which all
    machines reach that of the first rank. ``on_loss``: called on a thread of its own with the error
    that says who is lost: on all ranks that can still be told. Raises RankFailedError if a rank
    cannot reach the first one.
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
        # The token has crossed the network; what only ranks have, if they have it, has not.
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
                    self._hear(key.fileobj)

    def _hear(self, peer: Any) -> None:
        """The first thing a rank has to say: what follows, its goodbye say, tells no more."""
        rank = self._peers[peer]
        try:
            with peer.makefile("rb") as lines:
                told = lines.readline(_MAX_LINE_BYTES)
        except ConnectionResetError:
            told = b""
        except OSError as error:
            lost = "its machine, or the way to it, is lost"
            self._tell(rank, f"is silent ({error.strerror}): {lost}")
            return
        if told == _GOODBYE:
            return
        if told.endswith(b"\n") or len(told) == _MAX_LINE_BYTES:
            failure = _failure_of(told)
            if failure is None:
                self._tell(rank, f"reports what is no error: {told[:_QUOTED_BYTES]!r}")
                return
            self._pass_on(failure, rank)
            self._on_loss(failure)
            return
        if not self._is_closed:
            # Who exchanges tensors with it over TCP raises of it now; over NCCL, waits for ever.
            time.sleep(_OWN_WORD_SECONDS)
        if not self._is_closed:
            self._tell(rank, "has ended before its work was done")

    def _tell(self, rank: int, found: str) -> None:
        loss = RankFailedError(
            "train with ranks on other machines",
            f"rank {rank} {found}",
            "see why, or start on fewer machines; trainer.resume goes on from the last checkpoint",
        )
        self._pass_on(loss, rank)
        self._on_loss(loss)

    def report(self, error: RankFailedError) -> None:
        """Have the ranks of all machines end with an error, but for this one."""
        self._send(error, self._peers)

    def _pass_on(self, error: RankFailedError, source: int) -> None:
        """What the first rank has heard, or found, of another one is told to the others."""
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

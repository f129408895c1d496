"""What ranks on other machines have to say, over connections as they may be."""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dgl_mgpu.errors import RankFailedError
from dgl_mgpu.train.launch import peer_monitor as watch
from dgl_mgpu.train.launch.peer_monitor import PeerMonitor

LOSS = json.dumps(["train", "rank 7 is silent", "see to it"]).encode() + b"\n"
GOODBYE = b".\n"


class FirstOfTwo:
    """The first of two ranks; what the other one does is done by ``connect``, meanwhile."""

    rank, size = 0, 2

    def __init__(self, connect: Callable[[tuple[str, int], bytes], None]) -> None:
        self._connect = connect

    def broadcast_from_rank0(self, asked: str, step: Callable[[], Any]) -> Any:
        self._told = step()
        return self._told

    def run_all(self, asked: str, step: Callable[[], Any]) -> Any:
        port, token = self._told
        key = hmac.digest(b"", token, "sha256")
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(self._connect, ("127.0.0.1", port), key)
            result = step()
        other.result()  # raises what the other rank's assertions raise
        return result


@pytest.fixture
def open_sockets():
    made: list[socket.socket] = []
    yield made
    for each in made:
        each.close()


def asked(address: tuple[str, int]) -> tuple[socket.socket, bytes]:
    """A connection, and the nonce that the first rank asks with."""
    peer = socket.create_connection(address)
    return peer, peer.recv(watch._NONCE_BYTES, socket.MSG_WAITALL)


def joined(address: tuple[str, int], key: bytes) -> socket.socket:
    """The connection of a rank that has said what it has to."""
    peer, nonce = asked(address)
    peer.sendall(watch._hello(key, nonce, 1))
    return peer


def in_parts(peer: socket.socket, *parts: bytes) -> None:
    """Send them from a thread of their own, most likely each when the one before has been read."""

    def send() -> None:
        with contextlib.suppress(OSError):  # who has heard of a loss hears no more
            for part in parts:
                peer.sendall(part)
                time.sleep(0.1)

    threading.Thread(target=send).start()


def watching(connect: Callable[[tuple[str, int], bytes], None]) -> tuple[PeerMonitor, queue.Queue]:
    """The first rank's watch, and what it has told of."""
    heard: queue.Queue[RankFailedError] = queue.Queue()
    return PeerMonitor(FirstOfTwo(connect), "127.0.0.1", heard.put), heard  # type: ignore[arg-type]


def is_over() -> None:
    """Wait until the watch has nobody left to hear."""
    for thread in threading.enumerate():
        if thread.name == "watch":
            thread.join()


@pytest.mark.parametrize(
    "parts",
    [[LOSS], [LOSS + GOODBYE], [LOSS[:9], LOSS[9:-1], LOSS[-1:] + GOODBYE], [LOSS, GOODBYE]],
)
def test_a_loss_is_a_line_in_whatever_pieces_it_comes(open_sockets, parts):
    def connect(address: tuple[str, int], key: bytes) -> None:
        open_sockets.append(joined(address, key))

    _, heard = watching(connect)
    in_parts(open_sockets[0], *parts)
    assert "rank 7 is silent" in str(heard.get())
    is_over()
    assert heard.empty()


def test_a_goodbye_is_no_loss_and_an_end_without_one_is(open_sockets, monkeypatch):
    monkeypatch.setattr(watch, "_OWN_REPORT_SECONDS", 0)

    def connect(address: tuple[str, int], key: bytes) -> None:
        open_sockets.append(joined(address, key))

    _, heard = watching(connect)
    in_parts(open_sockets[-1], GOODBYE[:1], GOODBYE[1:])
    is_over()
    assert heard.empty()
    _, heard = watching(connect)
    open_sockets[-1].close()
    assert "rank 1 has ended before its work was done" in str(heard.get())


def test_a_hello_may_come_in_parts(open_sockets, monkeypatch):
    monkeypatch.setattr(watch, "_HELLO_SECONDS", 60)

    def connect(address: tuple[str, int], key: bytes) -> None:
        peer, nonce = asked(address)
        open_sockets.append(peer)
        says = watch._hello(key, nonce, 1)
        in_parts(peer, says[:5], says[5:33], says[33:])

    own, _ = watching(connect)
    assert list(own._peers.values()) == [1]


def test_who_is_no_rank_neither_joins_nor_ends_the_job(open_sockets, monkeypatch):
    monkeypatch.setattr(watch, "_HELLO_SECONDS", 0.2)

    def connect(address: tuple[str, int], key: bytes) -> None:
        seen = watch._hello(key, asked(address)[1], 1)
        for says in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(len(seen)), seen):
            peer, nonce = asked(address)
            open_sockets.append(peer)
            peer.sendall(says)
        reset = socket.create_connection(address)
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        reset.close()
        for says in (watch._hello(key, nonce, 1), watch._hello(bytes(32), nonce, 1)):
            peer, _ = asked(address)  # and answers what another one was asked
            open_sockets.append(peer)
            peer.sendall(says)
        open_sockets.append(joined(address, key))

    own, _ = watching(connect)
    (peer,) = own._peers
    assert peer.getpeername()[1] == open_sockets[-1].getsockname()[1]


def test_who_says_nothing_keeps_no_rank_waiting(open_sockets, monkeypatch):
    """However many they are: those who wait the longest give way."""
    monkeypatch.setattr(watch, "_HELLO_SECONDS", 600.0)
    monkeypatch.setattr(watch, "_MAX_UNAUTHENTICATED", 4)

    def connect(address: tuple[str, int], key: bytes) -> None:
        open_sockets.extend(asked(address)[0] for _ in range(30))
        open_sockets.append(joined(address, key))

    own, _ = watching(connect)
    (peer,) = own._peers
    assert peer.getpeername()[1] == open_sockets[-1].getsockname()[1]


def test_a_rank_that_does_not_come_is_told(monkeypatch):
    monkeypatch.setattr(watch, "_CONNECT_SECONDS", 0.1)
    with pytest.raises(RankFailedError, match=r"0 came within 0\.1 s.*MASTER_ADDR"):
        watching(lambda address, key: None)


def test_what_one_rank_reports_the_first_passes_on_to_the_others(monkeypatch):
    class FirstOfThree(FirstOfTwo):
        size = 3

    others: list[socket.socket] = []

    def connect(address: tuple[str, int], key: bytes) -> None:
        for rank in (1, 2):
            peer, nonce = asked(address)
            peer.sendall(watch._hello(key, nonce, rank))
            others.append(peer)

    heard: queue.Queue[RankFailedError] = queue.Queue()
    PeerMonitor(FirstOfThree(connect), "127.0.0.1", heard.put)  # type: ignore[arg-type]
    try:
        others[0].sendall(LOSS)
        assert "rank 7 is silent" in str(heard.get())
        with others[1].makefile("rb") as lines:
            assert lines.readline() == LOSS
        others[0].settimeout(0.2)
        with pytest.raises(TimeoutError):
            others[0].recv(1)
    finally:
        for each in others:
            each.close()


def test_a_rank_reports_to_the_first(open_sockets):
    def connect(address: tuple[str, int], key: bytes) -> None:
        open_sockets.append(joined(address, key))

    own, _ = watching(connect)
    own.report(RankFailedError("train", "rank 7 is silent", "see to it"))
    with open_sockets[0].makefile("rb") as lines:
        assert lines.readline() == LOSS


@pytest.mark.parametrize(
    "line",
    [b"{}\n", b"[1, 2]\n", b"no json\n", b"7\n", b'["a", "b", {}]\n', b"[" * 200_000 + b"\n",
     b'"' + b"x" * (2 << 20)],
    ids=["object", "short", "no JSON", "number", "no text", "nested", "endless"],
)  # fmt: skip
def test_what_is_no_report_ends_the_job_as_well(open_sockets, line):
    def connect(address: tuple[str, int], key: bytes) -> None:
        open_sockets.append(joined(address, key))

    _, heard = watching(connect)
    open_sockets[0].sendall(line)
    assert "rank 1 reports what is no error" in str(heard.get())
    is_over()

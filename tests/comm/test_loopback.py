"""Who is let to the other end of a connection within this machine."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  of addresses; another user may not read Python's files
import multiprocessing as mp
import os
import socket
from collections.abc import Iterator

import pytest

from dgl_mgpu.comm import loopback
from dgl_mgpu.comm.loopback import connections_are_ours
from dgl_mgpu.errors import RankFailedError

NOBODY = 65534
HOSTS = ["127.0.0.1", "::1", "dual"]


@contextlib.contextmanager
def listening(host: str) -> Iterator[socket.socket]:
    """A listener; `dual` takes connections of both versions of IP, and is reached by the fourth."""
    if host != "127.0.0.1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    if host == "dual":
        made = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            made = socket.create_server((host, 0), family=family)
        except OSError as error:
            pytest.skip(f"nobody can listen at {host}: {error}")
    with made:
        yield made


def connected(listener: socket.socket, host: str) -> socket.socket:
    address = "127.0.0.1" if host == "dual" else host
    return socket.create_connection((address, listener.getsockname()[1]))


@pytest.mark.parametrize("host", HOSTS)
def test_connections_between_ones_own_sockets_are_ones_own(host):
    with listening(host) as listener, contextlib.ExitStack() as ends, connections_are_ours(2):
        ends.enter_context(connected(listener, host))
        ends.enter_context(listener.accept()[0])


@pytest.mark.parametrize("host", HOSTS)
def test_another_users_end_is_refused(host, monkeypatch):
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with (
        listening(host) as listener,
        contextlib.ExitStack() as ends,
        pytest.raises(RankFailedError, match=f"user {me} took the place"),
        connections_are_ours(1),
    ):
        ends.enter_context(connected(listener, host))
        ends.enter_context(listener.accept()[0])


def _attack(port: int, done: mp.connection.Connection) -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    with socket.create_connection(("127.0.0.1", port)):
        done.recv()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_second_user_who_connects_first_is_refused():
    with listening("127.0.0.1") as listener, contextlib.ExitStack() as ends:
        mine, theirs = mp.Pipe()
        attacker = mp.get_context("fork").Process(
            target=_attack, args=(listener.getsockname()[1], theirs)
        )
        attacker.start()
        with (
            pytest.raises(RankFailedError, match=f"user {NOBODY} took the place"),
            connections_are_ours(1),
        ):
            ends.enter_context(listener.accept()[0])
        mine.send(None)
        attacker.join()
        assert attacker.exitcode == 0


def test_an_end_that_nobody_has_is_refused(monkeypatch):
    """Whoever closed it may have sent something before."""
    monkeypatch.setattr(loopback, "_ACCEPT_SECONDS", 0.1)
    with (
        listening("127.0.0.1") as listener,
        contextlib.ExitStack() as ends,
        pytest.raises(RankFailedError, match=r"nobody accepted a connection within 0\.1 s"),
        connections_are_ours(1),
    ):
        ends.enter_context(connected(listener, "127.0.0.1"))


def test_connections_that_are_to_come_are_not_waited_for_in_silence():
    with (
        pytest.raises(RankFailedError, match=r"0 of 1 connections .*TORCH_GLOO_LAZY_INIT"),
        connections_are_ours(1),
    ):
        pass


def test_other_machines_look_at_their_ends_themselves():
    ends = {"local": ("10.0.0.1", 1), "state": 1, "user": 0, "inode": 5}
    assert not loopback._is_of_this_machine(loopback._Socket(remote=("10.0.0.2", 2), **ends))
    assert loopback._is_of_this_machine(loopback._Socket(remote=("10.0.0.1", 2), **ends))
    assert loopback._is_of_this_machine(loopback._Socket(remote=("127.0.0.2", 2), **ends))


def test_addresses_are_read_as_the_kernel_writes_them():
    with listening("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        found = [each for each in loopback._sockets() if each.local == ("127.0.0.1", port)]
        assert [each.user for each in found] == [os.geteuid()]
        assert found[0].inode == os.fstat(listener.fileno()).st_ino

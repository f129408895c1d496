"""NUMA nodes as the system tells of them, and memory that is spread over them."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing as mp
import os
import platform

import pytest

from dgl_mgpu.machine.numa import interleave, memory_nodes
from dgl_mgpu.store.memory import segment as segments
from dgl_mgpu.store.memory.segment import Segment

NBYTES = 32 << 20
#: The system call ``get_mempolicy``, of an address.
_GET = {"x86_64": 239, "aarch64": 236}
_OF_ADDRESS, _INTERLEAVED = 2, 3


def policy(address: int) -> int:
    """How the system chooses nodes for the page at an address."""
    number = _GET.get(platform.machine())
    if number is None:
        pytest.skip(f"the system call's number is not known on {platform.machine()}")
    mode = ctypes.c_int(-1)
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number),
        ctypes.byref(mode),
        None,
        ctypes.c_ulong(0),
        ctypes.c_void_p(address),
        ctypes.c_ulong(_OF_ADDRESS),
    )
    if failed:
        pytest.skip("the system does not tell where memory lies (a container may forbid it)")
    return mode.value


@pytest.mark.parametrize(
    ("processors", "memory", "expected"),
    [
        ("0-1\n", "0-1\n", [0, 1]),
        ("0,2-3\n", "0-1,3\n", [0, 3]),
        ("0\n", "0,8-15\n", [0]),  # memory of GPUs
        ("\n", "\n", []),
    ],
)
def test_nodes_have_processors_and_memory(tmp_path, processors, memory, expected):
    (tmp_path / "has_cpu").write_text(processors)
    (tmp_path / "has_memory").write_text(memory)
    assert memory_nodes(tmp_path) == expected


def test_a_system_that_does_not_tell(tmp_path):
    assert memory_nodes(tmp_path / "missing") == []


def test_memory_is_spread():
    with mmap.mmap(-1, NBYTES) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        before = policy(address)
        spread = interleave(address, NBYTES, [0])
        assert policy(address) == (_INTERLEAVED if spread else before)


def test_nodes_that_are_not_there(caplog):
    caplog.set_level("INFO")
    with mmap.mmap(-1, NBYTES) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert not interleave(address, NBYTES, [1000])
        memory[:] = b"1" * NBYTES  # and it is memory all the same
    assert "NUMA nodes [1000]" in caplog.text or platform.machine() not in _GET


def _has_chosen_nodes() -> None:
    number = {"x86_64": 238, "aarch64": 237}[platform.machine()]  # set_mempolicy
    only_the_first = ctypes.byref(ctypes.c_ulong(1))
    bound = ctypes.c_long(number), ctypes.c_int(2), only_the_first, ctypes.c_ulong(65)
    if ctypes.CDLL(None).syscall(*bound):
        os._exit(3)
    with mmap.mmap(-1, NBYTES) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        os._exit(interleave(address, NBYTES, [0]))


def test_nodes_that_somebody_has_chosen_stay():
    if platform.machine() not in _GET:
        pytest.skip(f"the system call's number is not known on {platform.machine()}")
    process = mp.get_context("fork").Process(target=_has_chosen_nodes)
    process.start()
    process.join()
    if process.exitcode == 3:
        pytest.skip("the system lets nobody choose nodes")
    assert process.exitcode == 0


@pytest.mark.parametrize(("nodes", "is_spread"), [([0, 0], True), ([0], False), ([], False)])
def test_host_memory_of_a_store_is_spread(monkeypatch, nodes, is_spread):
    """By the file's policy: of every mapping, and before its memory is reserved."""
    called = []

    def spread(*arguments) -> bool:
        called.append(interleave(*arguments))
        return called[-1]

    monkeypatch.setattr(segments, "memory_nodes", lambda: nodes)
    monkeypatch.setattr(segments, "interleave", spread)
    segment = Segment.create(NBYTES)
    assert len(called) == is_spread
    other = Segment.attach(segment.path, NBYTES)
    found = policy(other.address) == _INTERLEAVED
    assert found == (is_spread and called == [True])
    segment.bytes[-1] = 7
    assert other.bytes[-1] == 7
    Segment.create(segments._MIN_SPREAD - 1)
    assert len(called) == is_spread

"""Ranges cover their input once, on any number of threads, also after a fork."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dgl_mgpu.ops import cpu
from dgl_mgpu.ops.cpu import kernel


@kernel
def add_one(begin, end, counts):
    for index in range(begin, end):
        counts[index] += 1
    return begin


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def check_cover(total: int, grain: int) -> None:
    counts = np.zeros(total, dtype=np.int64)
    begins = cpu.run(add_one, total, grain, counts)
    assert (counts == 1).all()
    assert begins == sorted(begins) and begins[0] == 0


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("total", [0, 1, 7, 1000])
def test_every_item_once(threads, number, total):
    threads(number)
    check_cover(total, 3)


def test_without_openmp(threads, monkeypatch):
    monkeypatch.setattr(cpu, "_team", None)
    threads(3)
    check_cover(1000, 3)


def test_small_inputs_run_on_the_calling_thread(threads):
    threads(4)
    seen = cpu.run(lambda begin, end: (begin, end, threading.get_ident()), 19, 10)
    assert seen == [(0, 19, threading.get_ident())]


@pytest.mark.parametrize("team", [True, False])
def test_an_error_reaches_the_caller(threads, monkeypatch, team):
    if not team:
        monkeypatch.setattr(cpu, "_team", None)
    threads(2)

    def fail(begin, end):
        raise RuntimeError(f"at {begin}")

    with pytest.raises(RuntimeError, match="at "):
        cpu.run(fail, 100, 1)
    check_cover(1000, 3)


def test_concurrent_callers(threads):
    threads(2)
    with ThreadPoolExecutor(4) as pool:
        for caller in [pool.submit(check_cover, 5000, 3) for _ in range(4)]:
            caller.result()  # raises what the thread's assertions raise


def _in_child() -> None:
    torch.set_num_threads(3)
    check_cover(1000, 3)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child(threads):
    threads(2)
    check_cover(1000, 3)  # the parent's team exists before the fork
    child = multiprocessing.get_context("fork").Process(target=_in_child, daemon=True)
    child.start()
    child.join()
    assert child.exitcode == 0
    check_cover(1000, 3)

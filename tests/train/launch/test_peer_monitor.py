"""What ranks tell each other through a store as torchrun's, in threads of one process."""

from __future__ import annotations

import ctypes
import hmac
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from dgl_mgpu.errors import RankFailedError
from dgl_mgpu.train.launch import peer_monitor as watch
from dgl_mgpu.train.launch.peer_monitor import PeerMonitor
from dgl_mgpu.utils.stages import Heartbeat

REPORT = RankFailedError("train", "rank 7 is lost", "see to it")
#: Far longer than what is awaited takes.
LONG = 60.0


class Ranks:
    """One of several ranks, each of which is a thread."""

    def __init__(self, rank: int, size: int, together: threading.Barrier) -> None:
        self.rank, self.size, self._together = rank, size, together

    def broadcast_from_rank0(self, asked: str, step: Callable[[], Any]) -> Any:
        return "token"

    def run_all(self, asked: str, step: Callable[[], Any]) -> Any:
        result = step()
        self._together.wait(LONG)
        return result


class Job:
    """Watches of all ranks, and what each of them has told of."""

    def __init__(self, size: int = 2, hang_after: float | None = LONG, in_step: bool = True):
        together = threading.Barrier(size)
        self.heard: list[queue.Queue[RankFailedError]] = [queue.Queue() for _ in range(size)]
        self.own = [Heartbeat(in_step=in_step) for _ in range(size)]

        def join(rank: int) -> PeerMonitor:
            ranks: Any = Ranks(rank, size, together)
            return PeerMonitor(ranks, self.own[rank], hang_after, self.heard[rank].put)

        with ThreadPoolExecutor(size) as pool:
            self.watches = list(pool.map(join, range(size)))

    def told(self, rank: int) -> str:
        return str(self.heard[rank].get(timeout=LONG))

    def hears_nothing(self, seconds: float) -> bool:
        time.sleep(seconds)
        return all(each.empty() for each in self.heard)

    def stop(self, rank: int) -> None:
        """Have a rank neither write nor look any more, as one that is stopped."""
        self.watches[rank]._write = lambda: str(threading.Event().wait())  # type: ignore[method-assign]
        self.watches[rank]._on_loss = lambda error: None


@pytest.fixture(autouse=True)
def server(monkeypatch) -> Iterator[list[dist.TCPStore]]:
    """A store as torchrun's, and shorter times."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    for name, seconds in {
        "_BEAT_SECONDS": 0.05, "SILENT_SECONDS": 1.0, "_LATE_SECONDS": 0.2,
        "_OWN_REPORT_SECONDS": 0.3, "_TELL_SECONDS": 5.0,
    }.items():  # fmt: skip
        monkeypatch.setattr(watch, name, seconds)
    servers = [store]
    del store
    yield servers


@pytest.mark.parametrize("lost", [0, 2])
def test_all_are_told_of_a_rank_that_stops(lost):
    job = Job(3)
    job.stop(lost)
    for rank in {0, 1, 2} - {lost}:
        assert f"rank {lost} is silent for 1 s" in job.told(rank)


def test_a_goodbye_is_no_loss_and_an_end_without_one_is():
    job = Job(3)
    job.watches[1].__exit__(None)
    assert job.hears_nothing(1.5)
    job.watches[2].__exit__(KeyError)
    assert "rank 2 has ended before its work was done" in job.told(0)


def test_in_a_stage_of_any_length_beats_may_be_missing_for_as_long_as_it_may_hang():
    job = Job(hang_after=2.5, in_step=False)
    job.stop(1)
    assert job.hears_nothing(1.7)
    assert "rank 1 is silent" in job.told(0)
    endless = Job(hang_after=None, in_step=False)
    endless.stop(1)
    assert endless.hears_nothing(2.0)
    endless.watches[0].__exit__(None)


def test_beats_that_were_all_delayed_are_not_missing():
    job = Job()
    ctypes.PyDLL(None).usleep(3_000_000)  # with Python's lock: no thread of the job runs
    assert job.hears_nothing(0.5)
    job.watches[0].__exit__(None)


@pytest.mark.parametrize("end", [None, KeyError])
def test_an_end_is_told_also_if_it_comes_while_the_store_is_read(end):
    job = Job()
    own = job.watches[1]
    read, is_reading = own._read_store, threading.Event()

    def slowly(state: str) -> Any:
        is_reading.set()
        time.sleep(0.3)
        return read(state)

    own._read_store = slowly  # type: ignore[method-assign]
    is_reading.wait(LONG)
    own.__exit__(end)
    if end is None:
        assert job.hears_nothing(1.5)
    else:
        assert "rank 1 has ended before its work was done" in job.told(0)


@pytest.mark.parametrize("source", [0, 1, 2])
def test_a_report_is_told_to_all_others_and_the_first_one_counts(source):
    job = Job(3)
    job.watches[source].report(REPORT)
    others = {0, 1, 2} - {source}
    for rank in others:
        assert job.told(rank) == str(REPORT)
    assert job.heard[source].empty()


def signed(key: bytes, text: bytes) -> str:
    return hmac.digest(key, text, "sha256").hex() + text.decode()


@pytest.mark.parametrize(
    "make",
    [
        lambda key: "7",
        lambda key: json.dumps(["a", "b", "c"]),
        lambda key: signed(bytes(32), json.dumps(["a", "b", "c"]).encode()),
        lambda key: signed(key, b"no json"),
        lambda key: signed(key, b'["a", "b"]'),
        lambda key: signed(key, b'["a", "b", {}]'),
        lambda key: signed(key, b"[" * 100_000),
    ],
    ids=["short", "unsigned", "other key", "no JSON", "two", "no text", "nested"],
)
def test_what_no_rank_reports_ends_the_job_without_being_taken_for_a_report(make):
    job = Job()
    job.watches[0]._store.set("report", make(job.watches[0]._key))
    assert "a report that is no rank's" in job.told(1)


def test_the_stores_end_is_told_by_all(server):
    job = Job(3)
    server.clear()
    for rank in range(3):
        assert "torchrun's store at 127.0.0.1 is gone" in job.told(rank)


def test_a_store_that_does_not_answer_is_told():
    job = Job()
    job.watches[1]._write = lambda: str(threading.Event().wait())  # type: ignore[method-assign]
    assert "torchrun's store at 127.0.0.1 does not answer for 1 s" in job.told(1)


def test_a_store_that_cannot_be_reached_is_told(monkeypatch, server):
    monkeypatch.setattr("dgl_mgpu.utils.timeouts.CONNECT", 0.2)
    server.clear()
    with pytest.raises(RankFailedError, match=r"connect to torchrun's store at 127\.0\.0\.1"):
        watch._connect("watch")

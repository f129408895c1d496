"""What is in torchrun's store when it starts ranks again."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from dgl_mgpu.comm.signing import SECRET
from dgl_mgpu.errors import CheckpointError, RankFailedError
from dgl_mgpu.train.launch.torchrun_store import (
    folder_before,
    job_store,
    keep_folder,
    store_of_this_start,
)


@pytest.fixture(autouse=True)
def server(monkeypatch) -> dist.TCPStore:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for key, value in {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": 0,
        "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": 1,
    }.items():  # fmt: skip
        monkeypatch.setenv(key, str(value))
    return store


def start(size: int, late: int) -> list[bytes]:
    """What each rank reads of what the first one writes, in a start to which one comes late."""

    def join(rank: int) -> bytes:
        time.sleep(0.2 * (rank == late))
        store = store_of_this_start(job_store("meet"), rank, size, 10.0)
        if rank == 0:
            assert not store.check(["word"])
            store.set("word", secrets.token_hex())
        return store.get("word")

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


def test_nothing_of_an_earlier_start_is_read():
    starts = [(3, 0), (3, 0), (3, 1), (2, 0), (3, 2), (1, 0), (3, 0)]
    words = [set(start(size, late)) for size, late in starts]
    assert all(len(each) == 1 for each in words)
    assert len(set.union(*words)) == len(starts)


def test_who_waits_in_vain_raises():
    start(2, late=0)  # whose answer is still there
    with pytest.raises(RuntimeError, match="rank 0 has waited"):
        store_of_this_start(job_store("meet"), 0, 2, 0.2)
    with pytest.raises(RuntimeError, match="rank 1 has waited"):
        store_of_this_start(job_store("meet"), 1, 2, 0.2)


def test_the_runs_folder_is_known_to_the_first_rank_of_the_next_start(tmp_path, monkeypatch):
    assert folder_before() is None
    keep_folder(tmp_path)
    assert folder_before() == tmp_path
    monkeypatch.setenv("RANK", "1")
    assert folder_before() is None
    monkeypatch.setenv("RANK", "0")
    keep_folder(Path("/not/here"))
    with pytest.raises(CheckpointError, match=r"not on this machine.*hydra\.run\.dir"):
        folder_before()


def test_a_folder_that_no_rank_has_written_is_not_taken(tmp_path, monkeypatch):
    keep_folder(tmp_path)
    monkeypatch.setenv(SECRET, "known to ranks")
    with pytest.raises(RankFailedError, match="not signed by this rank's secret"):
        folder_before()
    keep_folder(tmp_path)
    assert folder_before() == tmp_path


def test_without_restarts_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    keep_folder(tmp_path)
    assert folder_before() is None

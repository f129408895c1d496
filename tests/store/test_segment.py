from __future__ import annotations

import multiprocessing as mp
import os
import signal
import stat
import time

import numpy as np
import pytest

from dgl_mgpu.errors import SharedMemoryError
from dgl_mgpu.store.segment import SHARED_MEMORY, Segment, require_room


def _add_one(segment: Segment) -> None:
    segment.array(np.int64, (4,))[:] += 1


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pickled_segment_is_the_same_memory_in_another_process(method):
    segment = Segment.create(32)
    segment.array(np.int64, (4,))[:] = [1, 2, 3, 4]
    process = mp.get_context(method).Process(target=_add_one, args=(segment,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert segment.array(np.int64, (4,)).tolist() == [2, 3, 4, 5]


def test_attach_by_path_shares_memory():
    segment = Segment.create(100)
    other = Segment.attach(segment.path, 100)
    segment.bytes[:] = 7
    assert other.bytes.tolist() == [7] * 100


def test_a_segment_is_private_and_has_no_name(tmp_path):
    for folder in (SHARED_MEMORY, tmp_path):
        before = set(os.listdir(folder))
        segment = Segment.create(1 << 16, folder)
        assert set(os.listdir(folder)) <= before
        status = os.stat(segment.path)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0


def _hold(segment_size: int, ready) -> None:
    segment = Segment.create(segment_size)
    segment.bytes[:] = 1
    ready.set()
    time.sleep(60)


def test_kill_leaves_no_memory_behind():
    def used() -> int:
        status = os.statvfs(SHARED_MEMORY)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    size = 64 << 20
    context = mp.get_context("fork")
    ready = context.Event()
    before = used()
    process = context.Process(target=_hold, args=(size, ready))
    process.start()
    assert ready.wait(60)
    assert used() >= before + size // 2
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert used() < before + size // 2


def test_memory_is_freed_with_the_last_reference():
    segment = Segment.create(1 << 20)
    path = segment.path
    array = segment.array(np.uint8, (10,))
    del segment
    array[:] = 3  # the mapping outlives the segment object
    assert array.tolist() == [3] * 10
    assert not path.exists()


def test_too_little_room_is_told_before_and_at_creation(monkeypatch):
    free = os.statvfs(SHARED_MEMORY).f_bavail * os.statvfs(SHARED_MEMORY).f_frsize
    with pytest.raises(SharedMemoryError, match=r"too few.*--shm-size"):
        require_room(free + (1 << 30))
    with pytest.raises(SharedMemoryError, match="MiB too few"):
        Segment.create(free + (1 << 40))


def test_unusable_folder(tmp_path):
    with pytest.raises(SharedMemoryError, match="No such file"):
        Segment.create(10, tmp_path / "missing")
    with pytest.raises(SharedMemoryError, match="No such file"):
        require_room(10, tmp_path / "missing")


def test_attach_to_a_segment_of_another_size_or_none():
    segment = Segment.create(100)
    with pytest.raises(SharedMemoryError, match="it has 100 bytes"):
        Segment.attach(segment.path, 200)
    path = segment.path
    del segment
    with pytest.raises(SharedMemoryError, match="No such file"):
        Segment.attach(path, 100)


def test_empty_segment():
    segment = Segment.create(0)
    assert segment.bytes.size == 0
    assert Segment.attach(segment.path, 0).nbytes == 0

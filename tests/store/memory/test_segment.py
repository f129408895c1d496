from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dgl_mgpu.errors import SharedMemoryError, StoreClosedError
from dgl_mgpu.machine import shared_memory
from dgl_mgpu.store.memory.segment import SHARED_MEMORY, Segment, require_room
from tests.environment import search_path


def _add_one(segment: Segment) -> None:
    segment.array(np.int64, (4,))[:] += 1


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pickled_segment_is_the_same_memory_in_another_process(method):
    segment = Segment.create(32)
    segment.array(np.int64, (4,))[:] = [1, 2, 3, 4]
    process = mp.get_context(method).Process(target=_add_one, args=(segment,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert segment.array(np.int64, (4,)).tolist() == [2, 3, 4, 5]


def test_attach_by_path_shares_memory():
    segment = Segment.create(100)
    other = Segment.attach(segment.path, 100)
    segment.bytes[:] = 7
    assert other.bytes.tolist() == [7] * 100


def test_a_segment_is_private_and_has_no_name(tmp_path):
    for folder in (SHARED_MEMORY, tmp_path):
        segment = Segment.create(1 << 16, folder)
        status = os.stat(segment.path)
        assert status.st_ino not in {entry.inode() for entry in os.scandir(folder)}
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0


def _hold(holds) -> None:
    segment = Segment.create(1 << 20)
    segment.bytes[:] = 1
    holds.send(os.stat(segment.path))
    signal.pause()


def test_kill_leaves_no_memory_behind():
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs,), daemon=True)
    process.start()
    held = ours.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    # What nothing has open is freed if it has no name; how much memory is used, others change too.
    assert (held.st_size, held.st_nlink) == (1 << 20, 0)
    assert held.st_ino not in {entry.inode() for entry in os.scandir(SHARED_MEMORY)}


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
    # Only where there is memory for it does a larger /dev/shm help.
    for ram, advice in ((2 * free + (2 << 30), "--shm-size"), (free, "with more memory")):
        monkeypatch.setattr(shared_memory, "free_host_bytes", lambda ram=ram: ram)
        with pytest.raises(SharedMemoryError, match=f"too few.*{advice}"):
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
    with pytest.raises(SharedMemoryError, match="the segment has 100 bytes"):
        Segment.attach(segment.path, 200)
    path = segment.path
    del segment
    with pytest.raises(SharedMemoryError, match="No such file"):
        Segment.attach(path, 100)


def test_empty_segment():
    segment = Segment.create(0)
    assert segment.bytes.size == 0
    assert Segment.attach(segment.path, 0).nbytes == 0


READ = """
import pickle, sys
import dgl_mgpu.store.memory
try:
    print(pickle.load(open(sys.argv[1], "rb")).bytes.tolist())
except dgl_mgpu.errors.StoreClosedError as error:
    print(error)
"""


def _read_elsewhere(file: Path) -> str:
    command = [sys.executable, "-c", READ, str(file)]
    environment = {**os.environ, "PYTHONPATH": search_path()}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return found.stdout


def test_a_pickle_is_read_while_its_process_has_the_segment(tmp_path):
    segment = Segment.create(3)
    segment.bytes[:] = 7
    pickled, file = pickle.dumps(segment), tmp_path / "segment"
    file.write_bytes(pickled)
    for _ in range(2):
        assert pickle.loads(pickled).bytes.tolist() == [7] * 3
        assert _read_elsewhere(file) == "[7, 7, 7]\n"
    del segment
    assert "cannot read a pickled store" in _read_elsewhere(file)
    others = [Segment.create(3) for _ in range(20)]  # one has the closed one's number
    with pytest.raises(StoreClosedError, match=r"read a pickled store.*closed"):
        pickle.loads(pickled)
    del others


def test_a_process_that_is_started_has_the_segment_when_nobody_else_has_it_any_more():
    segment = Segment.create(32)
    process = mp.get_context("spawn").Process(target=_add_one, args=(segment,))
    process.start()
    del segment
    process.join()
    assert process.exitcode == 0

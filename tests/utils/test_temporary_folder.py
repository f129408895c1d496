"""What a job keeps in temporary folders goes with it, or once it is found to be dead."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dgl_mgpu.utils import temporary_folder as tempfolder
from dgl_mgpu.utils.temporary_folder import temporary_folder

# A job with a process of its own, and a semaphore that still has its name.
JOB = """
import multiprocessing, os, sys, tempfile
from multiprocessing import synchronize, util
from _multiprocessing import SemLock
from dgl_mgpu.utils.temporary_folder import keep_together, note_sharing

def work(folder):
    assert util.get_temp_dir() == folder
    note_sharing()
    open(f"/dev/shm/torch_{os.getpid()}_1_0", "x")  # as one that is killed may leave it
    os._exit(0)

keep_together()
keep_together()
folder = util.get_temp_dir()
worker = multiprocessing.get_context("fork").Process(target=work, args=(folder,))
worker.start()
worker.join()
open(f"{folder}/worker", "x").write(str(worker.pid))
assert worker.exitcode == 0
SemLock(1, 1, 1, synchronize.SemLock._make_name(), False)
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def short_path():
    """A folder whose name leaves room for sockets' names; that of tmp_path may not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def start_job(short_path):
    started = []

    def start(place: Path = short_path) -> tuple[subprocess.Popen, Path]:
        job = subprocess.Popen(
            [sys.executable, "-c", JOB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(place)},
        )  # fmt: skip
        started.append(job)
        return job, Path(job.stdout.readline().strip())

    yield start
    for job in started:
        job.communicate()


def semaphores(folder: Path) -> list[Path]:
    return list(Path("/dev/shm").glob(f"sem.{folder.name}*"))


def shared(folder: Path) -> Path:
    """What the job's worker has left in shared memory."""
    return Path(f"/dev/shm/torch_{(folder / 'worker').read_text()}_1_0")


def test_the_next_job_removes_what_a_killed_one_left(short_path, start_job):
    job, left = start_job()
    living, others = start_job()
    assert {path.name for path in short_path.iterdir()} == {left.name, others.name}
    assert semaphores(left) and semaphores(others)
    tensor, of_others = shared(left), shared(others)
    job.send_signal(signal.SIGKILL)
    job.wait()
    assert left.is_dir() and semaphores(left) and tensor.exists()
    # Not of a job: another user's, or what only has such a name.
    (short_path / "dgl-mgpu-mine").mkdir()
    (short_path / "dgl-mgpu-link").symlink_to(left)
    with temporary_folder(short_path) as own:
        names = {path.name for path in short_path.iterdir()}
        assert names == {own.name, others.name, "dgl-mgpu-mine", "dgl-mgpu-link"}
        assert not semaphores(left) and semaphores(others)
        assert not tensor.exists() and of_others.exists()
    assert not own.exists()
    living.communicate()
    assert not others.exists() and not semaphores(others) and not of_others.exists()


def test_sockets_have_names_that_are_short_enough(tmp_path, start_job):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    job, folder = start_job(long)
    assert folder.parent == Path("/tmp") and folder.is_dir()
    job.communicate()
    assert not folder.exists() and not any(long.iterdir())


def test_a_forked_process_leaves_the_folder_of_its_parent(tmp_path):
    """Where what holds it is forgotten there, which runs it to its end."""
    holding = temporary_folder(tmp_path)
    folder = holding.__enter__()
    child = os.fork()
    if child == 0:
        holding.__exit__(None, None, None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (folder / "owner").read_text().startswith(f"process {os.getpid()} on ")
    holding.__exit__(None, None, None)
    assert not folder.exists()


def test_a_new_folder_may_be_looked_at_by_another_process(tmp_path, monkeypatch):
    """One that looks for folders of killed processes has the lock for a moment."""
    looking: list[int] = []
    make = tempfile.mkdtemp

    def made(**options) -> str:
        folder = make(**options)
        file = os.open(Path(folder) / "owner", os.O_CREAT | os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_SH)
        looking.append(file)
        return folder

    monkeypatch.setattr(tempfolder.tempfile, "mkdtemp", made)
    monkeypatch.setattr(tempfolder.time, "sleep", lambda seconds: os.close(looking.pop()))
    with temporary_folder(tmp_path) as folder:
        assert (folder / "owner").read_text().startswith(f"process {os.getpid()} on ")
    assert not looking


def test_a_process_that_is_stopped_while_it_looks_is_not_waited_for(tmp_path, monkeypatch):
    make = tempfile.mkdtemp

    def made(**options) -> str:
        folder = make(**options)
        file = os.open(Path(folder) / "owner", os.O_CREAT | os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_SH)
        return folder

    monkeypatch.setattr(tempfolder.tempfile, "mkdtemp", made)
    monkeypatch.setattr(tempfolder.timeouts, "END", 0.02)
    with (
        pytest.raises(TimeoutError, match=r"locked for 0\.02 s"),
        temporary_folder(tmp_path),
    ):
        pass
    assert not any(tmp_path.iterdir())

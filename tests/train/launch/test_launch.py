from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.comm import loopback
from dgl_mgpu.errors import InvalidInputError, RankFailedError
from dgl_mgpu.store.global_store import GlobalStore
from dgl_mgpu.train.launch import launch as launching
from dgl_mgpu.train.launch import process_group as group
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.launch.preemption import DeferredSignals
from dgl_mgpu.utils import timeouts
from tests.forkserver import forkserver
from tests.train.jobs import fork_ranks, until


def _sum_ranks(folder: Path) -> None:
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    (folder / str(dist.get_rank())).write_text(str(int(total)))


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_form_one_job(tmp_path):
    launch(_sum_ranks, 2, tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["3"] * 2


def _leaves_at_once(folder: Path) -> None:
    (folder / str(dist.get_rank())).touch()


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_is_soon_done_waits_until_others_have_checked(tmp_path, monkeypatch):
    """It closed the connections that the slower one had yet to check."""
    look = loopback._sockets

    def late() -> list[loopback._Socket]:
        if dist.get_rank() == 0:
            time.sleep(0.5)
        return look()

    monkeypatch.setattr(loopback, "_sockets", late)
    launch(_leaves_at_once, 2, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def _alone(folder: Path) -> None:
    assert not dist.is_initialized()
    (folder / "pid").write_text(str(os.getpid()))


def test_one_rank_runs_here(tmp_path):
    launch(_alone, 1, tmp_path)
    assert (tmp_path / "pid").read_text() == str(os.getpid())


def _one_is_killed(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _one_raises(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    dist.barrier()
    if dist.get_rank() == 1:
        raise InvalidInputError("do it", "no way", "do something else")
    dist.barrier()


def _one_leaves(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    dist.barrier()
    if dist.get_rank() == 0:
        raise KeyError("lost")
    signal.pause()


def _one_says_much(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    dist.barrier()
    if dist.get_rank() == 0:
        raise ValueError("x" * 1_000_000)
    dist.barrier()


def _one_exits(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    dist.barrier()
    if dist.get_rank() == 1:
        sys.exit(0)
    dist.barrier()


def _one_takes_long_to_end(folder: Path) -> None:
    """As a killed one may that has much to free: its connections are closed before."""
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        until((folder / "told").exists)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    finally:
        (folder / "told").touch()


@pytest.mark.usefixtures("forked_ranks")
def test_the_cause_is_awaited(tmp_path, monkeypatch):
    monkeypatch.setattr(timeouts, "REPORTS", 0.0)
    with pytest.raises(RankFailedError, match="run rank 1: it was killed by SIGKILL"):
        launch(_one_takes_long_to_end, 2, tmp_path)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (_one_is_killed, RankFailedError, "run rank 1: it was killed by SIGKILL"),
        (_one_raises, InvalidInputError, "do it: no way"),
        (_one_says_much, RankFailedError, "run rank 0: it raised ValueError: xxx"),
        (_one_exits, RankFailedError, "run rank 1: it left before its work was done"),
        (_one_leaves, RankFailedError, "run rank 0: it raised KeyError: 'lost'"),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_reason(tmp_path, work, error, message):
    with pytest.raises(error, match=message):
        launch(work, 2, tmp_path)
    pids = [int(name) for name in os.listdir(tmp_path)]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def _makes_stores(folder: Path) -> None:
    def resources() -> tuple[int, int]:
        process = psutil.Process()
        return process.num_fds(), process.num_threads()

    from tests.store.test_graph import power_law_graph

    g = power_law_graph() if dist.get_rank() == 0 else None
    GlobalStore.from_dgl(g)
    before = resources()
    for _ in range(3):
        GlobalStore.from_dgl(g)
    gc.collect()
    after = resources()
    assert after[0] <= before[0] + 2, (before, after)
    assert after[1] <= before[1] + 1, (before, after)


@pytest.mark.usefixtures("forked_ranks")
def test_stores_that_are_gone_leave_no_connections_or_threads(tmp_path):
    launch(_makes_stores, 2, tmp_path)


def _fails_while_a_child_shares(folder: Path) -> None:
    if dist.get_rank() == 1:
        child = os.fork()
        if not child:
            # A worker that is to hand over a tensor: the name of its memory is not yet gone.
            Path(f"/dev/shm/torch_{os.getpid()}_1_0").write_bytes(b"rows")
            (folder / "new").write_text(str(os.getpid()))
            (folder / "new").rename(folder / "child")
            time.sleep(300)
            os._exit(0)
        until((folder / "child").exists)
    dist.barrier()
    if dist.get_rank() == 0:
        raise InvalidInputError("do it", "no way", "do something else")
    dist.barrier()


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_are_ended_leave_no_shared_memory_of_their_workers(tmp_path):
    with pytest.raises(InvalidInputError):
        launch(_fails_while_a_child_shares, 2, tmp_path)
    child = (tmp_path / "child").read_text()
    assert not list(Path("/dev/shm").glob(f"torch_{child}_*"))
    until(lambda: not _runs(int(child)))


def _runs(process: int) -> bool:
    """Whether it does; nobody may have waited for one that has ended."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_group_is_killed_also_when_it_cannot_be_listed(monkeypatch):
    def fails(leader: int) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(group, "_members", fails)
    sleeper = subprocess.Popen(["sleep", "300"], start_new_session=True)
    with pytest.raises(KeyboardInterrupt):
        group.kill_group(sleeper.pid)
    assert sleeper.wait() == -signal.SIGKILL


def _launches(work, folder: Path, temporary: Path | None = None) -> None:
    """What a script does that launches ranks; it forks them, which takes no seconds."""
    tempfile.tempdir = temporary and str(temporary)
    # What a shell has put in the background ignores it, and so does all that starts there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fork_ranks()
    try:
        launch(work, 2, folder)
    except RankFailedError as error:
        (folder / "told").write_text(str(error))


def _waits(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    dist.barrier()
    signal.pause()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_do_not_outlive_their_launcher(tmp_path, how):
    started, temporary = tmp_path / "started", tmp_path / "temporary"
    started.mkdir()
    temporary.mkdir()
    launcher = forkserver().Process(target=_launches, args=(_waits, started, temporary))
    launcher.start()
    until(lambda: len(os.listdir(started)) == 2)
    os.kill(launcher.pid, how)
    launcher.join()
    pids = [int(name) for name in os.listdir(started)]
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert os.listdir(temporary) == []


def _told_while_it_forks(how: signal.Signals, folder: Path) -> None:
    """Python drops what is raised in this callback of a fork."""
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), how))
    _launches(_waits, folder)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_while_a_rank_starts_is_not_lost(tmp_path, how):
    launcher = forkserver().Process(target=_told_while_it_forks, args=(how, tmp_path))
    launcher.start()
    launcher.join()
    assert launcher.exitcode == 128 + how
    assert len(os.listdir(tmp_path)) < 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_ends_all(tmp_path, how):
    draw = random.Random(int(how))
    for number in range(int(os.environ.get("DGL_MGPU_TEST_MOMENTS", 5))):
        folder = tmp_path / str(number)
        folder.mkdir()
        launcher = forkserver().Process(target=_says_that_it_launches, args=(folder,))
        launcher.start()
        until((folder / "launches").exists)
        time.sleep(draw.uniform(0, 0.2))
        os.kill(launcher.pid, how)
        launcher.join()
        assert launcher.exitcode == 128 + how
        pids = [int(name) for name in os.listdir(folder) if name.isdecimal()]
        until(lambda pids=pids: not any(psutil.pid_exists(pid) for pid in pids))


def _says_that_it_launches(folder: Path) -> None:
    asked_told = DeferredSignals.__enter__

    def says(told: DeferredSignals) -> DeferredSignals:
        asked_told(told)
        (folder / "launches").touch()
        return told

    DeferredSignals.__enter__ = says
    _launches(_waits, folder)


def _stays(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    threading.Thread(target=time.sleep, args=(1000,)).start()


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_is_done_and_stays_is_killed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(timeouts, "LEAVE", 0.2)
    launch(_stays, 2, tmp_path)
    pids = [int(name) for name in os.listdir(tmp_path)]
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    for rank in range(2):
        assert f"rank {rank} (process " in caplog.text
    assert "was done 0.2 s ago and has not ended" in caplog.text


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_cannot_be_killed_is_told_of_and_left(tmp_path, monkeypatch, caplog):
    """As one that a device keeps; the signal is held back here."""
    monkeypatch.setattr(timeouts, "END", 0.1)
    monkeypatch.setattr(timeouts, "LEAVE", 0.1)
    monkeypatch.setattr(launching, "_kill", lambda process: [])
    launch(_stays, 2, tmp_path)
    pids = [int(name) for name in os.listdir(tmp_path)]
    assert "was killed and has not ended within 0.1 s" in caplog.text
    assert not {process.pid for process in multiprocessing.active_children()} & {*pids}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_ranks_that_do_not_come_are_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(timeouts, "JOIN", 0.5)
    with pytest.raises(RankFailedError, match=r"join 2 ranks as rank 0: .* within 0\.5 s"):
        launching._join_job(0, 2, f"file://{tmp_path / 'meeting'}")
    assert not dist.is_initialized()


def _one_is_killed_that_has_a_child(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        child = os.fork()
        if not child:  # has open what the rank had open, as a DataLoader's worker has
            time.sleep(300)
            os._exit(0)
        (folder / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _one_is_killed_within_its_word(folder: Path) -> None:
    """Its child has the pipe open, on which the rest of the word does not come."""
    if dist.get_rank() == 1:
        child = os.fork()
        if not child:
            time.sleep(300)
            os._exit(0)
        (folder / "child").write_text(str(child))

        def send(sender, outcome):
            os.write(sender.fileno(), launching._LENGTH.pack(1000) + b"not all of it")
            os.kill(os.getpid(), signal.SIGKILL)

        launching._send = send
    else:
        until((folder / "child").exists)


@pytest.mark.parametrize("work", [_one_is_killed_that_has_a_child, _one_is_killed_within_its_word])
def test_a_killed_rank_is_named_while_its_children_live(tmp_path, work):
    launcher = forkserver().Process(target=_launches, args=(work, tmp_path))
    launcher.start()
    launcher.join()
    child = psutil.Process(int((tmp_path / "child").read_text()))
    assert child.status() != psutil.STATUS_ZOMBIE
    child.kill()
    assert "run rank 1: it was killed by SIGKILL" in (tmp_path / "told").read_text()

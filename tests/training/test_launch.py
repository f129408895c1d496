from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.backend.global_store.store import GlobalStore
from dgl_mgpu.errors import InvalidInputError, RankFailedError
from dgl_mgpu.training.launch import launch
from tests.environment import search_path


def _sum_ranks(folder: Path) -> None:
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    (folder / str(dist.get_rank())).write_text(str(int(total)))


def test_ranks_form_one_job(tmp_path):
    launch(_sum_ranks, 3, tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["6"] * 3


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
    time.sleep(60)


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

    from tests.backend.global_store.test_graph import power_law_graph

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


SCRIPT = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from dgl_mgpu.training.launch import launch
from tests.environment import search_path

def work(folder):
    import os
    (Path(folder) / str(os.getpid())).touch()
    dist.barrier()
    time.sleep(600)

if __name__ == "__main__":
    launch(work, 2, sys.argv[1])
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_do_not_outlive_their_launcher(tmp_path, how):
    (tmp_path / "script.py").write_text(SCRIPT)
    started = tmp_path / "started"
    started.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", started],
        env={**os.environ, "PYTHONPATH": search_path(), "TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    _until(lambda: len(os.listdir(started)) == 2, 60)
    os.kill(launcher.pid, how)
    launcher.wait(30)
    pids = [int(name) for name in os.listdir(started)]
    if how != signal.SIGKILL:
        assert sorted(os.listdir(tmp_path)) == ["script.py", "started"]
    _until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 30)


def _until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

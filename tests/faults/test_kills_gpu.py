"""Processes of jobs on GPUs are killed, stopped and suspended, and GPU memory is given back."""

from __future__ import annotations

import importlib.util
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.jobs import (
    END_SECONDS,
    Job,
    goes_on,
    require_checkpoints_load,
    require_same,
    send,
    until,
)
from tests.train.jobs import SMALL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.alone,  # looks at how much of a GPU's memory is in use
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
        reason="no GPU, or no CuPy",
    ),
]

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="2 ranks train on a GPU each")
#: Of a GPU, which other things than memory of a job may take or give back meanwhile.
SLACK_BYTES = 128 << 20
_IN_USE = "import torch; print(sum(t - f for f, t in map(torch.cuda.mem_get_info, range({}))))"


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """As a process sees it that has taken no part in the job."""
    before = memory_in_use()
    yield
    found = 0

    def is_back() -> bool:
        nonlocal found
        found = memory_in_use()
        return found <= before + SLACK_BYTES

    until(is_back, 60.0, lambda: f"{found - before} bytes of GPU memory were not given back")


def memory_in_use() -> int:
    """Bytes of all GPUs, with what this look at them takes itself, always the same."""
    look = [sys.executable, "-c", _IN_USE.format(torch.cuda.device_count())]
    return int(subprocess.run(look, capture_output=True, text=True, check=True).stdout)


def victims(job: Job, ranks: int, whom: str, rng: random.Random) -> tuple[list[int], int]:
    """The processes that are meant, and the number of the first among those of its kind."""
    roles = job.roles(ranks)
    if whom == "all":
        return [pid for pids in roles.values() for pid in pids], 0
    number = rng.randrange(len(roles[whom]))
    return [roles[whom][number]], number


def kill(job: Job, ranks: int, whom: str, rng: random.Random, outcomes) -> None:
    """Kill processes and see what the job comes to."""
    pids, number = victims(job, ranks, whom, rng)
    begin = time.monotonic()
    for pid in pids:
        send(pid, signal.SIGKILL)
    code = job.code(END_SECONDS)
    outcomes.longest("from a kill to the command's end", time.monotonic() - begin)
    job.require_no_process()
    outcomes.longest("from a kill to the last process's", time.monotonic() - begin)
    if whom == "rank":
        error = f"RankFailedError: cannot run rank {number}: it was killed by SIGKILL"
        assert code == 1 and error in job.errors(), job.told()
        job.require_no_file()
    else:
        assert code == -signal.SIGKILL, job.told()


@pytest.fixture
def reading(tmp_path: Path) -> Callable[[int], Job]:
    """A job of three ranks that read each other's memory; on one GPU, or more where there are."""

    def start(turn: int) -> Job:
        job = Job(tmp_path / str(turn), "3", start="stores")
        all_read = lambda: len(list(job.folder.glob("reads-*"))) == 3  # noqa: E731
        until(lambda: all_read() or job.ended(0), 120.0, job.told)
        assert not job.ended(0), job.told()
        return job

    return start


@pytest.mark.parametrize("whom", ["rank", "launcher", "all"])
def test_memory_that_ranks_share_is_given_back_after_a_kill(reading, outcomes, rounds, rng, whom):
    for turn in range(rounds(1, 6)):
        with reading(turn) as job:
            time.sleep(rng.uniform(0, 0.5))
            kill(job, 3, whom, rng, outcomes)
        outcomes.add(f"{whom} killed: no process was left")


def test_ranks_that_share_memory_are_suspended_and_told_to_stop(reading, outcomes, rounds, rng):
    for turn in range(rounds(1, 6)):
        with reading(turn) as job:
            pids, _ = victims(job, 3, rng.choice(["rank", "launcher", "all"]), rng)
            for pid in pids:
                send(pid, signal.SIGSTOP)
            time.sleep(rng.uniform(0.5, 2))
            for pid in pids:
                send(pid, signal.SIGCONT)
            time.sleep(0.5)
            assert not job.ended(0), job.told()
            send(job.pid, signal.SIGTERM)
            begin = time.monotonic()
            assert job.code(END_SECONDS) == 128 + signal.SIGTERM, job.told()
            outcomes.longest("from SIGTERM to the end", time.monotonic() - begin)
            job.require_no_process()
            job.require_no_file()
        outcomes.add("went on, and stopped when it was told to")


def options_of(data: str, ranks: int) -> list[str]:
    return [
        *SMALL, data, "store.device=cuda", "model.dropout=0.5", f"trainer.ranks={ranks}",
        "trainer.epochs=100",
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=TWO_GPUS)])
def test_training_on_gpus_is_killed_and_resumed(tmp_path, data, outcomes, rounds, rng, ranks):
    """On one GPU to the same bits; on several, that add up by NCCL, to its end."""
    options = options_of(data, ranks)
    if ranks == 1:
        with Job(tmp_path / "whole", *options, start="console") as whole:
            assert whole.code() == 0, whole.told()
    for turn in range(rounds(1, 6)):
        place = tmp_path / str(turn)
        for signum in (signal.SIGKILL, signal.SIGTERM):
            there = _written(place)
            with Job(place, *goes_on(place / "run", options), start="console") as job:
                until(lambda: _written(place) != there or job.ended(0), 120.0, job.told)  # noqa: B023
                job.ended(rng.uniform(0, 0.3))
                if job.ended(0):
                    assert job.code() == 0, job.told()
                    outcomes.add("it was done before")
                    break
                if signum == signal.SIGKILL:
                    whom = rng.choice(["launcher", "all", *["rank"] * (ranks > 1)])
                    kill(job, ranks, whom, rng, outcomes)
                    outcomes.add(f"{whom} killed: no process was left")
                else:
                    send(job.pid, signum)
                    begin = time.monotonic()
                    assert job.code(END_SECONDS) in (0, 128 + signum), job.told()
                    outcomes.longest("from SIGTERM to the end", time.monotonic() - begin)
                    job.require_no_process()
                    job.require_no_file()
                    outcomes.add("stopped by SIGTERM")
            assert require_checkpoints_load(place / "run")
        if not (place / "run" / "curves.png").exists():
            with Job(place, *goes_on(place / "run", options), start="console") as last:
                assert last.code() == 0, last.told()
                last.require_no_process()
        if ranks == 1:
            require_same(place / "run", tmp_path / "whole" / "run")
        outcomes.add("resumed to the same bits" if ranks == 1 else "resumed to its end")


def _written(place: Path) -> set[tuple[str, int]]:
    folder = place / "run" / "checkpoints"
    return {(path.name, path.stat().st_ino) for path in folder.glob("epoch-*.pt")}

"""Processes of a job are killed at random, and it is resumed, until the run is done."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.checkpoint.checkpoint import has_checkpoint
from dgl_mgpu.utils.file_lock import killed_holder
from tests.faults.conftest import Outcomes
from tests.faults.jobs import (
    END_SECONDS,
    Job,
    Runs,
    goes_on,
    is_complete,
    moment,
    require_checkpoints_load,
    require_same,
    send,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

#: Enough epochs that most moments of a run are within them.
EPOCHS = "trainer.epochs=12"
#: What is trained, of which one is drawn; more of the first, which has most to do with others.
KINDS = [
    [],
    [],
    ["store.gpu_memory=64KiB", "store.host_memory=64KiB", "store.disk_path={disk}"],
    ["mode=fullgraph"],
    ["task=link_prediction", "trainer.batch_size=512"],
]
#: What the console command takes, most of it to import what it runs.
CONSOLE_SECONDS = 16.0
#: How often a process of each kind is killed: what is left to find the cause matters most.
WEIGHTS = {"launcher": 1, "rank": 3, "worker": 3, "all": 1}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where stores keep what memory has no room for."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: str) -> Runs:
    return Runs(tmp_path_factory.mktemp("whole"), data)


def drawn(rng: random.Random, ranks: int, disk: Path) -> tuple[list[str], list[str]]:
    """Options that decide what is trained, and others."""
    kind = [word.format(disk=disk) for word in rng.choice(KINDS)]
    workers = 0 if "mode=fullgraph" in kind else rng.choice([0, 2])
    how = [f"sampler.num_workers={workers}", f"trainer.checkpoint_every={rng.choice([1, 1, 2])}"]
    return [EPOCHS, f"trainer.ranks={ranks}", *kind], how


def kill(job: Job, rng: random.Random, ranks: int, among: set[str]) -> tuple[str, int]:
    """Kill a process, or all of them; what it was, and its number among those of its kind."""
    roles = job.roles(ranks)
    # Among what there is: workers come and go.
    there = [role for role in WEIGHTS if role in among and (role in roles or role == "all")]
    if not roles or not there:
        return "", 0
    (role,) = rng.choices(there, [WEIGHTS[each] for each in there])
    if role == "all":
        everyone = [pid for pids in roles.values() for pid in pids]
        rng.shuffle(everyone)
        for pid in everyone:
            send(pid, signal.SIGKILL)
        return role, 0
    number = rng.randrange(len(roles[role]))
    send(roles[role][number], signal.SIGKILL)
    return role, number


def require_named(job: Job, code: int, role: str, number: int) -> str:
    """See that the error is typed and names its cause; its type."""
    if role in ("launcher", "all"):
        assert code == -signal.SIGKILL, f"{code}: {job.told()}"
        return "no word, as it was killed itself"
    assert code == 1, f"{code}: {job.told()}"
    last = job.errors().strip().splitlines()[-1]
    (error,) = re.findall(r"^dgl-mgpu train: (\w+Error): cannot ", last) or [job.told()]
    if role == "rank":
        assert error == "RankFailedError", job.told()
        assert f"cannot run rank {number}: it was killed by SIGKILL" in last, job.told()
    else:
        assert error == "WorkerFailedError", job.told()
        assert "sampler.num_workers processes: " in last, job.told()
    # Another worker, which was handing over a batch just then, may have shown a traceback before.
    return error


def killed_until_done(
    runs: Runs,
    place: Path,
    outcomes: Outcomes,
    rng: random.Random,
    kills: int,
    *,
    ranks: int,
    disk: Path,
    start: str = "forked",
    usual_seconds: float | None = None,
) -> int:
    """One run, killed a few times and then left to its end; how often it was killed."""
    what, how = drawn(rng, ranks, disk)
    expected, seconds = runs.whole(*what)
    options = runs.options(*what, *how)
    most, done = min(kills, rng.randrange(1, 5)), 0
    killed: list[Job] = []
    for _ in range(20):
        words = goes_on(place / "run", options)
        is_locked = killed_holder(place / "run" / ".run.lock")
        with Job(place, *words, start=start) as job:
            role = ""
            if done < most:
                moment(job, rng, usual_seconds or seconds)
                begin = time.monotonic()
                role, number = kill(job, rng, ranks, {"launcher", "rank", "worker", "all"})
            code = job.code(END_SECONDS if role else 150)
            if role:
                outcomes.longest("from a kill to the command's end", time.monotonic() - begin)
            job.require_no_process()
            if role:
                outcomes.longest("from a kill to the last process's", time.monotonic() - begin)
            is_killed = role in ("launcher", "all") and code == -signal.SIGKILL
            if not is_killed:  # else the next run takes away what is left
                job.require_no_file()
                while killed:
                    assert not killed.pop().shared(), job.told()
            else:
                killed.append(job)
            require_checkpoints_load(place / "run")
            assert not list(disk.iterdir()), job.told()
            if is_locked and not is_killed:
                assert "was killed, or its machine" in job.errors(), job.told()
            if code == 0:
                if role:
                    outcomes.add(f"{role} killed: of no matter, the work was done")
                    done += 1
                break
            assert role, f"{code}: {job.told()}"
            done += 1
            outcomes.add(f"{role} killed: {require_named(job, code, role, number)}")
            if is_complete(place / "run"):
                break
    else:
        raise AssertionError("not done after 20 attempts")
    require_same(place / "run", expected)
    outcomes.add("runs that were killed and came to the same bits")
    return done


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_run_that_is_killed_and_resumed_has_the_same_bits(
    tmp_path, runs, disk, outcomes, rounds, rng, ranks
):
    left = rounds(5, 38)
    while left > 0:
        place = tmp_path / str(left)
        left -= max(1, killed_until_done(runs, place, outcomes, rng, left, ranks=ranks, disk=disk))


def test_the_console_command_is_killed_and_resumed(tmp_path, runs, disk, outcomes, rounds, rng):
    """As a shell starts it: its ranks are new interpreters, and pictures are drawn."""
    left = rounds(1, 24)
    while left > 0:
        ranks = rng.choice([1, 2, 4])
        how = {"ranks": ranks, "disk": disk, "start": "console", "usual_seconds": CONSOLE_SECONDS}
        left -= max(
            1, killed_until_done(runs, tmp_path / str(left), outcomes, rng, min(left, 2), **how)
        )


def test_a_run_whose_ranks_are_killed_starts_them_again(
    tmp_path, runs, disk, outcomes, rounds, rng
):
    left = rounds(3, 24)
    while left > 0:
        ranks, place = rng.choice([2, 3, 4]), tmp_path / str(left)
        what, how = drawn(rng, ranks, disk)
        expected, seconds = runs.whole(*what)
        options = [*runs.options(*what, *how), "trainer.max_restarts=3"]
        lost = 0
        with Job(place, *options) as job:
            for _ in range(min(left, rng.randrange(1, 4))):
                job.began = time.monotonic()
                moment(job, rng, seconds)
                if job.ended(0) or not kill(job, rng, ranks, {"rank", "worker"})[0]:
                    break
                lost += 1
            begin = time.monotonic()
            assert job.code() == 0, job.told()
            outcomes.longest("from the last kill to the end of the run", time.monotonic() - begin)
            job.require_no_process()
            job.require_no_file()
        require_checkpoints_load(place / "run")
        require_same(place / "run", expected)
        _, summary = read_metrics(place / "run" / "metrics.jsonl")
        restarts = summary["restarts"]
        # Of a rank or a worker whose work was done, or two at one time, one restart or none.
        assert restarts <= lost, job.told()
        assert job.errors().count("of 3 continues from") == restarts, job.told()
        outcomes.counts["processes killed"] += lost
        outcomes.counts["restarts"] += restarts
        outcomes.add("runs that went on by themselves and came to the same bits")
        left -= max(1, lost)


def test_no_process_outlives_its_command(tmp_path, runs, outcomes, rounds, rng):
    """Of a run so long that none is done by itself."""
    for turn in range(rounds(3, 24)):
        ranks = rng.choice([1, 2, 3])
        options = [f"trainer.ranks={ranks}", "sampler.num_workers=2", "trainer.epochs=100000"]
        with Job(tmp_path / str(turn), *runs.options(*options)) as job:
            until(lambda: has_checkpoint(job.folder) or job.ended(0), END_SECONDS, job.told)
            job.ended(rng.uniform(0, 0.5))
            assert len(job.members()) >= ranks, job.told()
            begin = time.monotonic()
            send(job.pid, signal.SIGKILL)
            job.require_no_process()
            outcomes.longest("from a kill to the last process's", time.monotonic() - begin)
        outcomes.add("launcher killed: no process was left")

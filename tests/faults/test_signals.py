"""Signals that stop, interrupt or suspend a job, or one of its processes, at random moments."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from dgl_mgpu.train.checkpoint.checkpoint import has_checkpoint
from dgl_mgpu.utils import timeouts
from tests.faults.conftest import Outcomes
from tests.faults.jobs import (
    END_SECONDS,
    Job,
    Runs,
    goes_on,
    is_complete,
    require_checkpoints_load,
    require_same,
    send,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EPOCHS = "trainer.epochs=12"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: str) -> Runs:
    return Runs(tmp_path_factory.mktemp("whole"), data)


def drawn(rng: random.Random) -> tuple[int, list[str], list[str]]:
    """The number of ranks, options that decide what is trained, and others."""
    ranks = rng.choice([1, 2, 2, 3])
    kind = rng.choice([[], [], ["mode=fullgraph"]])
    workers = 0 if kind else rng.choice([0, 2])
    return ranks, [EPOCHS, f"trainer.ranks={ranks}", *kind], [f"sampler.num_workers={workers}"]


def begun(job: Job, rng: random.Random, usual_seconds: float) -> bool:
    """Wait for a random moment of a job that has begun; whether it has not ended until then."""
    until(lambda: job.folder.is_dir() or job.ended(0), END_SECONDS, job.told)
    return not job.ended(rng.uniform(0, 0.8 * usual_seconds))


def targets(job: Job, ranks: int, whom: str, rng: random.Random) -> list[int]:
    """A launcher, a rank, a worker or everyone: those that are there."""
    roles = job.roles(ranks)
    if whom == "everyone":
        return [pid for pids in roles.values() for pid in pids]
    return [rng.choice(roles[whom])] if whom in roles else []


def status(job: Job, seconds: float = END_SECONDS) -> int:
    """As a shell has it."""
    code = job.code(seconds)
    return 128 - code if code < 0 else code


def finish(
    job: Job, expected: Path, options: list[str], outcomes: Outcomes, told: str, place: Path
) -> None:
    """Resume what a job has left, and compare."""
    has_saved = has_checkpoint(place / "run")
    require_checkpoints_load(place / "run")
    if is_complete(place / "run"):
        require_same(place / "run", expected)
        outcomes.add(f"{told}: of no matter, the work was done")
        return
    with Job(place, *goes_on(place / "run", options)) as again:
        assert again.code() == 0, job.told() + again.told()
        again.require_no_process()
        again.require_no_file()
    require_same(place / "run", expected)
    outcomes.add(f"{told}: {'resumed' if has_saved else 'started anew'} to the same bits")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_run_that_is_told_to_stop_goes_on_later(tmp_path, runs, outcomes, rounds, rng, name):
    signum = signal.Signals[name]
    for turn in range(rounds(4, 25)):
        ranks, what, how = drawn(rng)
        expected, seconds = runs.whole(*what)
        options, place = runs.options(*what, *how), tmp_path / str(turn)
        whom = rng.choice(["launcher", "everyone", "rank"])
        with Job(place, *options) as job:
            is_there = begun(job, rng, seconds)
            told = targets(job, ranks, whom, rng) if is_there else []
            begin = time.monotonic()
            for pid in told:
                send(pid, signum)
            code = status(job)
            if told:
                outcomes.longest("from the signal to the end", time.monotonic() - begin)
            job.require_no_process()
            if job.code() >= 0:  # else it was still to listen, and the next run takes it away
                job.require_no_file()
            assert not job.shows_traceback(), job.told()
        if code == 0:
            require_same(place / "run", expected)
            outcomes.add(f"{whom}: of no matter, the work was done" if told else "too late")
            continue
        if whom == "rank" and code == 1:  # which did not listen yet, so that it was killed by it
            error = f"RankFailedError: cannot run rank \\d: it was killed by {name}"
            assert re.search(error, job.errors()), job.told()
        else:
            # A rank tells the launcher that it was told to stop, and not by which signal.
            assert code == 128 + (signal.SIGTERM if whom == "rank" else signum), job.told()
        finish(job, expected, options, outcomes, f"{whom}, status {code}", place)


@pytest.mark.parametrize(("name", "times"), [("SIGINT", 2), ("SIGQUIT", 1)])
def test_a_run_that_is_interrupted_at_once_goes_on_later(
    tmp_path, runs, outcomes, rounds, rng, name, times
):
    signum = signal.Signals[name]
    for turn in range(rounds(3, 20)):
        _, what, how = drawn(rng)
        expected, seconds = runs.whole(*what)
        options, place = runs.options(*what, *how), tmp_path / str(turn)
        with Job(place, *options) as job:
            is_there = begun(job, rng, seconds)
            begin = time.monotonic()
            for time_ in range(times):
                if time_:
                    job.ended(0.4)  # two that are closer are taken for one
                if is_there:
                    send(job.pid, signum)
            code = status(job)
            if is_there:
                outcomes.longest("from the signal to the end", time.monotonic() - begin)
            job.require_no_process()
            assert not job.shows_traceback(), job.told()
        if code == 0:
            require_same(place / "run", expected)
            outcomes.add("of no matter, the work was done" if is_there else "too late")
            continue
        assert code == 128 + signum, job.told()
        if any((place / "run" / "checkpoints").glob("epoch-*.pt")):
            assert "trainer.resume=" in job.errors(), job.told()
        finish(job, expected, options, outcomes, f"status {code}", place)


def test_a_run_that_is_suspended_goes_on(tmp_path, runs, outcomes, rounds, rng):
    for turn in range(rounds(5, 40)):
        ranks, what, how = drawn(rng)
        expected, seconds = runs.whole(*what)
        place, whom = tmp_path / str(turn), rng.choice(["launcher", "rank", "worker", "everyone"])
        with Job(place, *runs.options(*what, *how)) as job:
            told = targets(job, ranks, whom, rng) if begun(job, rng, seconds) else []
            for pid in told:
                send(pid, signal.SIGSTOP)
            time.sleep(rng.uniform(0.5, rounds(2, 6)))
            for pid in told:
                send(pid, signal.SIGCONT)
            assert job.code() == 0, job.told()
            job.require_no_process()
            job.require_no_file()
        require_same(place / "run", expected)
        outcomes.add(f"{whom}: it went on to the same bits" if told else "too late")


def test_a_suspended_rank_does_not_keep_a_run_from_ending(tmp_path, runs, outcomes, rng):
    """It is told to stop and cannot hear it."""
    what = ["trainer.epochs=2000", "trainer.ranks=2"]
    with Job(tmp_path, *runs.options(*what, "sampler.num_workers=2")) as job:
        until(lambda: has_checkpoint(job.folder), END_SECONDS, job.told)
        number = rng.randrange(2)
        suspended = job.roles(2)["rank"][number]
        send(suspended, signal.SIGSTOP)
        send(job.pid, signal.SIGTERM)
        begin = time.monotonic()
        assert job.code(timeouts.STOP + END_SECONDS) == 1, job.told()
        outcomes.longest("from SIGTERM to the end", time.monotonic() - begin)
        # The other one may wait for it, and is then as late.
        assert re.search(r"cannot run rank \d: it ran on for 25 s after SIGTERM", job.errors())
        job.require_no_process()
        job.require_no_file()
    assert require_checkpoints_load(tmp_path / "run")
    outcomes.add("a typed error, and nothing was left")


def test_torchruns_ranks_are_told_to_stop_or_killed(tmp_path, runs, outcomes, rounds, rng):
    """What is promised of them: whole checkpoints, from which a run goes on."""
    what = [EPOCHS, "trainer.ranks=2"]
    expected, _ = runs.whole(*what)
    for turn in range(rounds(1, 12)):
        place = tmp_path / str(turn)
        options = runs.options(*what)
        whom, signum = rng.choice([
            ("launcher", signal.SIGTERM), ("everyone", signal.SIGTERM), ("rank", signal.SIGKILL),
        ])  # fmt: skip
        # So long that the signal comes in time, and so that many epochs are left.
        with Job(
            place,
            *options,
            "trainer.epochs=3000",
            "trainer.keep_checkpoints=3000",
            start="torchrun",
        ) as job:
            until(lambda: has_checkpoint(job.folder), 3 * END_SECONDS, job.told)
            for pid in targets(job, 2, whom, rng):
                send(pid, signum)
            begin = time.monotonic()
            assert status(job, 2 * END_SECONDS) != 0, job.told()
            outcomes.longest("from the signal to the agent's end", time.monotonic() - begin)
            job.require_no_process()
            if signum == signal.SIGTERM:
                assert "stopped by SIGTERM; the last checkpoint is" in job.errors(), job.told()
                left = [path.name for path in job.temporary.glob("dgl-mgpu-*")]
                assert not left, job.told()
            else:
                assert "RankFailedError" in job.errors(), job.told()
        assert require_checkpoints_load(place / "run")
        outcomes.add(f"{whom}, {signum.name}: a checkpoint that loads, and no process was left")
        # From the first of them on: the run is to be as long as the one it is compared with.
        first = min((place / "run" / "checkpoints").glob("epoch-*.pt"))
        if int(first.stem.partition("-")[2]) < 12:
            options.append(f"trainer.resume={first}")
            with Job(place, *options, folder="again") as again:
                assert again.code() == 0, again.told()
                again.require_no_process()
            require_same(place / "again", expected)
            outcomes.add("resumed to the same bits")

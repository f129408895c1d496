"""Jobs that meet: in one run's folder, on one run that is resumed, in one folder of data."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.jobs import (
    END_SECONDS,
    Job,
    Runs,
    processes,
    require_checkpoints_load,
    require_same,
    send,
    until,
)
from tests.train.jobs import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EPOCHS = "trainer.epochs=12"
#: So that to build it takes a while in which others come, and may be killed.
LARGER = ["data.options.num_nodes=3000", "data.options.num_edges=60000", "trainer.epochs=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: str) -> Runs:
    return Runs(tmp_path_factory.mktemp("whole"), data)


def at_once(
    places: list[Path], options: list[str], rng: random.Random, folder: str = "run"
) -> list[Job]:
    """Jobs that start within moments of each other, a folder for each to be in."""
    jobs = []
    for place in places:
        jobs.append(Job(place, *options, folder=folder))
        time.sleep(rng.choice([0, 0, rng.uniform(0, 0.5)]))
    return jobs


def one_wins(jobs: list[Job], refused: str) -> list[str]:
    """See that one ends well and the others are refused, and nothing is left; of what kind."""
    codes = [job.code() for job in jobs]
    told = "\n".join(job.told() for job in jobs)
    assert sorted(codes) == [0] + [1] * (len(jobs) - 1), told
    kinds = []
    for job, code in zip(jobs, codes, strict=True):
        job.require_no_process()
        job.require_no_file()
        if code:
            found = re.search(refused, job.errors())
            assert found, told
            kinds.append(found[0])
    return kinds


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_of_the_jobs_in_a_folder_trains(tmp_path, runs, outcomes, rounds, rng, ranks):
    what = [EPOCHS, f"trainer.ranks={ranks}"]
    expected, _ = runs.whole(*what)
    refused = r"OutputError: .* a job has this folder already, process \d+|InvalidInputError"
    for turn in range(rounds(2, 15)):
        run = tmp_path / str(turn) / "run"
        places = [tmp_path / f"{turn}-{number}" for number in range(rng.choice([2, 3]))]
        jobs = at_once(places, runs.options(*what), rng, str(run))
        try:
            for kind in one_wins(jobs, refused):
                outcomes.add(f"refused: {kind.partition(':')[0]}")
        finally:
            for job in jobs:
                job.clear()
        require_same(run, expected)
        outcomes.add("one trained to the same bits")


def test_a_run_that_is_resumed_twice_at_once(tmp_path, runs, outcomes, rounds, rng):
    """In its own folder one job goes on; in folders of their own all do."""
    for turn in range(rounds(2, 15)):
        what = [EPOCHS, f"trainer.ranks={rng.choice([1, 2])}"]
        expected, _ = runs.whole(*what)
        options, place = runs.options(*what), tmp_path / str(turn)
        with Job(place, *options) as first:
            few = rng.randrange(1, 6)
            until(lambda: _epochs(first.folder) >= few or first.ended(0), END_SECONDS, first.told)  # noqa: B023
            first.clear()
        if not require_checkpoints_load(first.folder) or first.code() == 0:
            outcomes.add("it had no checkpoint, or was done")
            continue
        options.append(f"trainer.resume={first.folder}")
        others = at_once([place / "a", place / "b"], options, rng)
        refused = r"OutputError: .* a job has this folder already|ConfigError: .* epoch 12"
        in_its_own = at_once([place / "c", place / "d"], options, rng, str(first.folder))
        try:
            for job in others:
                # What they go on from may be a file that the others, whose folder it is in, drop.
                code = job.code()
                job.require_no_process()
                job.require_no_file()
                if code == 0:
                    require_same(job.folder, expected)
                    outcomes.add("in a folder of its own: went on to the same bits")
                else:
                    assert re.search(r"(Checkpoint|Config)Error: cannot resume", job.errors()), (
                        job.told()
                    )
                    outcomes.add("in a folder of its own: refused, as the run was done meanwhile")
            for kind in one_wins(in_its_own, refused):
                outcomes.add(f"refused: {kind.partition(':')[0]}")
        finally:
            for job in [*others, *in_its_own]:
                job.clear()
        require_same(first.folder, expected)
        outcomes.add("in the run's own folder: one went on to the same bits")


def _epochs(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def test_many_jobs_build_one_data_set(tmp_path, outcomes, rounds, rng):
    for turn in range(rounds(1, 6)):
        place, root = tmp_path / str(turn), tmp_path / f"{turn}-data"
        options = [*SMALL, f"data.root={root}", *LARGER]
        jobs = at_once([place / str(number) for number in range(rounds(4, 8))], options, rng)
        try:
            for job in jobs:
                assert job.code() == 0, job.told()
                job.require_no_process()
                job.require_no_file()
                require_same(job.folder, jobs[0].folder)
                outcomes.add("trained to the same bits")
        finally:
            for job in jobs:
                job.clear()
        require_nothing_begun(root)


def test_a_job_that_builds_data_is_killed(tmp_path, outcomes, rounds, rng):
    for turn in range(rounds(3, 20)):
        place, root = tmp_path / str(turn), tmp_path / f"{turn}-data"
        options = [*SMALL, f"data.root={root}", *LARGER, f"trainer.ranks={rng.choice([1, 2])}"]
        jobs = at_once([place / str(number) for number in range(3)], options, rng)
        try:
            time.sleep(rng.uniform(0, 0.5))
            killed = kill_builder(jobs, root)
            for job in jobs:
                code = job.code()
                job.require_no_process()
                if job is killed:
                    outcomes.add("killed while it built")
                else:
                    assert code == 0, job.told()
                    job.require_no_file()
                    outcomes.add("its data were built by another job, and it trained")
        finally:
            for job in jobs:
                job.clear()
        require_nothing_begun(root)
        others = [job.folder for job in jobs if job is not killed]
        for folder in others[1:]:
            require_same(folder, others[0])


def kill_builder(jobs: list[Job], root: Path) -> Job | None:
    """Kill all of the job that builds data; None if none does until all have ended."""
    while any(not job.ended(0) for job in jobs):
        for lock in root.rglob(".*.lock"):
            builder = 0
            with contextlib.suppress(OSError, ValueError, IndexError):
                builder = int(lock.read_text().split()[1])
            session = next((each.session for each in processes() if each.pid == builder), 0)
            for job in jobs:
                if job.pid == session:
                    os.kill(builder, signal.SIGKILL)
                    for each in job.members():
                        send(each.pid, signal.SIGKILL)
                    return job
    return None


def require_nothing_begun(root: Path) -> None:
    """See that there is neither a lock nor a part of what was to be built."""
    left = [path for path in root.rglob("*") if path.suffix in (".partial", ".lock")]
    assert not left

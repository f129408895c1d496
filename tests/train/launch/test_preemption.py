"""SIGTERM: a checkpoint, also in the middle of an epoch, from which the run goes on."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing as mp
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.data import load
from dgl_mgpu.errors import CheckpointError, RankFailedError
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.launch.preemption import PreemptionHandler, Stopped, blocked, outlive_sigterm
from dgl_mgpu.utils import timeouts
from tests.train.jobs import (
    SMALL,
    at_step,
    equal_states,
    reports_of,
    shared_memory,
    sigterm,
    start_command,
    train,
    until,
)

pytestmark = pytest.mark.usefixtures("forked_ranks")

# About 360 training nodes in batches of 64: 6 steps on one rank, 3 on two.
STEPS = {1: 6, 2: 3, 3: 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("data")
    assert 320 < len(load("generated", str(root), num_nodes=600, num_edges=4000).train) <= 384
    return f"data.root={root}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """Runs that nothing stops, by their ranks and options."""
    made: dict[tuple, Path] = {}

    def run(num_ranks: int, *options: str) -> Path:
        key = num_ranks, options
        if key not in made:
            made[key] = train(tmp_path_factory.mktemp("whole"), num_ranks, data, *options)
        return made[key]

    return run


def stop(folder: Path, num_ranks: int, *options: str, step: int) -> Checkpoint:
    """The checkpoint of a run whose last rank hears SIGTERM in one of its steps."""
    with pytest.raises(Stopped) as stopped:
        train(folder, num_ranks, *options, hook=partial(at_step, step, num_ranks - 1, sigterm))
    assert stopped.value.code == 143
    return Checkpoint.load(folder)


@pytest.mark.parametrize(
    ("num_ranks", "step", "workers", "epoch", "steps"),
    [
        (1, 9, 1, 1, 3),
        (1, 12, 0, 1, 6),  # the last of its epoch: validation is yet to come
        (2, 4, 1, 1, 2),  # the others hear of it a step later
        (3, 1, 1, 0, 2),  # the order of additions shows from three ranks on
    ],
)
def test_a_run_goes_on_where_it_stopped(
    tmp_path, data, whole, num_ranks, step, workers, epoch, steps
):
    options = [f"sampler.num_workers={workers}"]
    state = stop(tmp_path / "stopped", num_ranks, data, *options, step=step)
    assert (state.epoch, state.batches) == (epoch, steps * num_ranks)
    assert [report.epoch for report in reports_of(tmp_path / "stopped")] == [*range(1, epoch + 1)]
    options.append(f"trainer.resume={tmp_path / 'stopped'}")
    again = train(tmp_path / "again", num_ranks, data, *options)
    expected = whole(num_ranks)
    assert equal_states(Checkpoint.load(again).model, Checkpoint.load(expected).model)
    for ours, theirs in zip(reports_of(again), reports_of(expected), strict=True):
        assert dataclasses.replace(ours, seconds=theirs.seconds) == theirs


def test_a_run_goes_on_in_its_own_folder(tmp_path, data, whole):
    stop(tmp_path, 1, data, step=8)
    again = train(tmp_path, 1, data, f"trainer.resume={tmp_path}")
    assert equal_states(Checkpoint.load(again).model, Checkpoint.load(whole(1)).model)
    assert [report.epoch for report in reports_of(again)] == [1, 2, 3]


@pytest.mark.parametrize(("before", "after"), [(3, 1), (2, 3)])
def test_another_number_of_ranks_goes_on_with_the_batches_that_are_left(
    tmp_path, data, whole, before, after
):
    state = stop(tmp_path / "stopped", before, data, step=1)
    assert 0 < state.batches <= before * STEPS[before]
    assert len(state.parts) == before
    resume = f"trainer.resume={tmp_path / 'stopped'}"
    reports = reports_of(train(tmp_path / "again", after, data, resume))
    seeds = reports_of(whole(1))[0].seeds
    assert [report.seeds for report in reports] == [seeds] * 3
    left = max(0, STEPS[1] - state.batches)  # a batch is a step of one rank
    done = state.batches // before
    assert [report.steps for report in reports] == [
        done + math.ceil(left / after),
        *[STEPS[after]] * 2,
    ]
    # Also what was read is that of every batch once: samples do not depend on ranks.
    labels = [report.tier_rows("label") for report in reports]
    assert [sum(rows.values()) for rows in labels] == [seeds] * 3


@pytest.mark.parametrize(("before", "after"), [("true", "false"), ("false", "true")])
def test_an_epoch_goes_on_with_steps_of_another_kind(tmp_path, data, before, after):
    """Also on a rank that did not begin it: what it has no time of is no stage of its own."""
    stop(tmp_path / "stopped", 1, data, f"trainer.cuda_graphs={before}", step=8)
    folder = train(
        tmp_path / "again", 2, data, f"trainer.cuda_graphs={after}",
        f"trainer.resume={tmp_path / 'stopped'}",
    )  # fmt: skip
    _, second, third = (report.seconds for report in reports_of(folder))
    assert second.compute > 0 and second.forward > 0 and second.backward > 0
    assert (third.compute is None) == (after == "false") != (third.forward is None)


@pytest.mark.parametrize(("num_ranks", "after"), [(2, 2), (2, 1)])
def test_a_full_graph_stops_after_an_epoch(tmp_path, data, whole, num_ranks, after):
    options = [data, "mode=fullgraph", "model=gcn", "model.dropout=0.0", "trainer.epochs=5"]
    state = stop(tmp_path / "stopped", num_ranks, *options, step=2)
    assert (state.epoch, state.batches) == (2, 0)
    resume = f"trainer.resume={tmp_path / 'stopped'}"
    again = train(tmp_path / "again", after, *options, resume)
    expected = whole(num_ranks, *options[1:])
    found, losses = ([r.loss for r in reports_of(f)] for f in (again, expected))
    assert found == (losses if num_ranks == after else pytest.approx(losses, rel=1e-5))
    if num_ranks == after:
        assert equal_states(Checkpoint.load(again).model, Checkpoint.load(expected).model)


def test_sigterm_in_the_last_epoch_of_a_full_graph_lets_it_end(tmp_path, data):
    options = [data, "mode=fullgraph", "trainer.epochs=2"]
    train(tmp_path, 1, *options, hook=partial(at_step, 2, 0, sigterm))
    assert len(reports_of(tmp_path)) == Checkpoint.load(tmp_path).epoch == 2


def _ends_before_others(folder: Path) -> None:
    if _everyone().rank == 1:
        return
    with PreemptionHandler(Communicator()).listening() as request:
        (folder / "listens").touch()
        while not request.after_step():
            time.sleep(0.01)
    raise Stopped


def test_a_rank_that_was_done_before_is_no_failure(tmp_path):
    def send() -> None:
        until(lambda: (tmp_path / "listens").exists())
        time.sleep(0.5)  # the other's word has been heard meanwhile
        sigterm()

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(Stopped):
        launch(_ends_before_others, 2, tmp_path)
    sender.join()


def _cannot_write(folder: Path) -> None:
    with PreemptionHandler(_everyone()).listening() as request:
        (folder / str(os.getpid())).touch()
        while not request.after_step():
            time.sleep(0.01)
        _everyone().broadcast_from_rank0("write a checkpoint", _full_disk)
        raise Stopped


def _everyone():
    from dgl_mgpu.comm.communicator import Communicator

    return Communicator.of_all_machines()


def _full_disk() -> None:
    raise CheckpointError("write it", "no space", "free some")


def test_a_checkpoint_that_fails_on_the_way_out_is_what_is_raised(tmp_path):
    def send() -> None:
        until(lambda: len(os.listdir(tmp_path)) == 2)
        sigterm()

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=send).start()
    with pytest.raises(CheckpointError, match="no space"):
        launch(_cannot_write, 2, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


def _keeps(folder: Path) -> None:
    rank = _everyone().rank
    with PreemptionHandler(_everyone()).listening() as request:
        (folder / f"runs-{os.getpid()}").touch()
        while not request.after_step():
            time.sleep(0.01)
        (folder / f"stops-{rank}").touch()
        until((folder / "all-told-again").exists)
        (folder / f"kept-{rank}").touch()
        raise Stopped


def test_all_processes_may_be_told_again_while_they_stop(tmp_path):
    def send() -> None:
        until(lambda: len(list(tmp_path.glob("runs-*"))) == 2)
        sigterm()
        until(lambda: len(list(tmp_path.glob("stops-*"))) == 2)
        for told in tmp_path.glob("runs-*"):
            os.kill(int(told.name.partition("-")[2]), signal.SIGTERM)
        sigterm()
        (tmp_path / "all-told-again").touch()

    threading.Thread(target=send).start()
    with pytest.raises(Stopped):
        launch(_keeps, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("kept-*")) == ["kept-0", "kept-1"]


def test_a_single_rank_may_be_told_again(tmp_path, data):
    def again(signum: int, frame: object) -> None:
        raise AssertionError("it was to be kept from the handler before")

    def twice() -> None:
        sigterm()
        sigterm()

    before = signal.signal(signal.SIGTERM, again)
    try:
        with pytest.raises(Stopped):
            train(tmp_path, 1, data, hook=partial(at_step, 2, 0, twice))
        assert signal.getsignal(signal.SIGTERM) is again
    finally:
        signal.signal(signal.SIGTERM, before)
    assert Checkpoint.load(tmp_path).batches == 2


def _one_does_not_stop(folder: Path, end: Callable[[], None]) -> None:
    with PreemptionHandler(_everyone()).listening() as request:
        (folder / str(os.getpid())).touch()
        while not request.after_step():
            time.sleep(0.01)
    if _everyone().rank == 1:
        end()
    raise Stopped


def _is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leaves() -> None:
    os._exit(3)


def _goes_on() -> None:
    time.sleep(300)


@pytest.mark.parametrize(
    ("end", "found"),
    [
        (_is_killed, "it was killed by SIGKILL"),
        (_leaves, "it left before its work was done, with exit code 3"),
        (_goes_on, "it ran on for 2 s after SIGTERM"),
    ],
)
def test_a_rank_that_did_not_stop_well_is_told_of(tmp_path, monkeypatch, end, found):
    def send() -> None:
        until(lambda: len(os.listdir(tmp_path)) == 2)
        sigterm()

    monkeypatch.setattr(timeouts, "STOP", 2.0)
    threading.Thread(target=send).start()
    with pytest.raises(RankFailedError, match=f"run rank 1: {found}"):
        launch(_one_does_not_stop, 2, tmp_path, end)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sigterm_to_all_processes_leaves_workers_to_their_rank(tmp_path, data, num_ranks):
    folder = tmp_path / "run"
    options = [
        f"trainer.ranks={num_ranks}", "sampler.num_workers=2",
        "trainer.epochs=100000", "trainer.eval_every=100000",  # whose workers come and go
    ]  # fmt: skip
    run = start_command(folder, *SMALL, data, *options)
    until((folder / "checkpoints").is_dir)
    children = psutil.Process(run.pid).children(recursive=True)
    for process in [*reversed(children), run]:  # workers first
        process.terminate()
    run.join()
    assert (run.exitcode, (folder / "errors").read_text()) == (143, "")
    assert len(reports_of(folder)) == Checkpoint.load(folder).epoch
    until(lambda: not any(child.is_running() for child in children))


def _works(rank: Connection) -> None:
    outlive_sigterm(os.getppid(), 0)
    while True:
        rank.send("at work")
        rank.recv()


def test_a_worker_ends_when_its_own_rank_tells_it():
    rank, end = mp.Pipe()
    worker = mp.get_context("fork").Process(target=_works, args=(end,), daemon=True)
    with blocked(signal.SIGTERM):
        worker.start()
    end.close()
    assert rank.recv() == "at work"
    subprocess.run(["kill", str(worker.pid)], check=True)
    rank.send("another batch")
    assert rank.recv() == "at work"

    def is_told() -> bool:
        # Where the other one was not heard yet, both are one signal, and that is the other's.
        worker.terminate()
        worker.join(0.1)
        return not worker.is_alive()

    until(is_told)
    assert worker.exitcode == 0


def _begins_without_its_rank(rank: int) -> None:
    outlive_sigterm(rank, 0)
    time.sleep(300)


def test_a_worker_whose_rank_was_killed_before_it_began_ends():
    """torch's own look at who its parent is, and take whoever that is for the rank."""
    with blocked(signal.SIGTERM):
        worker = mp.get_context("fork").Process(
            target=_begins_without_its_rank, args=(os.getppid(),), daemon=True
        )
        worker.start()
    worker.join(60)
    assert worker.exitcode == 0


def test_the_launcher_passes_sigterm_on(tmp_path, data):
    shared, folder = shared_memory(), tmp_path / "run"
    options = ["trainer.epochs=100000", "trainer.ranks=2", "sampler.num_workers=1"]
    run = start_command(folder, *SMALL, data, *options)
    until((folder / "checkpoints").is_dir)
    children = psutil.Process(run.pid).children(recursive=True)
    run.terminate()
    run.join()
    errors = (folder / "errors").read_text()
    assert (run.exitcode, errors) == (143, "")
    assert "stopped by SIGTERM" in (folder / "shown").read_text()
    until(lambda: not any(child.is_running() for child in children))
    left = shared_memory() - shared  # also of tests that run at the same time
    until(lambda: not left & shared_memory())
    state = Checkpoint.load(folder)
    assert {path.suffix for path in (folder / "checkpoints").iterdir()} == {".pt"}
    assert len(reports_of(folder)) == state.epoch

"""Jobs in which nothing advances: they end, and say which rank the others wait for."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import ConfigError, RankFailedError
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.launch import hangs
from dgl_mgpu.train.launch import launch as launching
from dgl_mgpu.train.launch.hangs import HangMonitor, HangWatch, Heartbeats
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.trainer import Trainer
from dgl_mgpu.utils.stages import WHOLE_GRAPH, StageTracker, stage
from tests.environment import search_path
from tests.train.jobs import SMALL, at_step, reports_of, torchrun, train, until

# More than any stage takes on a busy machine whose kernels are compiled.
HANG_AFTER = 10.0
STAGE = "in stage update(?: of whole graph)?"
HANGS = rf"it hangs {STAGE}, at \S+test_hangs.py:\d+"
pytestmark = pytest.mark.usefixtures("forked_ranks", "compiled")


@pytest.fixture(scope="module")
def compiled(data, tmp_path_factory) -> None:
    """What ranks run is compiled, and kept on disk."""
    folder = tmp_path_factory.mktemp("compiled")
    train(folder / "minibatch", 1, data, "trainer.epochs=1")
    train(folder / "fullgraph", 1, data, "mode=fullgraph", "model=gcn", "trainer.epochs=1")


def sleeps_forever() -> None:
    time.sleep(10_000)


def computes_forever() -> None:
    while True:
        pass


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)  # SIGCONT, which has it say where it is, is not to have it end first


def worker_is_stopped() -> None:
    psutil.Process().children()[0].suspend()


@pytest.mark.parametrize(
    ("act", "how"),
    [
        (sleeps_forever, f"{HANGS} in sleeps_forever"),
        pytest.param(computes_forever, f"{HANGS} in computes_forever", marks=pytest.mark.slow),
        (is_stopped, rf"it is stopped \(by SIGSTOP or a debugger\) {STAGE}, at \S+"),
    ],
)
@pytest.mark.parametrize("mode", ["minibatch", pytest.param("fullgraph", marks=pytest.mark.slow)])
def test_the_rank_that_others_wait_for_is_named(data, tmp_path, mode, act, how):
    if mode == "fullgraph" and act is computes_forever:
        pytest.skip("a step of a whole graph on CPUs may take any time")
    model = ["model=gcn"] if mode == "fullgraph" else []
    with pytest.raises(RankFailedError, match=f"cannot run rank 1: nothing has advanced.*: {how}"):
        train(
            tmp_path / "run", 3, data, f"mode={mode}", *model, "trainer.epochs=100",
            f"trainer.hang_after={HANG_AFTER}", hook=partial(_noted, tmp_path, act),
        )  # fmt: skip
    assert len(list(tmp_path.glob("*.pid"))) == 3
    assert not any(psutil.pid_exists(int(file.stem)) for file in tmp_path.glob("*.pid"))


def _noted(folder: Path, act: Callable[[], None], trainer: Trainer) -> None:
    (folder / f"{os.getpid()}.pid").touch()
    at_step(2, 1, act, trainer)


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_named(data, tmp_path):
    reason = r"run rank 1: .*its DataLoader worker \(process \d+\) is stopped .* in stage load"
    with pytest.raises(RankFailedError, match=reason):
        train(
            tmp_path / "run", 2, data, "sampler.num_workers=1", "trainer.epochs=100",
            f"trainer.hang_after={HANG_AFTER}", hook=partial(at_step, 2, 1, worker_is_stopped),
        )  # fmt: skip


@pytest.mark.slow
def test_restarts_go_on_after_a_hang(data, tmp_path):
    process, output = _command(tmp_path, data, "trainer.ranks=2", "trainer.max_restarts=1")
    assert process.returncode == 0, output
    assert "nothing has advanced" in output
    assert "restart 1 of 1" in output
    assert [report.epoch for report in reports_of(tmp_path / "run")] == [1, 2, 3]


def _command(folder: Path, *overrides: str) -> tuple[subprocess.Popen, str]:
    """A run, one of whose ranks hangs once in its second epoch; its process, and what it said."""
    (folder / "script.py").write_text(SCRIPT)
    command = [
        sys.executable, str(folder / "script.py"), *SMALL, *overrides,
        f"trainer.hang_after={HANG_AFTER}", f"hydra.run.dir={folder / 'run'}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": search_path(), "ONCE": str(folder / "once")}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    return process, process.communicate()[0]


SCRIPT = """
import os, sys, time
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_pre_hook
from dgl_mgpu.cli import main

def hang(optimizer, *arguments):
    optimizer.steps = getattr(optimizer, "steps", 0) + 1
    once = Path(os.environ["ONCE"])
    if optimizer.steps == 5 and not once.exists():
        once.touch()
        time.sleep(10_000)

register_optimizer_step_pre_hook(hang)
if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_only_rank_ends_its_process_and_its_workers(data, tmp_path, workers):
    process, output = _command(tmp_path, data, f"sampler.num_workers={workers}")
    assert process.returncode == 1
    assert "RankFailedError: cannot run rank 0: nothing has advanced for 10 s" in output
    assert re.search(r"it hangs in stage update, at \S+script.py:\d+ in hang", output)
    until(lambda: not any(os.getpgid(each.pid) == process.pid for each in psutil.process_iter()))


def test_under_torchrun_the_rank_is_named_and_all_end(data, tmp_path):
    ends = torchrun(
        tmp_path / "run", 3, data, "trainer.epochs=100", f"trainer.hang_after={HANG_AFTER}",
        hook=partial(at_step, 2, 2, sleeps_forever),
    )  # fmt: skip
    assert len(ends) == 3
    logs = "".join(p.read_text() for p in (tmp_path / "run" / "logs").rglob("error.json"))
    assert "cannot run rank 2: nothing has advanced" in logs
    assert "sleeps_forever" in logs


BUILDS = """
import time
from dgl_mgpu.utils.stages import stage
from dgl_mgpu.train.launch.launch import launch

def builds_forever():
    with stage("build"):
        time.sleep(10_000)

launch(builds_forever, 1, hang_after=4.0)
"""


def test_the_only_rank_may_hang_in_a_stage_of_any_length(tmp_path):
    # What the thread that looks reads itself is no advance.
    (tmp_path / "script.py").write_text(BUILDS)
    environment = {**os.environ, "PYTHONPATH": search_path()}
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env=environment, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    where = r"it hangs in stage build, at \S+script.py:\d+ in builds_forever"
    assert re.search(where, ended.stderr)


def test_under_torchrun_a_rank_may_hang_in_a_stage_of_any_length(data, tmp_path):
    torchrun(
        tmp_path / "run", 2, data, f"trainer.hang_after={HANG_AFTER}",
        hook=partial(_on_rank, 1, sleeps_forever),
    )  # fmt: skip
    logs = "".join(p.read_text() for p in (tmp_path / "run" / "logs").rglob("error.json"))
    assert re.search(r"cannot run rank 1: nothing has advanced.* in stage build", logs)
    assert "sleeps_forever" in logs


def _on_rank(rank: int, act: Callable[[], None], trainer: Trainer) -> None:
    """Hook: call ``act`` on one rank while its trainer is being made."""
    if dist.get_rank() == rank:
        act()


class _Clock:
    """Time that passes as a test says."""

    def __init__(self, monitor: HangMonitor) -> None:
        self._monitor, self.now = monitor, monitor._looked

    def monotonic(self) -> float:
        self.now += 1e-3
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def look(self, *, after: float = 1.0, times: int = 1) -> list[str]:
        """The errors of looks, each so many seconds after the one before."""
        found = []
        for _ in range(times):
            self.now += after
            found.append(self._monitor.look())
        return [str(each) for each in found if each is not None]


@pytest.fixture
def shown():
    heartbeat = Heartbeats(1).ranks[0]
    with StageTracker(heartbeat):
        yield heartbeat


@pytest.fixture
def clock(shown, monkeypatch) -> _Clock:
    """That of a monitor that takes ten seconds for a hang."""
    made = _Clock(HangMonitor([shown], hang_after=10))
    monkeypatch.setattr(hangs, "time", made)
    return made


def test_a_job_that_was_suspended_itself_does_not_hang(clock):
    with stage("forward"):
        assert clock.look(times=5) == []
        # One late look, whatever its delay, counts as two seconds.
        assert clock.look(after=3600) == []
        assert clock.look(times=2) == []
        error = clock.look(times=3)[-1]
    assert "in stage forward" in error


def test_stages_of_any_length_advance_by_what_a_rank_does(clock, monkeypatch):
    work = [0.0, ""]
    monkeypatch.setattr(hangs, "_work_of", lambda *process: tuple(work))
    with stage("build"):
        for _ in range(20):
            work[0] += 0.5
            assert clock.look() == []
        for number in range(20):
            work[1] = f"{number} bytes read"
            assert clock.look() == []
        assert clock.look(times=8) == []
        error = clock.look(times=2)[-1]
        assert "in stage build" in error


def test_a_whole_graph_on_cpus_takes_the_time_that_it_takes(clock, monkeypatch):
    work = [0.0, ""]
    monkeypatch.setattr(hangs, "_work_of", lambda rank: tuple(work))
    for around in (contextlib.nullcontext(), stage("evaluate")):
        with around, stage(WHOLE_GRAPH), stage("forward"):
            for _ in range(30):
                work[0] += 1.0
                assert clock.look() == []
            assert "of whole graph" in clock.look(times=11)[-1]


def test_in_a_step_work_alone_is_no_advance(clock, monkeypatch):
    work = [0.0, ""]
    monkeypatch.setattr(hangs, "_work_of", lambda *process: tuple(work))
    with stage("forward"):
        for _ in range(10):
            work[0] += 1.0
            assert clock.look() == []
        work[0] += 1.0
        (error,) = clock.look()
        assert "in stage forward" in error


def test_stages_within_stages_and_those_of_threads_are_advances(clock):
    with stage("evaluate"):
        for _ in range(20):
            with stage("gather"):
                assert clock.look() == []
        for _ in range(20):
            thread = threading.Thread(target=stage("sample").__enter__)
            thread.start()
            thread.join()
            assert clock.look() == []


def test_a_rank_that_is_done_is_not_named(shown, monkeypatch):
    done = Heartbeats(1).ranks[0]
    ended = subprocess.Popen(["true"])
    until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
    done.process, done.in_step = ended.pid, True
    clock = _Clock(HangMonitor([done, shown], hang_after=10))
    monkeypatch.setattr(hangs, "time", clock)
    with stage("forward"):
        error = clock.look(times=12)[0]
    ended.wait()
    assert "run rank 1: nothing has advanced" in error
    assert "rank 0" not in error


def test_a_rank_that_has_not_begun_does_not_advance():
    assert hangs._work_of(Heartbeats(1).ranks[0]) == (0.0, "")


@pytest.mark.parametrize("name", ["build", "checkpoint", "report"])
def test_what_the_watch_itself_reads_is_no_advance_of_its_rank(shown, name):
    found: list[RankFailedError] = []
    ended = threading.Event()

    def end(error: RankFailedError) -> None:
        found.append(error)
        ended.set()

    with stage(name), HangWatch(HangMonitor([shown], hang_after=3), shown, end):
        assert ended.wait(60)
    assert f"it hangs in stage {name}" in str(found[0])


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "abc"])
def test_what_is_no_number_of_seconds_is_refused(value):
    with pytest.raises(ConfigError, match=r"trainer\.hang_after"):
        compose([f"trainer.hang_after={value}"])


def _wait_for_each_other() -> None:
    with stage("forward"):
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            dist.recv(torch.zeros(1), src=0)


def test_ranks_that_wait_for_each_other_are_told_of_all():
    with pytest.raises(RankFailedError, match=r"run rank 0 and 1: .*all ranks wait for each other"):
        launch(_wait_for_each_other, 2, hang_after=HANG_AFTER)


def _hangs_while_others_wait() -> None:
    with stage("checkpoint"):
        Communicator.of_all_machines().broadcast_from_rank0("write a checkpoint", sleeps_forever)


def test_who_hangs_in_what_others_wait_for_does_not_wait_itself():
    reason = r"run rank 0: .*it hangs in stage checkpoint, at .*sleeps_forever.*; rank 1 waits"
    with pytest.raises(RankFailedError, match=reason):
        launch(_hangs_while_others_wait, 2, hang_after=3)


def _second_does_not_join(work: Callable, rank: int, *job: object) -> None:
    if rank == 1:
        launching._join_job = lambda *job: sleeps_forever()  # in this process alone
    launching._rank_main(work, rank, *job)


def test_a_rank_that_does_not_join_is_named(monkeypatch):
    monkeypatch.setattr(launching, "_rank_main", _second_does_not_join)
    with pytest.raises(RankFailedError, match=r"run rank 1: .* sleeps_forever.*; rank 0 waits"):
        launch(sleeps_forever, 2, hang_after=3)


def _waits_within_a_loader(how: Callable[[list], None]) -> None:
    with stage("load"):
        if dist.get_rank() == 0:
            next(iter(DataLoader([0], collate_fn=how)))
        else:
            sleeps_forever()


def _meets(batch: list) -> None:
    dist.barrier()


def test_who_waits_for_others_within_a_loader_does_not_hang():
    with pytest.raises(RankFailedError, match=r"run rank 1: .*; rank 0 waits in stage load"):
        launch(_waits_within_a_loader, 2, _meets, hang_after=3)


class _Silent(Dataset):
    """Waits for what nobody sends."""

    def __getitem__(self, item: int) -> int:
        return mp.Queue().get()

    def __len__(self) -> int:
        return 1


def _loads_from_a_silent_set() -> None:
    with stage("load"):
        next(iter(DataLoader(_Silent(), num_workers=1)))


def test_a_worker_that_waits_in_a_data_set_is_not_idle():
    with pytest.raises(RankFailedError, match=r"its DataLoader worker \(process \d+\) hangs"):
        launch(_loads_from_a_silent_set, 2, hang_after=3)


def _waits_for_no_rank(act: Callable[[], None]) -> None:
    act()


@pytest.mark.slow
def test_without_a_limit_nothing_is_ended():
    launch(_waits_for_no_rank, 2, partial(time.sleep, 2 * HANG_AFTER), hang_after=None)

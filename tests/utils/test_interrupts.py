"""Ctrl-C ends a process whatever its main thread is at."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.utils import interrupts, timeouts
from dgl_mgpu.utils.interrupts import Interrupts, StopSignals
from tests.train.jobs import SMALL, until

#: How many commands are interrupted, each at a moment of its own; more than a few take minutes.
MOMENTS = int(os.environ.get("DGL_MGPU_TEST_MOMENTS", 1))


def waiting(waits: str, limit: float) -> subprocess.Popen:
    """A process that waits, and hears signals."""
    code = (
        "import ctypes, os, sys, time\n"
        "from dgl_mgpu.utils import timeouts\n"
        "from dgl_mgpu.utils.interrupts import Interrupts, StopSignals\n"
        f"timeouts.INTERRUPT = {limit}\n"
        "with Interrupts(lambda signum: f'last words of {signum}'):\n"
        f"{waits}"
    )
    process = listening(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    return process


def interrupted(waits: str, limit: float, times: int | None = 1) -> tuple[int, str]:
    """The exit status and the errors of a process that is interrupted while it waits."""
    process = waiting(waits, limit)
    while times is None or times > 0:
        process.send_signal(signal.SIGINT)
        if times is not None:
            times -= 1
        elif process.poll() is not None:
            break
        time.sleep(0.5)
    _, errors = process.communicate()
    return process.returncode, errors


def listening(*command: str, **options) -> subprocess.Popen:
    """A process that hears SIGINT, also where this one ignores it, as one in the background."""
    heard = {signal.SIGINT: signal.default_int_handler}
    heard |= dict.fromkeys((signal.SIGQUIT, signal.SIGHUP), signal.SIG_DFL)
    before = {each: signal.signal(each, handler) for each, handler in heard.items()}
    options = {"stderr": subprocess.PIPE, **options}
    try:
        return subprocess.Popen(command, text=True, start_new_session=True, **options)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# A mutex that is locked twice: no signal makes that return.
IN_C = (
    "    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
    "    lock(mutex)\n"
    "    try:\n"
    "        print('waits', flush=True)\n"
    "        lock(mutex)\n"
    "    except KeyboardInterrupt:  # before it waits\n"
    "        lock(mutex)\n"
)
# What is raised here, Python prints and drops; then the main thread goes on.
IN_A_CALLBACK = (
    "    import weakref\n"
    "    class It: pass\n"
    "    def gone(_):\n"
    "        print('waits', flush=True)\n"
    "        time.sleep(1000)\n"
    "    it = It()\n"
    "    reference = weakref.ref(it, gone)\n"
    "    del it\n"
    "    while True:\n"
    "        try:\n"
    "            time.sleep(1000)\n"
    "        except KeyboardInterrupt:\n"
    "            pass\n"
)


@pytest.mark.parametrize("waits", [IN_C, IN_A_CALLBACK])
def test_the_first_ends_a_process_that_does_not_end_by_itself(waits):
    status, errors = interrupted(waits, limit=0.2)
    assert status == 130
    assert errors.endswith("last words of 2\n")


@pytest.mark.parametrize("waits", [IN_C, IN_A_CALLBACK])
def test_a_second_ends_a_process_at_once(waits):
    status, errors = interrupted(waits, limit=1000, times=None)
    assert status == 130
    assert errors.endswith("last words of 2\n")


# Stops when it is told to, which takes for ever.
STOPS = (
    "    with StopSignals() as signals:\n"
    "        print('waits', flush=True)\n"
    "        while signals.first is None:\n"
    "            time.sleep(0.01)\n"
    "        time.sleep(0.5)\n"
    "        print('stops', flush=True)\n"
    "        time.sleep(1000)\n"
)


def test_what_stops_has_its_time_and_a_second_ends_it_at_once():
    process = waiting(STOPS, limit=0.1)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stops\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "last words of 2\n")


@pytest.mark.parametrize("waits", [IN_C, STOPS])
def test_sigquit_ends_a_process_and_says_so(waits):
    process = waiting(waits, limit=1000)
    process.send_signal(signal.SIGQUIT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (131, "last words of 3\n")


def test_a_second_is_told_of_where_nothing_else_hears_it(monkeypatch):
    monkeypatch.setattr(interrupts, "_ECHO_SECONDS", -1.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopSignals() as signals:
            for told in (signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), told)
            assert (signals.first, signals.again) == (signal.SIGTERM, False)
            os.kill(os.getpid(), signal.SIGINT)
            assert (signals.first, signals.again) == (signal.SIGTERM, True)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_raises_where_python_can():
    said = []
    descriptors = set(os.listdir("/proc/self/fd"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Interrupts(said.append) as hearing:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        assert hearing.heard
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.set_wakeup_fd(-1) == -1
    assert not any(thread.name == "interrupts" for thread in threading.enumerate())
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert said == []


def test_what_ignores_it_goes_on_ignoring_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts(str) as hearing:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert not hearing.heard


def test_a_forked_process_does_not_tell_of_its_own(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(timeouts, "INTERRUPT", 0.0)  # it would end this process
    try:
        with Interrupts(str) as hearing:
            child = os.fork()
            if not child:
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                except KeyboardInterrupt:
                    os._exit(7)
                os._exit(0)
            _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert not hearing.heard
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return f"data.root={tmp_path_factory.mktemp('data')}"


def train(folder: Path, *overrides: str, **options) -> subprocess.Popen:
    return listening(
        sys.executable, "-m", "dgl_mgpu.cli", "train", *SMALL, *overrides,
        "trainer.epochs=1000000", f"hydra.run.dir={folder}",
        cwd=folder.parent, **{"stdout": subprocess.PIPE, **options},
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_command_ends_at_any_moment_without_a_traceback(tmp_path, data, ranks, moment):
    run = train(tmp_path / "run", data, f"trainer.ranks={ranks}")
    # Before, it is Python that starts, or a few modules that are imported.
    until((tmp_path / "run" / ".hydra" / "overrides.yaml").exists)
    time.sleep(random.Random(f"{ranks} {moment}").uniform(0, 10))
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    shown, errors = run.communicate()
    assert run.returncode == 130
    # One that had begun to train, or to start ranks, has stopped.
    stopped = "stopped by SIGINT" in shown
    assert errors.count("\n") == (0 if stopped else 1), errors
    assert stopped or errors.startswith("dgl-mgpu train: interrupted")


#: An epoch of it takes long.
LONG = ["data.options.num_nodes=60000", "trainer.batch_size=4"]


def told_of(how: signal.Signals) -> str:
    return (
        f"stopped by {how.name}; the last checkpoint is run/checkpoints/epoch-0000.pt: "
        "dgl-mgpu train trainer.resume=run goes on from there\n"
    )


@pytest.mark.parametrize(
    ("ranks", "how"),
    [pytest.param(2, signal.SIGINT, marks=pytest.mark.slow), (1, signal.SIGINT)],
)
def test_ctrl_c_leaves_a_checkpoint_and_names_it(tmp_path, data, ranks, how):
    """Also within an epoch."""
    folder = tmp_path / "run"
    run = train(folder, data, f"trainer.ranks={ranks}", "sampler.num_workers=1", *LONG)
    until((folder / "metrics.jsonl").exists)  # it is in the first epoch
    os.killpg(run.pid, how)
    shown, errors = run.communicate()
    assert (run.returncode, errors) == (128 + how, "")
    last = folder / "checkpoints" / "epoch-0000.pt"
    assert Checkpoint.load(last).batches > 0
    assert told_of(how) in shown and told_of(how) in (folder / "cli.log").read_text()


@pytest.mark.slow
def test_a_terminal_that_is_closed_costs_a_run_nothing(tmp_path, data):
    """It sends SIGHUP, and what is written to it fails."""
    folder = tmp_path / "run"
    master, terminal = pty.openpty()
    run = train(
        folder, data, "trainer.ranks=2", *LONG,
        stdin=terminal, stdout=terminal, stderr=terminal,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    until((folder / "metrics.jsonl").exists)
    os.close(master)
    assert run.wait() == 129
    assert Checkpoint.load(folder / "checkpoints" / "epoch-0000.pt").batches > 0
    assert told_of(signal.SIGHUP) in (folder / "cli.log").read_text()

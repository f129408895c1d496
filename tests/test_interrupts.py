"""Ctrl-C ends a process whatever its main thread is at."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dgl_mgpu import limits
from dgl_mgpu.interrupts import Interrupts
from dgl_mgpu.training.checkpoint import Checkpoint
from tests.training.jobs import SMALL, until

#: How many commands are interrupted, each at a moment of its own; more than a few take minutes.
MOMENTS = int(os.environ.get("DGL_MGPU_TEST_MOMENTS", 1))


def interrupted(waits: str, limit: float, times: int | None = 1) -> tuple[int, str]:
    """The exit status and the errors of a process that is interrupted while it waits."""
    code = (
        "import ctypes, os, sys, time\n"
        "from dgl_mgpu import limits\n"
        "from dgl_mgpu.interrupts import Interrupts\n"
        f"limits.INTERRUPT = {limit}\n"
        "with Interrupts(lambda: 'last words'):\n"
        f"{waits}"
    )
    process = listening(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
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
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
        )
    finally:
        signal.signal(signal.SIGINT, before)


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
    assert errors.endswith("last words\n")


@pytest.mark.parametrize("waits", [IN_C, IN_A_CALLBACK])
def test_a_second_ends_a_process_at_once(waits):
    status, errors = interrupted(waits, limit=1000, times=None)
    assert status == 130
    assert errors.endswith("last words\n")


def test_it_raises_where_python_can():
    said = []
    descriptors = set(os.listdir("/proc/self/fd"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Interrupts(lambda: said.append(1)) as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        assert interrupts.heard
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
        with Interrupts(lambda: "") as interrupts:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert not interrupts.heard


def test_a_forked_process_does_not_tell_of_its_own(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(limits, "INTERRUPT", 0.0)  # it would end this process
    try:
        with Interrupts(lambda: "") as interrupts:
            child = os.fork()
            if not child:
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                except KeyboardInterrupt:
                    os._exit(7)
                os._exit(0)
            _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert not interrupts.heard
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return f"data.root={tmp_path_factory.mktemp('data')}"


def train(folder: Path, *overrides: str) -> subprocess.Popen:
    return listening(
        sys.executable, "-m", "dgl_mgpu.cli", "train", *SMALL, *overrides,
        "trainer.epochs=1000000", f"hydra.run.dir={folder}",
        cwd=folder.parent, stdout=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_command_ends_at_any_moment_without_a_traceback(tmp_path, data, ranks, moment):
    run = train(tmp_path / "run", data, f"trainer.ranks={ranks}")
    # Before, it is Python that starts, or a few modules that are imported.
    until((tmp_path / "run" / ".hydra" / "overrides.yaml").exists)
    time.sleep(random.Random(f"{ranks} {moment}").uniform(0, 10))
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    _, errors = run.communicate()
    assert (run.returncode, errors.count("\n")) == (130, 1), errors
    assert errors.startswith("dgl-mgpu train: interrupted")


def test_ctrl_c_names_the_last_checkpoint_and_how_to_go_on(tmp_path, data):
    run = train(tmp_path / "run", data, "trainer.ranks=2")
    until(lambda: any((tmp_path / "run" / "checkpoints").glob("epoch-*.pt")))
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate()
    assert run.returncode == 130
    (last,) = (tmp_path / "run" / "checkpoints").glob("epoch-*.pt")
    assert errors == (
        f"dgl-mgpu train: interrupted; the last checkpoint is run/checkpoints/{last.name}: "
        "dgl-mgpu train trainer.resume=run goes on from there\n"
    )
    assert Checkpoint.load(last).epoch == int(last.stem.removeprefix("epoch-"))

"""One job at a time has a run's folder, and none takes another run's."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dgl_mgpu.cli import main
from dgl_mgpu.train.compose import compose
from dgl_mgpu.utils.file_lock import locked
from tests.train.checkpoint.test_checkpoint import make

# Holds the lock of a file until it is killed; what it has forked lives on.
HOLDS = """
import os, sys
from pathlib import Path
from dgl_mgpu.utils.file_lock import locked
with locked(Path(sys.argv[1]), print):
    if os.fork():
        print("has it", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The folders of the runs that were started in this folder, which do nothing."""
    monkeypatch.chdir(tmp_path)
    folders: list[Path] = []
    monkeypatch.setattr("dgl_mgpu.train.run.train", lambda config, folder: folders.append(folder))
    return folders


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def a_run(folder: Path) -> Path:
    """A folder with what says that a run is there."""
    (folder / "checkpoints").mkdir(parents=True)
    content = dataclasses.replace(make(), epoch=3, config=dataclasses.asdict(compose([])))
    content.save(folder / "checkpoints")
    return folder


def test_who_looks_for_a_moment_keeps_no_job_out(tmp_path, started, monkeypatch):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".run.lock").open("w") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        ends = SimpleNamespace(sleep=lambda seconds: fcntl.flock(looked_at, fcntl.LOCK_UN))
        monkeypatch.setattr("dgl_mgpu.train.checkpoint.run_folder.time", ends)
        assert main(["train", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert started


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_second_job_in_a_folder_is_refused(tmp_path, started, capsys, resumes, several):
    folder = a_run(tmp_path / "run") if resumes else tmp_path / "run"
    folder.mkdir(exist_ok=True)
    words = [f"trainer.resume={folder}"] if resumes else []
    words += ["--multirun", f"hydra.sweep.dir={folder}"] if several else [f"hydra.run.dir={folder}"]
    with locked(folder / ".run.lock", print):
        before = files_of(folder)
        assert main(["train", *words]) == 1
        assert files_of(folder) == before and not started
    error = capsys.readouterr().err
    assert re.fullmatch(
        rf"dgl-mgpu train: OutputError: cannot train in {folder}: a job has this folder already, "
        rf"process {os.getpid()} on {socket.gethostname()} since 20\d\d-.*; "
        r"wait for its end, or choose another folder \(hydra\.run\.dir\)\n",
        error,
    )
    assert main(["train", *words]) == 0
    assert started and not list(tmp_path.rglob(".run.lock"))


def test_a_killed_job_keeps_no_folder_and_is_told_of(tmp_path, started, capsys):
    folder, other = a_run(tmp_path / "run"), tmp_path / "other"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder / ".run.lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"has it\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    told = f"the run before in {folder} was killed, or its machine: it was process {process.pid} on"
    assert main(["train", f"trainer.resume={folder}", f"hydra.run.dir={other}"]) == 0
    assert told in capsys.readouterr().out
    assert main(["train", f"trainer.resume={folder}", f"hydra.run.dir={folder}"]) == 0
    assert told in capsys.readouterr().out
    process.communicate()
    assert started == [other, folder]
    assert not list(tmp_path.rglob(".run.lock"))


def test_no_run_goes_on_in_the_folder_of_another(tmp_path, started, capsys):
    first, second = a_run(tmp_path / "first"), a_run(tmp_path / "second")
    before = files_of(tmp_path)
    assert main(["train", f"trainer.resume={first}", f"hydra.run.dir={second}"]) == 1
    error = capsys.readouterr().err
    assert f"cannot resume {first} in {second}: it holds checkpoints of another run" in error
    assert f"(trainer.resume={second})" in error
    assert main(["train", f"hydra.run.dir={second}"]) == 1
    assert f"cannot start a new run in {second}" in capsys.readouterr().err
    assert files_of(tmp_path) == before and not started
    # By another name, or by a checkpoint's, it is its own.
    (tmp_path / "link").symlink_to(first)
    for resumed in ("link", "first/checkpoints", "first/checkpoints/epoch-0003.pt"):
        assert main(["train", f"trainer.resume={resumed}", "hydra.run.dir=first"]) == 0


def test_the_folder_of_a_name_that_hydra_makes_out_is_locked(tmp_path, started, capsys):
    folder = tmp_path / "gcn"
    folder.mkdir()
    with locked(folder / ".run.lock", print):
        for name in ("${hydra:runtime.cwd}/${model.name}", "${model.name}"):
            assert main(["train", "model=gcn", f"hydra.run.dir='{name}'"]) == 1
            assert "a job has this folder already" in capsys.readouterr().err
    assert not started


def test_a_file_that_was_taken_away_locks_nobody_out(tmp_path):
    """Who waits gets the lock of the file that is there, not of one that is gone."""
    path = tmp_path / "lock"
    waiting: list[str] = []

    with locked(path, waiting.append):

        def removed(holder: str) -> None:
            waiting.append(holder)
            path.unlink(missing_ok=True)
            path.touch()
            raise InterruptedError

        with pytest.raises(InterruptedError), locked(path, removed):
            pass
        new = path.stat().st_ino
        with locked(path, waiting.append):
            assert path.stat().st_ino == new
    assert len(waiting) == 1


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("victim"), os.mkfifo])
def test_what_was_planted_for_a_lock_is_not_opened(tmp_path, make):
    make(tmp_path / "lock")
    with pytest.raises(OSError), locked(tmp_path / "lock", print):
        pass
    assert not (tmp_path / "victim").exists()

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dgl_mgpu.errors import OutputError
from dgl_mgpu.utils.atomic_write import atomic_write, typed_output


def partial_of(path) -> str:
    """What a file is called while this process writes it."""
    with atomic_write(path):
        (name,) = (each for each in os.listdir(path.parent) if each != path.name)
    return name


def test_what_killed_processes_leave_is_removed(tmp_path):
    path = tmp_path / "report [1].html"
    own = partial_of(path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone, alive = (own.replace(f".{os.getpid()}.", f".{pid}.") for pid in (ended.pid, os.getppid()))
    elsewhere = gone.replace(path.name, f"{path.name}.other")
    other_file = gone.replace("report", "a report")
    for name in (gone, alive, elsewhere, other_file):
        (tmp_path / name).write_text("a part")
    with atomic_write(path) as file:
        file.write(b"all")
    assert path.read_bytes() == b"all"
    assert {each.name for each in tmp_path.iterdir()} == {path.name, alive, elsewhere, other_file}


def test_nobody_can_know_the_name_of_a_part(tmp_path):
    """And put a link there, which would be followed."""
    assert len({partial_of(tmp_path / "file") for _ in range(3)}) == 3


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(KeyError), atomic_write(path) as file:
        file.write(b"after")
        raise KeyError
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]


def test_what_is_no_file_is_left_as_it_is(tmp_path):
    os.mkfifo(tmp_path / "device")
    (tmp_path / "folder").mkdir()
    for name in ("device", "folder"):
        path = tmp_path / name
        with pytest.raises(FileExistsError, match="no regular file"), atomic_write(path):
            pytest.fail("it is told before anything is done")
    assert (tmp_path / "device").is_fifo() and len(list(tmp_path.iterdir())) == 2


def test_errors_of_the_system_are_typed_and_typed_ones_stay():
    with (
        pytest.raises(OutputError, match=r"cannot write a page: .*No space left.*; free space"),
        typed_output("write a page", "free space"),
    ):
        raise OSError(28, "No space left on device")
    typed = OutputError("write a picture", "the disk is full", "free space")
    with pytest.raises(OutputError) as raised, typed_output("write a page", "free space"):
        raise typed
    assert raised.value is typed

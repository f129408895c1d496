from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import time
import urllib.error
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from dgl_mgpu.data import files, generate, load, load_hetero, ogb
from dgl_mgpu.errors import ConfigError, DataFormatError, OutputError
from dgl_mgpu.utils import timeouts


def test_built_once(tmp_path):
    calls = []

    def fill(folder):
        calls.append(folder)
        (folder / "a").write_text("x")

    target = tmp_path / "deep" / "target"
    for _ in range(2):
        assert files.build_once(target, fill) == target
    assert len(calls) == 1
    assert os.listdir(target.parent) == ["target"]


def test_failure_leaves_nothing(tmp_path):
    def fill(folder):
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.build_once(tmp_path / "target", fill)
    assert os.listdir(tmp_path) == []


def _fill_and_hang(folder):
    (folder / "half").touch()
    signal.pause()


def _fill_slowly(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(0.3)


def test_killed_builder_is_replaced(tmp_path):
    target = tmp_path / "target"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=files.build_once, args=(target, _fill_and_hang))
    process.start()
    while not list(tmp_path.rglob("half")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not target.exists()
    files.build_once(target, lambda folder: (folder / "whole").touch())
    assert os.listdir(target) == ["whole"]
    assert os.listdir(tmp_path) == ["target"]


def test_others_may_take_the_lock_of_a_killed_builder_and_read_what_is_built(tmp_path):
    modes = {}

    def fill(folder: Path) -> None:
        (folder / "a").touch()
        modes.update({path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()})

    before = os.umask(0o027)
    try:
        files.build_once(tmp_path / "target", fill)
    finally:
        os.umask(before)
    assert modes.pop(".target.lock") == 0o666
    assert list(modes.values()) == [0o700]  # while it is filled
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o750


def test_what_was_planted_for_a_part_is_left_alone(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").touch()
    parts = []

    def fill(folder: Path) -> None:
        parts.append(folder.parent.name)
        (folder / "a").touch()

    for name in ("target", "again"):
        (tmp_path / f".{name}.partial").symlink_to(victim)
        (tmp_path / f".{name}.planted.partial").symlink_to(victim)
        files.build_once(tmp_path / name, fill)
        assert os.listdir(tmp_path / name) == ["a"]
    assert os.listdir(victim) == ["file"]
    assert parts[0].removeprefix(".target.") != parts[1].removeprefix(".again.")


@pytest.mark.parametrize(
    ("mode", "owner", "is_refused"),
    [
        (0o1777, "other", True),
        (0o1777, "own", False),
        (0o1777, "root", False),
        (0o775, "other", False),
    ],
)
def test_what_another_user_has_put_where_anybody_may_is_refused(
    tmp_path, monkeypatch, mode, owner, is_refused
):
    root = tmp_path / "root"
    (root / "target").mkdir(parents=True)
    root.chmod(mode)
    user = {"other": os.getuid() + 1, "own": os.getuid(), "root": 0}[owner]
    monkeypatch.setattr(Path, "lstat", lambda path: SimpleNamespace(st_uid=user))
    refused = pytest.raises(
        OutputError, match=rf"use {root}/target: another user \(id {user}\) has"
    )
    with refused if is_refused else contextlib.nullcontext():
        files.build_once(root / "target", lambda folder: pytest.fail("it is there"))


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("cora", "planetoid/ind.cora.x"),
        ("facebook", "facebook_pages/x"),
        ("reddit", "reddit/x"),
        ("ogbn-arxiv", "ogbn_arxiv/raw"),
        ("ogbn-mag", "ogbn_mag/raw"),
    ],
)
def test_a_data_set_that_another_user_has_put_where_anybody_may_is_refused(
    tmp_path, monkeypatch, name, planted
):
    (tmp_path / planted).parent.mkdir()
    (tmp_path / planted).touch() if planted[-3:] != "raw" else (tmp_path / planted).mkdir()
    tmp_path.chmod(0o1777)
    lstat = SimpleNamespace(st_uid=os.getuid() + 1)
    monkeypatch.setattr(Path, "lstat", lambda path: lstat)
    with pytest.raises(OutputError, match=rf"use {tmp_path}/\w+: another user"):
        (load_hetero if name == "ogbn-mag" else load)(name, tmp_path)


def test_a_cache_that_another_user_has_put_where_anybody_may_is_refused(tmp_path, monkeypatch):
    """Who has made the folder of caches may have put any into it."""
    folder = generate.generate(generate.GraphSpec(30, 60, 2, 4), tmp_path)
    (folder / "derived").mkdir()
    folder.chmod(0o777)
    lstat = SimpleNamespace(st_uid=os.getuid() + 1)
    monkeypatch.setattr(Path, "lstat", lambda path: lstat)
    with pytest.raises(OutputError, match=r"use .*/derived: another user"):
        ogb.load_folder(folder, generate.meta_dict(folder))


def test_one_of_several_processes_builds(tmp_path):
    target = tmp_path / "target"
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=files.build_once, args=(target, _fill_slowly)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(os.listdir(target)) == 1
    assert os.listdir(tmp_path) == ["target"]


def test_a_folder_that_cannot_be_made_or_filled(tmp_path):
    (tmp_path / "file").touch()

    def fill(folder):
        raise OSError(28, "No space left on device")

    for target in (tmp_path / "file" / "target", Path("/proc/none/target"), tmp_path / "full"):
        with pytest.raises(OutputError, match=f"make {target}: .*; choose another data root"):
            files.build_once(target, fill)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["cora", "reddit", "ogbn-arxiv", "generated"])
def test_a_data_root_that_is_a_file(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="choose another data root"):
        load(name, tmp_path / "file")


def test_no_space(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=3 << 10))
    with pytest.raises(ConfigError, match=r"it takes 2\.00 MiB, and 3\.00 KiB are free"):
        files.require_space(tmp_path, 2 << 20, "a graph")


def test_download(tmp_path):
    archive = tmp_path / "served.zip"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("top/a.txt", "hello")
    folder = tmp_path / "to"
    folder.mkdir()
    files.download_zip(archive.as_uri(), folder, "fetch it by hand")
    assert (folder / "top" / "a.txt").read_text() == "hello"
    assert os.listdir(folder) == ["top"]


def test_download_offline_or_corrupt(tmp_path, monkeypatch):
    (tmp_path / "bad.zip").write_bytes(b"no archive")
    with pytest.raises(DataFormatError, match="fetch it by hand"):
        files.download_zip((tmp_path / "bad.zip").as_uri(), tmp_path, "fetch it by hand")

    def offline(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(DataFormatError, match=r"no route to host.*fetch it by hand"):
        files.download_zip("https://example.org/a.zip", tmp_path, "fetch it by hand")


def _fill_until_told(folder: Path) -> None:
    root = folder.parents[1]
    (root / "fills").touch()
    while not (root / "told").exists():
        time.sleep(0.01)


def test_who_waits_for_a_folder_says_for_whom_and_how_long(tmp_path, monkeypatch, caplog):
    target = tmp_path / "target"
    context = multiprocessing.get_context("fork")
    holder = context.Process(target=files.build_once, args=(target, _fill_until_told))
    holder.start()
    while not (tmp_path / "fills").exists():
        time.sleep(0.01)
    who = rf"process {holder.pid} on {socket.gethostname()} since 20\d\d-\S+ [\d:+-]+"
    monkeypatch.setattr(timeouts, "BUILD", 0.3)
    with pytest.raises(OutputError, match=rf"{who} has been making it for 0\.3 s and longer"):
        files.build_once(target, lambda folder: None)
    (told,) = caplog.messages
    assert re.fullmatch(f"waiting for {who}, which is making {target}", told)
    (tmp_path / "told").touch()
    holder.join()
    assert holder.exitcode == 0
    assert files.build_once(target, _fill_until_told) == target
    assert not list(tmp_path.glob(".target*"))

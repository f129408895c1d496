"""What another user has put into /tmp for DGL's libxsmm is not opened."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import dgl
import dgl.function as fn
import pytest
import torch

from dgl_mgpu.dgl.capi import dispatch, libxsmm
from dgl_mgpu.dgl.patches._ffi.base import abort_ends_the_process


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Where libxsmm's files are taken to be."""
    before = bool(dgl.is_libxsmm_enabled())
    dgl.use_libxsmm(True)
    names = tuple(file.replace("/tmp", str(tmp_path)) for file in libxsmm._FILES)
    monkeypatch.setattr(libxsmm, "_FILES", names)
    yield [tmp_path / os.path.basename(name).format(os.getuid()) for name in names]
    dgl.use_libxsmm(before)


def test_files_of_ones_own_are_made_and_used(files):
    for _ in range(2):
        libxsmm.make_safe.__wrapped__()
        assert [(path.is_file(), path.stat().st_mode & 0o777) for path in files] == [
            (True, 0o600)
        ] * 2
    assert dgl.is_libxsmm_enabled()


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "plant", [lambda path: path.symlink_to("victim"), os.mkfifo, lambda path: path.mkdir()]
)
def test_it_is_left_out_where_its_files_are_not_the_users(files, plant, number, caplog):
    plant(files[number])
    libxsmm.make_safe.__wrapped__()
    assert not dgl.is_libxsmm_enabled()
    assert f"{files[number]} is not a file of this user's" in caplog.text
    assert not files[number].with_name("victim").exists()


@pytest.mark.parametrize("planted", [False, True])
def test_it_is_not_initialised_where_its_files_are_not_the_users(files, monkeypatch, planted):
    """DGL's import does so, before there is anything to sum."""
    calls = []
    library = SimpleNamespace(libxsmm_init=lambda: calls.append(1))
    monkeypatch.setitem(sys.modules, "dgl._ffi.base", SimpleNamespace(_LIB=library))
    if planted:
        files[0].symlink_to("victim")
    with abort_ends_the_process():
        pass
    assert calls == [1] * (not planted)


def test_without_the_folder_nothing_is_opened(files):
    files[0].parent.rmdir()
    libxsmm.make_safe.__wrapped__()
    assert dgl.is_libxsmm_enabled()


@pytest.mark.parametrize("etypes", [[("a", "x", "b")], [("a", "x", "b"), ("a", "y", "b")]])
def test_it_is_looked_at_before_a_sum(monkeypatch, etypes):
    looks = []
    monkeypatch.setattr(dispatch, "make_safe", lambda: looks.append(1))
    edges = torch.tensor([0, 1]), torch.tensor([1, 1])
    g = dgl.heterograph(dict.fromkeys(etypes, edges))
    g.nodes["a"].data["h"] = torch.ones(2, 16)
    sums = fn.copy_u("h", "m"), fn.sum("m", "o")
    g.multi_update_all(dict.fromkeys(etypes, sums), "sum")
    assert looks
    assert g.nodes["b"].data["o"][:, 0].tolist() == [0, 2 * len(etypes)]

"""Old names go on working, with a warning."""

from __future__ import annotations

import importlib
import sys

import pytest

import dgl_mgpu
from dgl_mgpu.utils.deprecation import RenamedModules


@pytest.mark.parametrize(
    ("old", "member", "new"),
    [
        ("dgl_mgpu.topology", "preset", "dgl_mgpu.machine"),
        ("dgl_mgpu.fullgraph.features", "HostRows", "dgl_mgpu.distributed.host_features"),
        ("dgl_mgpu.fullgraph.gcn", "GCN", "dgl_mgpu.models.gcn"),
        ("dgl_mgpu.fullgraph.ownership", "Ownership", "dgl_mgpu.distributed.partition"),
        ("dgl_mgpu.resources", "resource_folder", "dgl_mgpu.utils.resources"),
        ("dgl_mgpu.store.optimizer", "write_rows", "dgl_mgpu.store.row_updates"),
    ],
)
def test_old_modules_are_the_new_ones(old, member, new, monkeypatch):
    parent = old.rpartition(".")[0]
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}.* 0.2"):
        module = importlib.import_module(old)
    assert getattr(module, member) is getattr(importlib.import_module(new), member)
    assert parent in sys.modules


def test_what_neither_has_is_an_attribute_error():
    with pytest.warns(DeprecationWarning):
        sys.modules.pop("dgl_mgpu.topology", None)
        module = importlib.import_module("dgl_mgpu.topology")
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        module.nothing_of_this_name  # noqa: B018


def test_names_that_were_never_there_are_not_found():
    assert any(isinstance(finder, RenamedModules) for finder in sys.meta_path)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dgl_mgpu.never_there")
    assert not hasattr(dgl_mgpu, "never_there")

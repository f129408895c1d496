"""Old names go on working, with a warning."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest
import torch

import dgl_mgpu
from dgl_mgpu import ops
from dgl_mgpu.utils.deprecation import RenamedModules, deprecated_alias
from tests.ops.views import Graph


@pytest.mark.parametrize(
    ("old", "member", "new"),
    [
        ("dgl_mgpu.topology", "preset", "dgl_mgpu.machine"),
        ("dgl_mgpu.fullgraph.features", "HostRows", "dgl_mgpu.distributed.host_features"),
        ("dgl_mgpu.fullgraph.gcn", "FullGraphGCN", "dgl_mgpu.models.gcn"),
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


def test_an_old_name_works_and_names_the_new_one():
    def total(left: int, *, right: int = 0) -> int:
        return left + right

    alias = deprecated_alias("package.old_total", total, "package.total")
    message = r"package\.old_total is deprecated and will be removed in 0\.2; use package\.total"
    with pytest.warns(DeprecationWarning, match=message) as warned:
        assert alias(2, right=3) == 5
    assert warned[0].filename == __file__
    assert alias.__name__ == "old_total" and inspect.signature(alias) == inspect.signature(total)


@pytest.mark.parametrize("name", ["sample_blocks", "sample_etype_blocks", "pinsage_blocks"])
def test_functions_that_start_sampling_have_their_old_names(name):
    old, new = getattr(ops, f"begin_{name}"), getattr(ops, f"{name}_async")
    assert inspect.unwrap(old) is new


def test_what_old_names_return_is_called_for_the_result():
    view = Graph.of_lists([[1, 2], [0], []]).view()
    arguments = view, torch.tensor([0, 1]), [-1], ops.SampleKey(0, 0, 0, 0)
    with pytest.warns(DeprecationWarning, match=r"use dgl_mgpu\.ops\.sample_blocks_async"):
        wait = ops.begin_sample_blocks(*arguments)
    (block,), (expected,) = wait(), ops.sample_blocks_async(*arguments).result()
    assert torch.equal(block.eids, expected.eids) and len(block.eids) == 3


def test_the_old_gcn_makes_the_new_one():
    from dgl_mgpu.models import gcn

    with pytest.warns(DeprecationWarning, match="FullGraphGCN"):
        assert isinstance(gcn.GCN((3, 2)), gcn.FullGraphGCN)

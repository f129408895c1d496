"""Old names of public functions."""

from __future__ import annotations

import inspect

import pytest
import torch

from dgl_mgpu import ops
from dgl_mgpu.utils.deprecation import deprecated_alias
from tests.ops.views import Graph


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

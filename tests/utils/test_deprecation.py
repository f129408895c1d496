"""Old names of public functions."""

from __future__ import annotations

import inspect

import pytest

from dgl_mgpu import ops
from dgl_mgpu.utils.deprecation import deprecated_alias


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
    assert getattr(ops, f"begin_{name}").__wrapped__ is getattr(ops, f"{name}_async")

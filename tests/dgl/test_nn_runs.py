"""Every public class of `dgl.nn.pytorch` is built and runs forward and backward on small graphs.

Deprecation and future warnings are errors: what a user would see printed fails here.
"""

from __future__ import annotations

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl.nn.pytorch as dglnn
import pytest
import torch

from tests.dgl.nn.cases import CASES, IN, NEEDS_CUGRAPH, OUT, tensors

pytestmark = [
    pytest.mark.filterwarnings("error::DeprecationWarning"),
    pytest.mark.filterwarnings("error::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("error::FutureWarning"),
    pytest.mark.filterwarnings("error:TypedStorage is deprecated"),
]


def public_classes() -> set[str]:
    return {
        name
        for name, value in vars(dglnn).items()
        if isinstance(value, type) and value.__module__.startswith("dgl.") and name[0] != "_"
    }


def test_every_public_class_has_a_case():
    assert {name.partition("-")[0] for name in CASES} | NEEDS_CUGRAPH == public_classes()


@pytest.mark.parametrize("name", CASES)
def test_runs_forward_and_backward(name):
    outputs = list(tensors(CASES[name].run()))
    assert all(torch.isfinite(out).all() for out in outputs if out.is_floating_point())
    differentiable = [out for out in outputs if out.requires_grad]
    if differentiable:
        sum(out.float().sum() for out in differentiable).backward()


@pytest.mark.parametrize("name", sorted(NEEDS_CUGRAPH))
def test_cugraph_layers_say_what_they_need(name):
    with pytest.raises(ModuleNotFoundError, match="pylibcugraphops"):
        getattr(dglnn, name)(IN, OUT, 2)

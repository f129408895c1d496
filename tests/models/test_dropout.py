"""Dropout on CPUs against what chance says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dgl_mgpu.models.homogeneous import Dropout

#: A test of chance is wrong this often, were numbers not the same in every run.
RARE = 1e-4


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.97])
def test_elements_are_dropped_by_chance_alone(rate):
    kept = Dropout(rate)(torch.ones(30_001, 7)) != 0
    dropped = int((~kept).sum())
    assert stats.binomtest(dropped, kept.numel(), rate).pvalue > RARE
    # Four elements are of one number: what becomes of one says nothing of those after it.
    flat = kept.flatten().numpy().astype(int)
    for apart in (1, 2, 3, 4):
        pairs = np.bincount(2 * flat[apart:] + flat[:-apart], minlength=4)
        expected = np.outer(*[[rate, 1 - rate]] * 2).ravel() * len(flat[apart:])
        # Pairs that overlap vary together, at most twice as much as others would.
        assert abs(pairs - expected).max() < 6 * np.sqrt(2 * expected.max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(50, 3), (7,), (3, 2, 5), (0, 4)])
def test_what_is_kept_is_raised_and_its_gradient_too(dtype, shape):
    rows = torch.randn(shape, dtype=dtype).requires_grad_()
    out = Dropout(0.25)(rows)
    out.sum().backward()
    assert out.dtype == dtype and out.shape == rows.shape
    scale = torch.tensor(4 / 3, dtype=dtype)
    is_kept = rows.grad != 0
    assert torch.equal(rows.grad, torch.where(is_kept, scale, torch.zeros((), dtype=dtype)))
    assert torch.equal(out, rows * rows.grad)


def test_means_stay_where_the_chance_is_no_multiple():
    # Nearest are 19661 and 19660 of 65536: the mean is of what was drawn.
    out = Dropout(0.3)(torch.ones(1000, 1000))
    assert float(out.max()) == pytest.approx(65536 / (65536 - 19661), rel=1e-6)
    assert float(out.mean()) == pytest.approx(1, abs=5 * (0.3 / 0.7 / 1e6) ** 0.5)


def test_draws_follow_torchs_seed():
    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return Dropout(0.5)(torch.ones(1000))

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("rate", [0.0, 1e-6, 1.0])
def test_chances_of_all_and_of_nothing_are_torchs(rate):
    rows = torch.randn(40, 3)
    torch.manual_seed(0)
    ours = Dropout(rate)(rows)
    torch.manual_seed(0)
    assert torch.equal(ours, nn.Dropout(rate)(rows))


def test_models_are_compiled_whole():
    compiled = torch.compile(Dropout(0.5), backend="aot_eager", fullgraph=True)
    out = compiled(torch.ones(1000, 10))
    assert float((out == 0).double().mean()) == pytest.approx(0.5, abs=0.03)
    assert set(out.unique().tolist()) == {0, 2}


def test_rows_need_not_be_where_new_tensors_are():
    rows = torch.ones(40, 3)
    with torch.device("meta"):
        assert Dropout(0.5)(rows).device == rows.device


def test_evaluation_drops_nothing():
    rows = torch.randn(40, 3)
    assert torch.equal(Dropout(0.5).eval()(rows), rows)

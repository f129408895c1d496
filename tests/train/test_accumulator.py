"""Sums over an epoch's steps, against those over all its seeds at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from dgl_mgpu.train.objectives import MetricAccumulator

CPU = torch.device("cpu")


def steps(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    for count in (1, 40, 7):
        logits = torch.randn(count, 5, generator=draw, dtype=dtype, requires_grad=True)
        yield logits, torch.randint(5, (count,), generator=draw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_all_seeds(dtype):
    accumulator, logits, labels = MetricAccumulator(CPU), [], []
    assert all(math.isnan(each) for each in accumulator.latest())
    for number, (each, of) in enumerate(steps(dtype), 1):
        accumulator.add(cross_entropy(each, of), (each.argmax(1) == of).sum(), len(of))
        logits.append(each)
        labels.append(of)
        ours, theirs = torch.cat(logits), torch.cat(labels)
        num_correct = (ours.argmax(1) == theirs).sum().item()
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        total = cross_entropy(ours.float(), theirs, reduction="sum").item()
        loss, found, seeds = accumulator.sums()
        assert loss == pytest.approx(total, rel=tolerance)
        assert (found, seeds, accumulator.seeds, accumulator.steps) == (
            num_correct,
            len(ours),
            len(ours),
            number,
        )
        assert accumulator.latest() == (loss / seeds, num_correct / seeds)
    assert not accumulator._sums.requires_grad

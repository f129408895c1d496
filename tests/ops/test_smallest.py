"""The smallest numbers of groups, against sorting each group."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.ops.smallest import smallest_of_groups

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def expected(values, bounds, most):
    chosen = torch.zeros(len(values), dtype=torch.bool)
    for group, count in enumerate(most.tolist()):
        first, last = bounds[group : group + 2].tolist()
        order = sorted(range(first, last), key=lambda place: (float(values[place]), place))
        order = [place for place in order if values[place] < float("inf")]
        chosen[order if count < 0 else order[:count]] = True
    return chosen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kinds", [3, 1_000_000])
@pytest.mark.parametrize("threads", [1, 4])
def test_the_smallest_are_those_of_sorted_groups(device, kinds, threads):
    draw = torch.Generator().manual_seed(kinds)
    lengths = torch.randint(0, 30, (3000,), generator=draw)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = torch.randint(kinds, (int(bounds[-1]),), generator=draw).double() / kinds
    values[torch.rand(len(values), generator=draw) < 0.1] = float("inf")
    most = torch.randint(-1, 12, (len(lengths),), generator=draw)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = smallest_of_groups(values.to(device), bounds.to(device), most.to(device))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found.cpu(), expected(values, bounds, most))


@pytest.mark.parametrize("device", DEVICES)
def test_no_groups_and_empty_ones(device):
    none = torch.empty(0, device=device)
    bounds = torch.zeros(1, dtype=torch.int64, device=device)
    most = torch.empty(0, dtype=torch.int64, device=device)
    assert smallest_of_groups(none.double(), bounds, most).tolist() == []
    bounds = torch.tensor([0, 0, 2, 2], device=device)
    values = torch.tensor([2.0, 1.0], dtype=torch.float64, device=device)
    found = smallest_of_groups(values, bounds, torch.tensor([4, 1, -1], device=device))
    assert found.tolist() == [False, True]

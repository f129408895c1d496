"""The CUDA kernels of extremes in several parts, against torch's functions on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgl_mgpu.ops.extremes import (
    _keep_extremes,
    _scatter_to_winners,
    keep_extremes,
    scatter_to_winners,
)

NUM_DST, WIDTH, ENTRIES, SOURCES = 70, 9, 300, 40


def parts(dtype: torch.dtype, ids: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of two parts, extremes with many ties and some NaN, their entries, and what these are."""
    torch.manual_seed(0)
    numbers = torch.randperm(2 * ENTRIES).to(ids)
    found = []
    for part in range(2):
        values = torch.randint(-2, 3, (NUM_DST, WIDTH)).to(dtype)
        values[3, 2] = float("nan")
        values[5] = -float("inf")
        chosen = torch.randint(ENTRIES, (NUM_DST, WIDTH)).to(ids)
        indices = torch.randint(SOURCES, (ENTRIES,)).to(ids)
        found.append((values, chosen, numbers[part * ENTRIES :][:ENTRIES].contiguous(), indices))
    return found


@pytest.mark.parametrize("highest", [True, False])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_what_is_more_extreme_is_kept(where, dtype, ids, highest):
    start = -float("inf") if highest else float("inf")
    results = []
    for device, keep in ((torch.device("cpu"), keep_extremes), (where, _keep_extremes)):
        values = torch.full((NUM_DST, WIDTH), start, dtype=dtype, device=device)
        entries = torch.full_like(values, -1, dtype=ids)
        winners = torch.full_like(entries, -1)
        for begin, part in zip((0, SOURCES), parts(dtype, ids), strict=True):
            found, chosen, numbers, indices = (it.to(device) for it in part)
            keep(values, entries, winners, found, chosen, numbers, indices, begin, highest)
        results.append([it.cpu() for it in (values, entries, winners)])
    assert (results[0][1] == -1).any() and (results[0][2] >= SOURCES).any()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_elements_go_to_the_rows_that_won(where, dtype, ids):
    torch.manual_seed(1)
    elements = torch.randint(-8, 9, (NUM_DST, WIDTH)).to(dtype)  # sums are exact in any order
    winners = torch.randint(-1, 2 * SOURCES, (NUM_DST, WIDTH)).to(ids)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = torch.zeros(2 * SOURCES, WIDTH, dtype=wide)
    for row, column in (winners >= 0).nonzero().tolist():
        whole[winners[row, column], column] += elements[row, column].to(wide)
    for device, scatter in (
        (torch.device("cpu"), scatter_to_winners),
        (where, _scatter_to_winners),
    ):
        for begin in (0, SOURCES):
            out = torch.ones(SOURCES, WIDTH, dtype=wide, device=device)
            scatter(out, elements.to(device), winners.to(device), begin)
            assert torch.equal(out.cpu(), whole[begin : begin + SOURCES] + 1)


def test_nothing_of_no_edges(where):
    values, entries = torch.zeros(3, 2, device=where), torch.zeros(3, 2, device=where).int()
    none = torch.empty(0, device=where, dtype=torch.int32)
    _keep_extremes(values, entries, entries, values, entries, None, none, 0, True)
    _scatter_to_winners(values[:0], values, entries, 0)
    assert not values.any() and not entries.any()

"""The CUDA kernels that write and train rows, bit for bit against the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.ops import (
    SGD,
    Adagrad,
    Adam,
    AlignedTables,
    device,
    scatter,
    scatter_rows,
    update_rows,
)
from tests.kernels.cuda_views import on_device
from tests.ops.views import LAYOUTS, row_view

ROWS = 103
RULES = {"sgd": SGD(0.1), "adagrad": Adagrad(0.1), "adam": Adam(0.1, step=3, betas=(0.8, 0.95))}


def some_ids(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    random = np.random.default_rng(1)
    return torch.from_numpy((ROWS * random.random(count) ** 3).astype(np.int64)).to(dtype)


def segments(view) -> list[torch.Tensor]:
    return [segment.cpu() for segment in view.owner]


def no_shares(where: torch.device) -> torch.Tensor:
    return torch.empty((0, 2), dtype=torch.int64, device=where)


def scatter_there(view, ids, rows, where, shares=None) -> None:
    shares = no_shares(where) if shares is None else shares.to(where)
    scatter._scatter_rows_cuda(
        ids.to(where), rows.to(where), view.tiers, view.pointers, view.position, shares, ROWS
    )
    device.raise_faults(where, wait=True)


def update_there(tables, ids, gradients, rule, where) -> None:
    scatter._update_rows_cuda(
        ids.to(where), gradients.to(where), tables.tiers, tables.pointers, tables.position,
        tables.shares, ROWS, rule.number, rule.settings,
    )  # fmt: skip
    device.raise_faults(where, wait=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_scatter(where, layout, id_dtype):
    rows = torch.randn(ROWS, 7)
    for count, shuffled in ((0, False), (1, False), (600, False), (600, True)):
        ids, new = some_ids(count, id_dtype), torch.randn(count, 7)
        expected, there = (
            row_view(rows, LAYOUTS[layout], np.random.default_rng(2) if shuffled else None)
            for _ in range(2)
        )
        there = on_device(there, where)
        scatter_rows(expected, ids, new)
        scatter_there(there, ids, new, where)
        for found, wanted in zip(segments(there), expected.owner, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float32, 64), (torch.int64, 1), (torch.bfloat16, 3), (torch.bool, 5)],
)
def test_scatter_of_any_row_size(where, dtype, width):
    rows = torch.zeros(ROWS, width).to(dtype)
    there = on_device(row_view(rows), where)
    ids, new = torch.randperm(ROWS)[:60], torch.randint(0, 2, (60, width)).to(dtype)
    scatter_there(there, ids, new, where)
    rows[ids] = new
    assert torch.equal(segments(there)[0], rows)


def test_only_the_share_is_written(where):
    there = on_device(row_view(torch.zeros(ROWS, 3), [(20, 1), (30, 2), (0, 1)]), where)
    shares = torch.tensor([[1, 0], [0, 0], [1, 0], [3, 2]])
    scatter_there(there, torch.arange(ROWS), torch.ones(ROWS, 3), where, shares)
    whole, none, other, third = segments(there)
    assert whole.all() and not none.any() and other.all()
    assert torch.equal(third[:, 0] == 1, torch.arange(len(third)) % 3 == 2)


@pytest.mark.parametrize("layout", ["single", "three tiers"])
@pytest.mark.parametrize("width", [1, 40])
@pytest.mark.parametrize("name", RULES)
def test_updates(where, name, width, layout):
    rule = RULES[name]
    tables = [torch.randn(ROWS, width), torch.rand(ROWS, width), torch.rand(ROWS, width)]
    tables = tables[: 1 + rule.num_states]
    here = [row_view(table, LAYOUTS[layout]) for table in tables]
    there = [on_device(row_view(table, LAYOUTS[layout]), where) for table in tables]
    ids, gradients = some_ids(300), torch.randn(300, width)
    update_rows(AlignedTables.of(here), ids, gradients, rule)
    update_there(AlignedTables.of(there), ids, gradients, rule, where)
    for found, wanted in zip(there, here, strict=True):
        for a, b in zip(segments(found), wanted.owner, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(here[0].owner[0], row_view(tables[0], LAYOUTS[layout]).owner[0])


@pytest.mark.parametrize("bad", [-1, ROWS, 2**40])
def test_a_bad_id_is_told_and_nothing_written(where, bad):
    rows = torch.randn(ROWS, 3)
    there = on_device(row_view(rows), where)
    ids = some_ids(50)
    ids[20] = bad
    with pytest.raises(IdOutOfRangeError, match=f"id {bad} is not among the {ROWS} rows"):
        scatter_there(there, ids, torch.zeros(50, 3), where)
    with pytest.raises(IdOutOfRangeError, match=f"id {bad} is not among the {ROWS} rows"):
        update_there(AlignedTables.of([there]), ids, torch.ones(50, 3), SGD(0.1), where)
    assert torch.equal(segments(there)[0], rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_operators_find_their_kernels():
    rows, new = torch.randn(ROWS, 3), torch.randn(40, 3, device="cuda")
    view = on_device(row_view(rows), "cuda")
    ids = torch.arange(40, device="cuda")
    scatter_rows(view, ids, new)
    update_rows(AlignedTables.of([view]), ids, new, SGD(1.0))
    device.raise_faults(ids.device, wait=True)
    rows[:40] = 0
    assert torch.equal(segments(view)[0], rows)

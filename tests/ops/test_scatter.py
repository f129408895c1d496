"""Writing and training rows against plain indexing and torch's optimizers, for any layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import (
    SGD,
    Adagrad,
    Adam,
    AlignedTables,
    gather_rows,
    scatter_rows,
    update_rows,
)
from tests.ops.views import LAYOUTS, elsewhere, row_view

ROWS, WIDTH = 103, 7
RULES = ["sgd", "adagrad", "adam"]


def some_ids(count: int, seed: int = 1, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy((ROWS * random.random(count) ** 3).astype(np.int64)).to(dtype)


def shuffle(shuffled: bool) -> np.random.Generator | None:
    return np.random.default_rng(0) if shuffled else None


def every_row(view) -> torch.Tensor:
    return gather_rows(view, torch.arange(view.num_rows))


def by_one(rows: torch.Tensor, ids: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    written = rows.clone()
    for row, value in zip(ids.tolist(), new, strict=True):
        written[row] = value
    return written


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_the_last_row_of_an_id_is_kept(layout, shuffled, id_dtype):
    rows = torch.randn(ROWS, WIDTH)
    for count in (0, 1, 40, 3000):
        view = row_view(rows, LAYOUTS[layout], shuffle(shuffled))
        ids, new = some_ids(count, dtype=id_dtype), torch.randn(count, WIDTH)
        scatter_rows(view, ids, new)
        assert torch.equal(every_row(view), by_one(rows, ids, new))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (5, 2), (0,)])
def test_dtypes_and_shapes(dtype, shape):
    rows = torch.randint(0, 2, (ROWS, *shape)).to(dtype)
    view = row_view(rows, LAYOUTS["three tiers"])
    ids, new = some_ids(50), torch.randint(0, 2, (50, *shape)).to(dtype)
    scatter_rows(view, ids, new)
    assert torch.equal(every_row(view), by_one(rows, ids, new))


def test_views_that_are_not_contiguous_may_be_written_from():
    rows = torch.randn(ROWS, WIDTH)
    view = row_view(rows)
    ids, new = some_ids(80)[::2], torch.randn(WIDTH, 40).T
    scatter_rows(view, ids, new)
    assert torch.equal(every_row(view), by_one(rows, ids, new))


def oracle(name: str, weights: torch.Tensor) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD([weights], lr=0.1)
    if name == "adagrad":
        return torch.optim.Adagrad([weights], lr=0.1)
    return torch.optim.SparseAdam([weights], lr=0.1, betas=(0.8, 0.95))


def rule(name: str, step: int) -> SGD | Adagrad | Adam:
    if name == "sgd":
        return SGD(lr=0.1)
    if name == "adagrad":
        return Adagrad(lr=0.1)
    return Adam(lr=0.1, step=step, betas=(0.8, 0.95))


def tables_of(name: str, rows: torch.Tensor, layout, random) -> tuple:
    """Views of rows and of their state, all zeros, laid out alike."""
    views = [row_view(rows, layout, random)]
    for _ in range(rule(name, 1).num_states):
        state = row_view(torch.zeros_like(rows), layout)
        views.append(replace(state, position=views[0].position))
    return tuple(views)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RULES)
def test_steps_are_those_of_torch(name, layout, shuffled):
    weights = torch.nn.Parameter(torch.randn(ROWS, WIDTH))
    views = tables_of(name, weights.detach(), LAYOUTS[layout], shuffle(shuffled))
    tables, optimizer = AlignedTables.of(views), oracle(name, weights)
    for step in range(1, 5):
        ids, gradients = some_ids(200, seed=step), torch.randn(200, WIDTH)
        weights.grad = torch.sparse_coo_tensor(
            ids[None], gradients, weights.shape, check_invariants=True
        )
        optimizer.step()
        update_rows(tables, ids.int() if step % 2 else ids, gradients, rule(name, step))
        torch.testing.assert_close(every_row(views[0]), weights.detach(), rtol=1e-4, atol=1e-5)
    if name == "adam":
        for view, key in zip(views[1:], ("exp_avg", "exp_avg_sq"), strict=True):
            torch.testing.assert_close(every_row(view), optimizer.state[weights][key])


@pytest.mark.parametrize("number", [1, 2, 5])
def test_gradients_are_summed_as_they_come(on_threads, number):
    rows, ids, gradients = torch.zeros(ROWS, 64), some_ids(6000), torch.randn(6000, 64)
    expected = rows.clone()
    for row, gradient in zip(ids.tolist(), gradients, strict=True):
        expected[row] += gradient
    view = row_view(rows, LAYOUTS["three tiers"])
    tables = AlignedTables.of([view])
    on_threads(number, lambda: update_rows(tables, ids, gradients, SGD(lr=1.0)))
    assert torch.equal(every_row(view), -expected)


@pytest.mark.parametrize("number", [1, 5])
def test_threads_write_every_row(on_threads, number):
    rows, ids, new = torch.randn(ROWS, 64), some_ids(6000), torch.randn(6000, 64)
    view = row_view(rows, LAYOUTS["four parts"])
    on_threads(number, lambda: scatter_rows(view, ids, new))
    assert torch.equal(every_row(view), by_one(rows, ids, new))


def test_a_rank_writes_its_share_and_all_together_everything():
    rows, ids, new = torch.randn(ROWS, WIDTH), torch.arange(ROWS), torch.randn(ROWS, WIDTH)
    layout = [(20, 1), (30, 3), (0, 1)]
    view = row_view(rows, layout)
    # Rank 0 has the first tier and all parts of the second but one; both ranks share the third.
    share = {0: [[1, 0], [1, 0], [1, 0], [0, 0], [2, 0]], 1: [[0, 0]] * 3 + [[1, 0], [2, 1]]}
    before = every_row(view)
    scatter_rows(view, ids, new, torch.tensor(share[0]))
    half = every_row(view)
    place = torch.arange(ROWS)
    mine = place < 20
    mine |= (place < 50) & ((place - 20) % 3 != 2)
    mine |= (place >= 50) & ((place - 50) % 2 == 0)
    assert torch.equal(half, torch.where(mine[:, None], new, before))
    scatter_rows(view, ids, new, torch.tensor(share[1]))
    assert torch.equal(every_row(view), new)


@pytest.mark.parametrize("bad", [-1, ROWS, 2**31, -(2**62)])
def test_a_bad_id_is_named_and_nothing_written(bad):
    rows = torch.randn(ROWS, WIDTH)
    view = row_view(rows, LAYOUTS["three tiers"])
    ids = some_ids(50)
    ids[[20, 30]] = bad
    with pytest.raises(IdOutOfRangeError, match=f"id {bad} at place 20"):
        scatter_rows(view, ids, torch.randn(50, WIDTH))
    with pytest.raises(IdOutOfRangeError, match=f"id {bad} at place 20"):
        update_rows(AlignedTables.of([view]), ids, torch.randn(50, WIDTH), SGD(0.1))
    assert torch.equal(every_row(view), rows)


@pytest.mark.parametrize(
    "rows", [torch.zeros(4, WIDTH), torch.zeros(5, WIDTH + 1), torch.zeros(5, WIDTH).double()]
)
def test_rows_that_do_not_fit(rows):
    view = row_view(torch.zeros(ROWS, WIDTH))
    with pytest.raises(InvalidInputError, match="rows has shape"):
        scatter_rows(view, torch.arange(5), rows)
    with pytest.raises(InvalidInputError, match="gradients has shape"):
        update_rows(AlignedTables.of([view]), torch.arange(5), rows, SGD(0.1))


def test_shares_and_states_that_do_not_fit():
    view = row_view(torch.zeros(ROWS, WIDTH), LAYOUTS["four parts"])
    new = torch.zeros(5, WIDTH)
    with pytest.raises(InvalidInputError, match="shares has shape"):
        scatter_rows(view, torch.arange(5), new, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(InvalidInputError, match="0 tables of state for Adam"):
        update_rows(AlignedTables.of([view]), torch.arange(5), new, Adam(0.1, 1))
    for other, message in (
        (torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16), "dtype torch.bfloat16"),
        (torch.zeros(ROWS, WIDTH + 1), rf"state 1 has {ROWS} rows of shape \({WIDTH + 1},\)"),
        (torch.zeros(ROWS, WIDTH), "other tiers"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            AlignedTables.of([view, row_view(other, LAYOUTS["three tiers"])])
    with pytest.raises(InvalidInputError, match="state 1 is on 'meta'"):
        AlignedTables.of([view, elsewhere(view)])


def test_a_table_with_rows_on_disk():
    view = replace(row_view(torch.zeros(ROWS, WIDTH)), disk=object())
    with pytest.raises(InvalidInputError, match="the table has rows on disk"):
        scatter_rows(view, torch.arange(5), torch.zeros(5, WIDTH))
    with pytest.raises(InvalidInputError, match="state 1 has rows on disk"):
        AlignedTables.of([row_view(torch.zeros(ROWS, WIDTH)), view])


def test_registration():
    view = row_view(torch.randn(ROWS, WIDTH), LAYOUTS["four parts"])
    tables = AlignedTables.of([view])
    ids, rows = torch.arange(20), torch.randn(20, WIDTH)
    torch.library.opcheck(
        torch.ops.dgl_mgpu.scatter_rows.default,
        (ids, rows, view.tiers, view.pointers, view.position, tables.shares, ROWS),
    )
    torch.library.opcheck(
        torch.ops.dgl_mgpu.update_rows.default,
        (ids, rows, view.tiers, tables.pointers, view.position, tables.shares, ROWS, 0, [0.1]),
    )

"""Row gather against plain indexing, for any layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import count_tiers, gather_rows
from dgl_mgpu.ops.view import FIRST, PARTS
from tests.ops.views import LAYOUTS, row_view

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]


def table(num_rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(
        0, 2 if dtype == torch.bool else 100, (num_rows, *shape), generator=generator
    )
    return values.to(dtype)


def some_ids(count: int, num_rows: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    random = np.random.default_rng(1)
    return torch.from_numpy((num_rows * random.random(count) ** 3).astype(np.int64)).to(dtype)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_layouts(layout, shuffled, id_dtype):
    rows = table(103, 7)
    view = row_view(rows, LAYOUTS[layout], np.random.default_rng(0) if shuffled else None)
    for count in (0, 1, 15, 16, 17, 1000):
        ids = some_ids(count, len(rows), id_dtype)
        assert torch.equal(gather_rows(view, ids), rows[ids.long()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (100,), (5, 2), (0,)])
def test_dtypes_and_shapes(dtype, shape):
    rows = table(50, *shape, dtype=dtype)
    ids = some_ids(200, 50)
    gathered = gather_rows(row_view(rows, LAYOUTS["three tiers"]), ids)
    assert gathered.dtype == dtype
    assert torch.equal(gathered, rows[ids])


def test_ids_need_not_be_contiguous():
    rows = table(50, 3)
    ids = some_ids(200, 50)[::2]
    assert torch.equal(gather_rows(row_view(rows), ids), rows[ids])


def test_out_is_filled_and_returned():
    rows, ids = table(50, 3), some_ids(20, 50)
    out = torch.full((20, 3), torch.nan)
    assert gather_rows(row_view(rows), ids, out) is out
    assert torch.equal(out, rows[ids])


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(19, 3),
        torch.empty(20, 3, dtype=torch.float64),
        torch.empty(3, 20).T,
        torch.empty(20, 4),
    ],
)
def test_wrong_out(out):
    with pytest.raises(InvalidInputError, match="out has shape"):
        gather_rows(row_view(table(50, 3)), some_ids(20, 50), out)


@pytest.mark.parametrize("operator", [gather_rows, count_tiers])
@pytest.mark.parametrize("ids", [torch.zeros(3), torch.zeros(3, dtype=torch.bool), [0, 1]])
def test_ids_of_a_wrong_type(operator, ids):
    with pytest.raises(InvalidInputError, match="int32 or"):
        operator(row_view(table(5, 3)), ids)


def test_ids_of_a_wrong_shape():
    with pytest.raises(InvalidInputError, match="one dimension"):
        gather_rows(row_view(table(5, 3)), torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.parametrize("operator", [gather_rows, count_tiers])
@pytest.mark.parametrize("bad", [-1, 103, 2**31, -(2**62), 2**62])
@pytest.mark.parametrize("shuffled", [False, True])
def test_id_out_of_range(on_threads, operator, bad, shuffled):
    rows = table(103, 400)
    view = row_view(rows, LAYOUTS["three tiers"], np.random.default_rng(0) if shuffled else None)
    ids = some_ids(5000, 103)
    ids[[1234, 4000]] = bad  # the first one is named, whichever thread meets it
    for number in (1, 2, 5):
        with pytest.raises(IdOutOfRangeError, match=f"id {bad} at place 1234"):
            on_threads(number, lambda: operator(view, ids))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_threads(on_threads, number):
    rows, ids = table(1000, 64), some_ids(20000, 1000)
    view = row_view(rows, LAYOUTS["four parts"])
    assert torch.equal(on_threads(number, lambda: gather_rows(view, ids)), rows[ids])


def test_children(in_children):
    rows, ids = table(1000, 64), some_ids(20000, 1000)
    view = row_view(rows, LAYOUTS["four parts"])
    gather_rows(view, ids)
    for (answer,) in in_children(lambda: (gather_rows(view, ids),)):
        assert torch.equal(answer, rows[ids])


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_count_tiers(layout, shuffled):
    rows = table(103, 7)
    view = row_view(rows, LAYOUTS[layout], np.random.default_rng(0) if shuffled else None)
    ids = some_ids(1000, len(rows))
    position = view.position[ids].long() if shuffled else ids
    counts = count_tiers(view, ids)
    assert counts.sum() == 1000
    for start, stop, parts, first in view.tiers.tolist():
        inside = position[(position >= start) & (position < stop)]
        expected = torch.bincount((inside - start) % parts, minlength=parts)
        assert torch.equal(counts[first : first + parts], expected)
    assert len(counts) == int((view.tiers[:, FIRST] + view.tiers[:, PARTS]).max())


def test_registration():
    rows, ids = table(50, 3), some_ids(20, 50)
    view = row_view(rows, LAYOUTS["four parts"])
    placed = (view.tiers, view.pointers, view.position, view.num_rows)
    torch.library.opcheck(
        torch.ops.dgl_mgpu.gather_rows.default, (torch.empty(20, 3), ids, *placed)
    )
    torch.library.opcheck(torch.ops.dgl_mgpu.count_tiers.default, (ids, *placed))

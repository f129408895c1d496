"""Row gather against plain indexing, for any layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import count_tiers, gather, gather_rows
from dgl_mgpu.ops.gather import CASTS_FROM, CASTS_TO
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


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All values of a small type; of another all sorts of bits, and what is hard to round."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    random = np.random.default_rng(0)
    bits = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, 1 << 14, endpoint=True))
    bits = bits.to(torch.int32) if dtype.itemsize == 4 else bits
    if not dtype.is_floating_point:
        small = torch.from_numpy(random.integers(-(2**26), 2**26, 4096))
        return torch.cat([bits, small.to(dtype), torch.arange(-300, 300, dtype=dtype)])
    exact = torch.cat([every_value(torch.float16), every_value(torch.bfloat16).float()]).to(dtype)
    exact = exact[exact.isfinite()]
    # Halfway between neighbours of a smaller type, and next to that.
    between = torch.cat([exact * (1 + 2**-11), exact * (1 + 2**-8), exact + 2**-25])
    ends = [torch.nextafter(between, torch.full_like(between, to)) for to in (-np.inf, np.inf)]
    special = torch.tensor([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519, 65520], dtype=dtype)
    return torch.cat([bits.view(dtype), exact, between, *ends, special])


def assert_same_values(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, but for the payload of NaNs."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    assert torch.equal(*(torch.where(x.isnan(), 0, x).view(words) for x in (found, expected)))


@pytest.mark.parametrize("wanted", CASTS_TO)
@pytest.mark.parametrize("stored", CASTS_FROM)
def test_casts(monkeypatch, stored, wanted):
    monkeypatch.setattr(gather, "_CAST_BYTES", 1000)
    values = every_value(stored)
    # As numbers of 8 bits: torch 2.4 looks no float8 up by ids.
    order = torch.randperm(len(values))[:700]
    rows = values.view(torch.uint8).view(len(values), -1)[order].view(stored).view(-1, 2, 1)
    ids = some_ids(500, len(rows))
    view = row_view(rows, LAYOUTS["three tiers"])
    gathered = gather_rows(view, ids, dtype=wanted)
    assert_same_values(gathered, rows.to(wanted)[ids])
    out = torch.empty_like(gathered)
    assert gather_rows(view, ids, out, dtype=wanted) is out
    assert_same_values(out, gathered)
    assert gather_rows(view, ids[:0], dtype=wanted).shape == (0, 2, 1)


def test_an_id_out_of_range_of_a_cast(monkeypatch):
    monkeypatch.setattr(gather, "_CAST_BYTES", 100)
    ids = some_ids(300, 50)
    ids[[123, 200]] = 50
    with pytest.raises(IdOutOfRangeError, match="id 50 at place 123"):
        gather_rows(row_view(table(50, 3)), ids, dtype=torch.float16)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.int64),
        (torch.float32, torch.float8_e5m2),
        (torch.complex64, torch.float32),
        (torch.float32, "float16"),
        (torch.uint8, torch.bool),
    ],
)
def test_casts_there_are_not(stored, wanted):
    with pytest.raises(InvalidInputError, match=f"dtype is {wanted}, .* stored as {stored}"):
        gather_rows(row_view(torch.zeros(5, 3, dtype=stored)), torch.arange(5), dtype=wanted)


def test_out_is_of_the_dtype_asked_for():
    view, ids = row_view(table(50, 3)), some_ids(20, 50)
    for out, wanted in ((torch.float32, torch.float16), (torch.float16, None)):
        with pytest.raises(InvalidInputError, match="out has shape"):
            gather_rows(view, ids, torch.empty(20, 3, dtype=out), dtype=wanted)


class _Arguments(TorchDispatchMode):
    """Sees what the operator is called with."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.dgl_mgpu.gather_rows.default:
            self.seen = dict(
                zip((each.name for each in func._schema.arguments), args, strict=False)
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("host_start", "sms", "expected"),
    [
        (-1, 0, (16, 3)),
        (-1, 40, (40, 3)),
        (20, 40, (40, 3)),
        (0, 0, (16, 3)),
        (0, 40, (40, 40)),  # a limit is for all rows
    ],
)
def test_multiprocessors_are_those_the_view_was_found_to_need(host_start, sms, expected):
    view = replace(row_view(table(50, 3)), sms=16, host_sms=3, host_start=host_start)
    with _Arguments() as arguments:
        gather_rows(view, some_ids(20, 50), sms=sms)
    assert (arguments.seen["sms"], arguments.seen["host_sms"]) == expected


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
        torch.empty(20, 3, device="meta"),
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
    before = counts.clone()
    assert count_tiers(view, ids, counts) is counts
    assert torch.equal(counts, 2 * before)


@pytest.mark.parametrize(
    "counts",
    [
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, 1, dtype=torch.int64),
        torch.zeros(8, dtype=torch.int64)[::2],
        torch.zeros(4, dtype=torch.int64, device="meta"),
        [0, 0, 0, 0],
    ],
    ids=["short", "dtype", "shape", "strided", "device", "list"],
)
def test_counts_to_add_to_are_those_of_the_table(counts):
    """Operators write where counts are to be, whatever is there."""
    view = row_view(table(103, 7), LAYOUTS["four parts"])
    with pytest.raises(InvalidInputError, match=r"counts (has shape|is of type)"):
        count_tiers(view, torch.tensor([5]), counts)


def test_registration():
    rows, ids = table(50, 3), some_ids(20, 50)
    view = row_view(rows, LAYOUTS["four parts"])
    placed = (view.tiers, view.pointers, view.position, view.num_rows)
    torch.library.opcheck(
        torch.ops.dgl_mgpu.gather_rows.default, (torch.empty(20, 3), ids, *placed)
    )
    torch.library.opcheck(
        torch.ops.dgl_mgpu.gather_rows.default,
        (torch.empty(20, 3, dtype=torch.float64), ids, *placed, -1, 0, 4, 1.0, torch.float32),
    )
    torch.library.opcheck(
        torch.ops.dgl_mgpu.count_tiers.default,
        (torch.zeros(4, dtype=torch.int64), ids, view.tiers, view.position, view.num_rows),
    )

"""The CUDA kernels of the sparse-dense product, against plain torch."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from dgl_mgpu.ops import add_spmm, spmm, spmm_shares
from dgl_mgpu.ops import spmm_cuda as cuda
from dgl_mgpu.ops import spmm_layout as layout
from tests.ops.test_spmm import (
    GRAPHS,
    SHAPES,
    assert_product,
    assert_shares,
    bounds_of,
    graph,
    rows_for,
)


@pytest.fixture
def product(where, monkeypatch):
    """The operator on a device, with what it takes and gives on the CPU."""
    if where.type == "cpu":
        monkeypatch.setattr(torch.ops.dgl_mgpu.spmm, "default", cuda._spmm)

    def call(*arguments):
        moved = [each.to(where) if isinstance(each, torch.Tensor) else each for each in arguments]
        found, again = spmm(*moved), spmm(*moved)
        for one, other in zip(found, again, strict=True):
            assert one is None or torch.equal(one, other)  # no two runs differ
        return tuple(None if each is None else each.cpu() for each in found)

    return call


def check(product, *arguments):
    assert_product(product(*arguments), *arguments)


@functools.cache
def skewed(id_dtype=torch.int64, permuted=True):
    """Rows that lie in a share, that begin or end in one, and one over many."""
    degrees = np.minimum(np.random.default_rng(2).pareto(0.9, 400), 300).astype(int)
    degrees[50:90], degrees[200], degrees[201] = 0, 9000, 700
    return graph(degrees.tolist(), id_dtype, permuted)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(product, name):
    indptr, indices, eids = graph(GRAPHS[name], torch.int32)
    u, e = rows_for(len(indices), (20,), (1,), torch.float32)
    check(product, indptr, indices, eids, u, e, "mul", "sum")
    indptr, indices, eids = graph(GRAPHS[name], permuted=False)
    check(product, indptr, indices, eids, u, e, "copy_lhs", "max")


@pytest.mark.parametrize("width", [1, 3, 8, 28, 48, 96, 256, 300])
def test_widths(product, width):
    indptr, indices, eids = skewed()
    u, e = rows_for(len(indices), (width,), (1,), torch.float32)
    for reduce in ("sum", "mean"):
        check(product, indptr, indices, eids, u, e, "copy_lhs", reduce)


@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize(
    "degrees",
    [
        [63, 64, 0, 62, 0, 63, 0, 127, 128, 129, 191, 192, 193, 0],
        [64] * 40,
        [63] * 40,
        [127] * 20,
        [0] * 100 + [126] * 9,
    ],
    ids=["around", "64", "63", "127", "empty rows"],
)
def test_rows_that_begin_and_end_where_shares_do(product, degrees, reduce):
    indptr, indices, eids = graph(degrees)
    u, e = rows_for(len(indices), (5,), (1,), torch.float32, whole=True)
    check(product, indptr, indices, eids, u, e, "copy_lhs", reduce)


@pytest.mark.parametrize(
    ("num_rows", "width", "whole", "expected"),
    [
        (37, 3, True, (512, True, 12)),
        (37, 33, True, (512, True, 144)),  # else two warps would read a number in each lane
        (37, 33, False, (512, True, 132)),  # vectors of weights begin anywhere, too
        (14, 33, True, (512, True, 144)),
        (63, 33, True, (512, True, 132)),  # too few entries for a copy
        (37, 50, True, (512, True, 200)),  # one warp reads it as it is
        (37, 96, True, (512, False, 384)),  # 37 rows are not much more than 3/4 of 16 KiB
        (37, 160, True, (256, True, 640)),  # of 256 B, they are less
        (37, 150, True, (256, True, 640)),  # rows do not begin at lines: a copy is to
        (63, 150, True, (512, False, 600)),
        (95, 512, True, (128, True, 2048)),
        (97, 512, True, (512, False, 2048)),  # not even a line of each fits
        (0, 512, True, (512, False, 0)),
        (None, None, True, (512, False, 0)),
    ],
)
def test_columns_are_as_many_as_stay_in_the_cache(emulated, num_rows, width, whole, expected):
    rows = None if num_rows is None else torch.empty(num_rows, width)
    assert layout.columns_in_cache(rows, 500, whole) == expected


def recorded_layouts(monkeypatch) -> list[layout.OperandLayout]:
    """Those that are made from now on."""
    layouts = []

    def make(*arguments, **options):
        layouts.append(layout.make_layout(*arguments, **options))
        return layouts[-1]

    monkeypatch.setattr(cuda, "make_layout", make)
    cuda._plan.cache_clear()
    return layouts


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (47,)),
        (torch.float32, (3, 47)),
        (torch.float64, (37,)),
        (torch.float16, (41,)),
        (torch.bfloat16, (131,)),
    ],
)
@pytest.mark.parametrize(("op", "reduce"), [("copy_lhs", "sum"), ("mul", "mean"), ("mul", "min")])
def test_rows_that_begin_anywhere_in_a_vector(product, dtype, shape, op, reduce, monkeypatch):
    """Some of which are done by one warp and some by several, beside what must not be written."""
    layouts = recorded_layouts(monkeypatch)
    degrees = np.random.default_rng(3).integers(0, 60, 40)
    degrees[7] = 900
    indptr, indices, eids = graph(degrees.tolist())
    u, e = rows_for(len(indices), shape, (1,), dtype, whole=reduce == "min")
    indices = indices % 90
    check(product, indptr, indices, eids, u[:90].contiguous(), e, op, reduce)
    assert {each.vector * dtype.itemsize for each in layouts} == {16}


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (70,)),
        (torch.float32, (71,)),
        (torch.float32, (7, 10)),
        (torch.float64, (33,)),
        (torch.bfloat16, (131,)),
    ],
)
@pytest.mark.parametrize(("op", "reduce"), [("copy_lhs", "sum"), ("mul", "max")])
def test_rows_that_begin_anywhere_in_a_line(product, dtype, shape, op, reduce, monkeypatch):
    copied = []
    original = layout.at_lines
    monkeypatch.setattr(
        cuda, "at_lines", lambda *rows: copied.append(original(*rows)) or copied[-1]
    )
    monkeypatch.setattr(cuda.gpu.driver, "cache_bytes", lambda _: 6400)
    degrees = np.random.default_rng(3).integers(0, 30, 80)
    indptr, indices, eids = graph(degrees.tolist())
    u, e = rows_for(len(indices), shape, (1,), dtype, whole=reduce == "max")
    check(product, indptr, indices, eids, u, e, op, reduce)
    assert copied
    for rows in copied:
        assert rows.stride(0) * rows.element_size() % 128 == 0


def test_rows_that_are_expanded_begin_where_they_did(product, monkeypatch):
    """Of too many dimensions, and so wide that a copy would have them begin at lines."""
    monkeypatch.setattr(cuda, "at_lines", None)
    monkeypatch.setattr(cuda.gpu.driver, "cache_bytes", lambda _: 1 << 14)
    indptr, indices, eids = graph([30] * 80)
    u, e = rows_for(len(indices), (2, 3, 2, 3, 7), (2, 1, 2, 1, 7), torch.float32)
    assert layout.columns_in_cache(u, len(indices), False) == (256, True, 1024)  # of 1008
    check(product, indptr, indices, eids, u, e, "mul", "sum")


def test_room_for_parts_is_bounded(emulated):
    assert layout.max_shares(1 << 10, 0) == 1 << 16
    assert layout.max_shares(1 << 10, 1 << 30) == 1 << 18
    assert layout.max_shares(1 << 40, 0) == 1
    where = torch.device("cpu")
    assert layout.shares(10_000, 4, where, most=10) == (1000, 10)


@pytest.mark.parametrize(
    ("dtype", "width", "reduce"),
    [
        (torch.float64, 10, "sum"),
        (torch.float16, 100, "mean"),
        (torch.float16, 24, "max"),
        (torch.bfloat16, 100, "sum"),
        (torch.bfloat16, 3, "min"),
    ],
)
def test_dtypes(product, dtype, width, reduce):
    indptr, indices, eids = skewed()
    u, e = rows_for(len(indices), (width,), (1,), dtype, whole=reduce in ("max", "min"))
    check(product, indptr, indices, eids, u, e, "mul", reduce)


@pytest.mark.parametrize(("u_shape", "e_shape"), SHAPES)
def test_shapes(product, u_shape, e_shape):
    indptr, indices, eids = graph(GRAPHS["rows without entries"])
    u, e = rows_for(len(indices), u_shape, e_shape, torch.float32)
    check(product, indptr, indices, eids, u, e, "sub", "sum")


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(2, torch.float64), (4, torch.bfloat16), (8, torch.float32), (8, torch.bfloat16)],
)
def test_rows_that_heads_share(product, monkeypatch, heads, dtype):
    """Of one tile and of several, in rows that one warp has and in parts."""
    monkeypatch.setattr(layout, "_MIN_SHARE", 16)
    layouts = recorded_layouts(monkeypatch)
    for degrees, width in ((GRAPHS["rows without entries"], 24), ([3, 200, 0, 1, 90], 296)):
        indptr, indices, eids = graph(degrees)
        u, e = rows_for(len(indices), (1, width), (heads, 1), dtype, whole=True)
        for op, reduce in (("mul", "sum"), ("add", "max")):
            check(product, indptr, indices, eids, u, e, op, reduce)
    assert {each.repeats for each in layouts} == {heads}


@pytest.mark.parametrize(
    ("op", "reduce"),
    [("add", "max"), ("sub", "min"), ("mul", "max"), ("div", "sum"), ("copy_rhs", "min")],
)
def test_operators(product, op, reduce):
    indptr, indices, eids = skewed(torch.int32)
    for ids in (eids, None):
        u, e = rows_for(len(indices), (4, 8), (4, 8), torch.float32, whole=op != "div")
        check(product, indptr, indices, ids, u, e, op, reduce)


def test_nan_is_never_chosen(product):
    indptr, indices, eids = skewed()
    u, e = rows_for(len(indices), (5,), (1,), torch.float32)
    u[::2] = torch.nan
    u[1::4] = -torch.inf
    check(product, indptr, indices, eids, u, e, "copy_lhs", "max")


def test_out_of_any_alignment(product, where):
    indptr, indices, eids = skewed()
    u, e = rows_for(len(indices), (16,), (1,), torch.float32)
    for offset in (1, 2):
        moved = torch.zeros(u.numel() + offset, device=where)[offset:].view(u.shape).copy_(u)
        found = product(indptr, indices, None, moved, None, "copy_lhs", "sum")
        assert_product(found, indptr, indices, eids, u, e, "copy_lhs", "sum")


def test_room_for_more_entries_than_there_are(product):
    indptr, indices, eids = skewed()
    u, e = rows_for(len(indices), (16,), (1,), torch.float32)
    more = torch.cat([indices, torch.full((5000,), 1 << 40)])
    out, _, _ = product(indptr, more, None, u, None, "copy_lhs", "sum")
    assert_product((out, None, None), indptr, indices, eids, u, e, "copy_lhs", "sum")


@pytest.mark.parametrize(
    ("dtype", "width", "op"),
    [
        (torch.float32, 100, "copy_lhs"),
        (torch.float32, 3, "mul"),
        (torch.float32, 47, "mul"),
        (torch.bfloat16, 24, "copy_lhs"),
        (torch.bfloat16, 41, "copy_lhs"),
        (torch.float64, 10, "copy_lhs"),
    ],
)
def test_sums_are_added(where, monkeypatch, dtype, width, op):
    if where.type == "cpu":
        monkeypatch.setattr(torch.ops.dgl_mgpu.add_spmm, "default", cuda._add_spmm)
    graph = skewed(torch.int32)
    operands = rows_for(len(graph[1]), (width,), (1,), dtype)
    total = spmm(*graph, *operands, op, "sum")[0]
    before = torch.randn(total.shape).to(dtype)
    out = before.clone().to(where)
    add_spmm(out, *(each.to(where) for each in (*graph, *operands)), op)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.cpu(), before + total, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [*GRAPHS, "skewed"])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (100,)),
        (torch.float32, (47,)),
        (torch.float32, ()),
        (torch.float64, (2, 5)),
        (torch.float16, (24,)),
        (torch.bfloat16, (3,)),
    ],
)
def test_shares(where, monkeypatch, name, dtype, shape):
    if where.type == "cpu":
        monkeypatch.setattr(torch.ops.dgl_mgpu.spmm_shares, "default", cuda._spmm_shares)
    indptr, indices, _ = skewed() if name == "skewed" else graph(GRAPHS[name], torch.int32)
    u, _ = rows_for(len(indices), shape, (), dtype)
    arguments = indptr, indices, bounds_of(indices), u
    found = spmm_shares(*(each.to(where) for each in arguments))
    assert_shares(found.cpu(), *arguments)

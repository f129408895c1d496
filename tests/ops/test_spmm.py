"""The generalised sparse-dense product, against plain torch and DGL's own operator."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import add_spmm, spmm, spmm_shares
from dgl_mgpu.ops.spmm import DTYPES, OPS, REDUCES

SOURCES = 37


def graph(degrees, id_dtype=torch.int64, permuted=True, seed=0):
    """``indptr``, ``indices`` and ``eids`` of a graph with in-degrees given, some sources twice."""
    draw = torch.Generator().manual_seed(seed)
    indptr = torch.zeros(len(degrees) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(degrees, dtype=torch.int64), 0, out=indptr[1:])
    count = int(indptr[-1])
    indices = torch.randint(SOURCES, (count,), generator=draw)
    eids = torch.randperm(count, generator=draw).to(id_dtype) if permuted else None
    return indptr.to(id_dtype), indices.to(id_dtype), eids


GRAPHS = {
    "empty": [],
    "no entries": [0, 0, 0],
    "one entry": [1],
    "rows without entries": [0, 0, 3, 0, 1, 0, 0, 40, 2, 0],
    "hub": [2, 0, 5, 9000, 1, 0, 3],
    "many rows": [row % 5 for row in range(300)],
}
#: Rows of u and of e that broadcast against each other.
SHAPES = [
    ((), ()),
    ((3,), (3,)),
    ((16,), (1,)),
    ((1,), (8,)),
    ((4, 16), (4, 1)),
    ((1, 24), (4, 1)),
    ((1, 24), (3, 1)),
    ((5, 3), (3,)),
    ((7,), (2, 1)),
    ((2, 1, 3, 1), (1, 5, 1, 7)),
    ((2, 1, 2, 1, 2, 1), (1, 2, 1, 2, 1, 2)),
    ((0,), (1,)),
]


def rows_for(entries, u_shape, e_shape, dtype, whole=False, seed=3):
    """Values of nodes and edges, small integers if ``whole``, so that there are ties."""
    draw = torch.Generator().manual_seed(seed)

    def rows(count, shape):
        if whole:
            return torch.randint(-3, 4, (count, *shape), generator=draw).to(dtype)
        # Away from 0, for quotients.
        values = torch.rand(count, *shape, generator=draw, dtype=torch.float64) + 0.5
        return (values * (1 - 2 * torch.randint(2, values.shape, generator=draw))).to(dtype)

    return rows(SOURCES, u_shape), rows(entries, e_shape)


def expected(indptr, indices, eids, u, e, op, reduce):
    """The product in float64, an edge and a row after the other."""
    degrees = indptr.diff().long()
    count = int(degrees.sum())
    eids = torch.arange(count) if eids is None else eids.long()
    left = None if op == "copy_rhs" else u.double()[indices.long()]
    right = None if op == "copy_lhs" else e.double()[eids]
    if left is not None and right is not None:
        dims = max(left.dim(), right.dim())
        left = left.reshape(count, *[1] * (dims - left.dim()), *left.shape[1:])
        right = right.reshape(count, *[1] * (dims - right.dim()), *right.shape[1:])
    messages = {
        "add": lambda: left + right,
        "sub": lambda: left - right,
        "mul": lambda: left * right,
        "div": lambda: left / right,
        "copy_lhs": lambda: left,
        "copy_rhs": lambda: right,
    }[op]()
    shape = (len(degrees), *messages.shape[1:])
    destinations = torch.repeat_interleave(torch.arange(len(degrees)), degrees)
    if reduce in ("sum", "mean"):
        total = torch.zeros(shape, dtype=torch.float64).index_add(0, destinations, messages)
        counts = degrees.clamp(min=1).view(-1, *[1] * (total.dim() - 1))
        return total if reduce == "sum" else total / counts, None
    start = -torch.inf if reduce == "max" else torch.inf
    best = torch.full(shape, start, dtype=torch.float64)
    chosen = torch.full(shape, -1)
    for entry, row in enumerate(destinations.tolist()):
        value = messages[entry]
        better = value > best[row] if reduce == "max" else value < best[row]
        best[row] = torch.where(better, value, best[row])
        chosen[row] = torch.where(better, entry, chosen[row])
    return best, chosen


def ids_of(chosen, ids):
    """Ids of the entries chosen, 0 where none was."""
    ids = torch.cat([ids.long(), torch.zeros(1, dtype=torch.int64)])
    return ids[torch.where(chosen < 0, len(ids) - 1, chosen)]


def assert_product(found, indptr, indices, eids, u, e, op, reduce):
    """That ``found`` is the product of these."""
    out, arg_u, arg_e = found
    dtype = e.dtype if op == "copy_rhs" else u.dtype
    exact, chosen = expected(indptr, indices, eids, u, e, op, reduce)
    assert out.dtype == dtype and out.shape == exact.shape
    if reduce in ("sum", "mean"):
        assert arg_u is None and arg_e is None
        # Errors of sums grow with what is summed up, not with what remains.
        ones = expected(indptr, indices, eids, u.abs(), e.abs(), op, reduce)[0].abs()
        if op == "sub":
            ones = expected(indptr, indices, eids, u.abs(), -e.abs(), op, reduce)[0]
        step = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        bound = 200 * step * ones + torch.finfo(dtype).eps * exact.abs() + 1e-300
        assert ((out.double() - exact).abs() <= bound).all()
        return
    # Of one message and its neighbour in the type the other may be chosen.
    torch.testing.assert_close(out, exact.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert (arg_u is None) == (op == "copy_rhs") and (arg_e is None) == (op == "copy_lhs")
    if arg_u is not None:
        assert arg_u.dtype == indptr.dtype
        assert torch.equal(arg_u.long(), ids_of(chosen, indices))
    if arg_e is not None:
        assert arg_e.dtype == indptr.dtype
        of_entries = torch.arange(int(indptr[-1])) if eids is None else eids
        assert torch.equal(arg_e.long(), ids_of(chosen, of_entries))


def bounds_of(indices):
    """Where other entries of the sources begin: some have none."""
    counts = torch.bincount(indices.long(), minlength=SOURCES)
    counts = torch.where(counts > 0, counts + torch.arange(SOURCES), 0)
    bounds = torch.zeros(SOURCES + 1, dtype=indices.dtype)
    bounds[1:] = counts.cumsum(0)
    return bounds


def assert_shares(out, indptr, indices, bounds, u):
    """That ``out`` is the sum of the sources' rows, each divided by how many entries it has."""
    counts = bounds.diff().double()[indices.long()]
    assert_product((out, None, None), indptr, indices, None, u, counts, "div", "sum")


def check(indptr, indices, eids, u, e, op, reduce):
    found = spmm(indptr, indices, eids, u, e, op, reduce)
    assert_product(found, indptr, indices, eids, u, e, op, reduce)


@pytest.mark.parametrize("width", [1, 2, 4, 7, 16, 31, 64, 85, 128, 133])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", ["copy_lhs", "copy_rhs"])
def test_sums_of_rows_of_any_width_are_in_the_order_of_entries(op, dtype, width):
    indptr, indices, eids = graph(GRAPHS["rows without entries"])
    u, e = torch.randn(SOURCES, width, dtype=dtype), torch.randn(len(eids), width, dtype=dtype)
    rows = u[indices] if op == "copy_lhs" else e[eids]
    wanted = torch.zeros(len(indptr) - 1, width, dtype=dtype)
    for row, entries in enumerate(rows.split(indptr.diff().tolist())):
        for entry in entries:
            wanted[row] += entry
    assert torch.equal(spmm(indptr, indices, eids, u, e, op, "sum")[0], wanted)


@pytest.mark.parametrize("width", [1, 4, 7, 16, 31, 64, 133])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_choices_of_rows_of_any_width(reduce, dtype, width):
    """The first of equal ones, in vectors of any size and what they leave; also NaN."""
    indptr, indices, eids = graph([0, 3, 0, 40, 700, 2])  # messages of 700 entries come in parts
    u, e = rows_for(len(indices), (width,), (width,), dtype, whole=True)
    u[3], e[5] = torch.nan, torch.nan
    for op in OPS[:3] + OPS[4:]:
        check(indptr, indices, eids, u, e, op, reduce)
        check(indptr, indices, eids, u, e[:, :1], op, reduce)


@pytest.mark.parametrize("reduce", REDUCES)
def test_a_message_divided_by_zero_is_infinite(reduce):
    indptr, indices, _ = graph([1, 2])
    u, e = torch.ones(SOURCES, 5), torch.zeros(3, 1)
    out = spmm(indptr, indices, None, u, e, "div", reduce)[0]
    assert torch.equal(out, torch.full((2, 5), torch.inf))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("permuted", [False, True])
def test_graphs(name, id_dtype, permuted):
    indptr, indices, eids = graph(GRAPHS[name], id_dtype, permuted)
    u, e = rows_for(len(indices), (3,), (3,), torch.float32)
    for op, reduce in (("mul", "sum"), ("copy_lhs", "max"), ("copy_rhs", "sum"), ("sub", "min")):
        check(indptr, indices, eids, u, e, op, reduce)


@pytest.mark.parametrize(("op", "reduce"), list(itertools.product(OPS, REDUCES)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_operators(op, reduce, dtype):
    indptr, indices, eids = graph(GRAPHS["rows without entries"])
    # Half types would round messages to equal ones, of which the first is chosen.
    whole = reduce in ("max", "min") and op != "div" and dtype.itemsize < 4
    u, e = rows_for(len(indices), (4,), (4,), dtype, whole)
    if op == "div" and dtype.itemsize < 4:
        e = torch.sign(e)
    check(indptr, indices, eids, u, e, op, reduce)


@pytest.mark.parametrize(("u_shape", "e_shape"), SHAPES)
def test_shapes(u_shape, e_shape):
    indptr, indices, eids = graph(GRAPHS["rows without entries"])
    u, e = rows_for(len(indices), u_shape, e_shape, torch.float64)
    for op, reduce in itertools.product(OPS, REDUCES):
        check(indptr, indices, eids, u, e, op, reduce)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_of_equal_messages_the_first_is_chosen(reduce):
    indptr, indices, eids = graph(GRAPHS["many rows"])
    u, e = rows_for(len(indices), (3,), (3,), torch.float32, whole=True)
    for op in OPS[:3] + OPS[4:]:
        check(indptr, indices, eids, u, e, op, reduce)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_nan_is_never_chosen(reduce):
    indptr, indices = torch.tensor([0, 3, 5, 6]), torch.tensor([1, 2, 3, 1, 1, 4])
    start = -torch.inf if reduce == "max" else torch.inf
    u = torch.tensor([0, torch.nan, 2, 2, start])
    out, arg_u, _ = spmm(indptr, indices, None, u, None, "copy_lhs", reduce)
    assert out.tolist() == [2, start, start] and arg_u.tolist() == [2, 0, 0]


def test_one_rounding_of_half_sums():
    # Rounded after each step, the small ones would be lost.
    for dtype in (torch.float16, torch.bfloat16):
        u = torch.tensor([[256.0], [0.25]], dtype=dtype)
        indices = torch.tensor([0] + [1] * 4000)
        out, _, _ = spmm(torch.tensor([0, 4001]), indices, None, u, None, "copy_lhs", "sum")
        assert out.item() == torch.tensor(1256.0).to(dtype)


def test_operands_of_any_layout():
    indptr, indices, eids = graph(GRAPHS["many rows"])
    u, e = rows_for(len(indices), (6, 4), (6, 4), torch.float32)
    indices = indices.repeat_interleave(2)[::2]
    check(indptr, indices, eids, u[:, ::2], e.transpose(1, 2)[:, :3, :4], "mul", "sum")
    check(indptr, indices, eids, u[:, :1].expand_as(u), e[:, :, 1:2], "mul", "sum")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("reduce", REDUCES)
def test_as_dgl(op, reduce):
    dgl = pytest.importorskip("dgl")
    indptr, indices, eids = graph(GRAPHS["many rows"] + GRAPHS["rows without entries"])
    u, e = rows_for(len(indices), (4, 3), (4, 1), torch.float32)
    destinations = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())
    pairs = torch.empty(2, len(indices), dtype=torch.int64)
    pairs[:, eids] = torch.stack([indices, destinations])
    there = dgl.heterograph(
        {("s", "to", "d"): (pairs[0], pairs[1])}, {"s": SOURCES, "d": len(indptr) - 1}
    )
    wanted = dgl.ops.gspmm(
        there, op, reduce, None if op == "copy_rhs" else u, None if op == "copy_lhs" else e
    )
    torch.testing.assert_close(spmm(indptr, indices, eids, u, e, op, reduce)[0], wanted)


def test_random_graphs():
    random = np.random.default_rng(5)
    for seed in range(20):
        degrees = np.minimum(random.pareto(0.8, random.integers(1, 40)), 500).astype(int)
        indptr, indices, eids = graph(degrees.tolist(), permuted=seed % 2 == 0, seed=seed)
        u_shape, e_shape = SHAPES[random.integers(len(SHAPES))]
        u, e = rows_for(len(indices), u_shape, e_shape, torch.float64)
        op, reduce = OPS[random.integers(len(OPS))], REDUCES[random.integers(len(REDUCES))]
        check(indptr, indices, eids, u, e, op, reduce)


def test_the_schema():
    indptr, indices, eids = graph(GRAPHS["many rows"])
    u, e = rows_for(len(indices), (4, 3), (4, 1), torch.float32)
    for op, reduce in (("mul", "mean"), ("copy_lhs", "max"), ("copy_rhs", "min")):
        shape = [4, 1] if op == "copy_rhs" else [4, 3]
        operands = (None if op == "copy_rhs" else u, None if op == "copy_lhs" else e)
        torch.library.opcheck(
            torch.ops.dgl_mgpu.spmm.default,
            (indptr, indices, eids, *operands, shape, op, reduce),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 4)])
def test_shares(name, dtype, shape):
    indptr, indices, _ = graph(GRAPHS[name], torch.int32)
    u, _ = rows_for(len(indices), shape, (), dtype)
    bounds = bounds_of(indices)
    assert_shares(spmm_shares(indptr, indices, bounds, u), indptr, indices, bounds, u)


def test_the_schema_of_shares():
    indptr, indices, _ = graph(GRAPHS["many rows"])
    u, _ = rows_for(len(indices), (4, 3), (), torch.float32)
    torch.library.opcheck(
        torch.ops.dgl_mgpu.spmm_shares.default,
        (indptr, indices, bounds_of(indices), u),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"bounds": torch.zeros(5, dtype=torch.int64)},
        {"bounds": torch.zeros(6, dtype=torch.int32)},
        {"bounds": torch.zeros(6, dtype=torch.int64, device="meta")},
        {"u": torch.ones(5, 4, dtype=torch.int64)},
        {"indices": torch.zeros(6, dtype=torch.int32)},
    ],
)
def test_bad_inputs_of_shares(changed):
    good = {
        "indptr": torch.tensor([0, 6]),
        "indices": torch.zeros(6, dtype=torch.int64),
        "bounds": torch.arange(6),
        "u": torch.ones(5, 4),
    }
    spmm_shares(**good)
    with pytest.raises(InvalidInputError):
        spmm_shares(**(good | changed))


BAD = {
    "an unknown op": ({"op": "dot"}, "no op='dot'"),
    "an unknown reduce": ({"reduce": "prod"}, "no reduce='prod'"),
    "no u": ({"u": None}, "u is None"),
    "no e": ({"e": None}, "e is None"),
    "no indices": ({"indices": None}, "indices is None"),
    "no rows": ({"u": torch.tensor(1.0)}, "a row for each"),
    "two dtypes": ({"e": torch.ones(6, 4, dtype=torch.float64)}, "float32 and torch.float64"),
    "integers": ({"u": torch.ones(5, 4).int(), "e": torch.ones(6, 4).int()}, "torch.int32"),
    "shapes": ({"e": torch.ones(6, 3)}, r"\(4,\) and \(3,\)"),
    "two id dtypes": ({"indices": torch.zeros(6, dtype=torch.int32)}, "torch.int32"),
    "a float indptr": ({"indptr": torch.tensor([0.0, 6.0])}, "indptr has dtype torch.float32"),
    "an empty indptr": ({"indptr": torch.empty(0, dtype=torch.int64)}, "indptr"),
    "a matrix of ids": ({"eids": torch.zeros(6, 1, dtype=torch.int64)}, r"\(6, 1\)"),
    "more edges than sources": ({"eids": torch.zeros(7, dtype=torch.int64)}, "6 sources"),
    "too few edges": ({"e": torch.ones(5, 4), "eids": None}, "e has 5 rows"),
    "two devices": ({"u": torch.ones(5, 4, device="meta")}, "meta"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_inputs(what):
    changed, message = BAD[what]
    good = {
        "indptr": torch.tensor([0, 6]),
        "indices": torch.zeros(6, dtype=torch.int64),
        "eids": torch.arange(6),
        "u": torch.ones(5, 4),
        "e": torch.ones(6, 4),
        "op": "mul",
        "reduce": "sum",
    }
    spmm(**good)
    with pytest.raises(InvalidInputError, match=message):
        spmm(**(good | changed))


@pytest.mark.parametrize("op", ["copy_lhs", "mul", "copy_rhs"])
def test_sums_are_added(op):
    indptr, indices, eids = graph(GRAPHS["many rows"])
    u, e = rows_for(len(indices), (6,), (1,), torch.float64)
    total = spmm(indptr, indices, eids, u, e, op, "sum")[0]
    before = torch.randn(total.shape, dtype=total.dtype)
    out = before.clone()
    add_spmm(out, indptr, indices, eids, u, e, op)
    torch.testing.assert_close(out, before + total)


def test_bad_outputs():
    indptr, indices = torch.tensor([0, 2]), torch.tensor([0, 1])
    u = torch.ones(2, 8)
    for out in (
        torch.zeros(2, 8),
        torch.zeros(1, 7),
        torch.zeros(1, 8, dtype=torch.float64),
        torch.zeros(1, 16)[:, ::2],
        torch.zeros(9)[1:].view(1, 8),
    ):
        with pytest.raises(InvalidInputError, match="add sums of messages: out "):
            add_spmm(out, indptr, indices, None, u, None, "copy_lhs")

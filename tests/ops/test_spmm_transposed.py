"""The transposed sparse-dense product, against plain torch and the product itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import spmm, spmm_transposed
from dgl_mgpu.ops.spmm_transposed import OPS
from tests.ops.test_spmm import DTYPES, GRAPHS, SHAPES, SOURCES, graph


def rows_for(indptr, v_shape, e_shape, dtype, seed=3):
    """Values of rows and edges, of both signs."""
    draw = torch.Generator().manual_seed(seed)

    def rows(count, shape):
        return torch.randn(count, *shape, generator=draw, dtype=torch.float64).to(dtype)

    return rows(len(indptr) - 1, v_shape), rows(int(indptr[-1]), e_shape)


def expected(indptr, indices, eids, v, e, op):
    """The product in float64, and of absolute values."""
    rows = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff().long())
    left = 1 if op == "copy_rhs" else v.double()[rows]
    right = 1 if op == "copy_lhs" else e.double() if eids is None else e.double()[eids.long()]
    if op == "mul":
        dims = max(left.dim(), right.dim())
        left, right = (
            each.reshape(len(rows), *[1] * (dims - each.dim()), *each.shape[1:])
            for each in (left, right)
        )
    messages = left * right
    zeros = messages.new_zeros(SOURCES, *messages.shape[1:])
    return [zeros.index_add(0, indices.long(), each) for each in (messages, messages.abs())]


def assert_product(out, indptr, indices, eids, v, e, op):
    """That ``out`` is the product of these."""
    exact, size = expected(indptr, indices, eids, v, e, op)
    assert out.dtype == v.dtype and out.shape == exact.shape
    # Errors of sums grow with what is summed up, not with what remains.
    step = torch.finfo(torch.float64 if v.dtype == torch.float64 else torch.float32).eps
    bound = 200 * step * size + torch.finfo(v.dtype).eps * exact.abs()
    assert ((out.double() - exact).abs() <= bound).all()


def check(indptr, indices, eids, v, e, op):
    out = spmm_transposed(indptr, indices, eids, v, e, SOURCES, op)
    assert_product(out, indptr, indices, eids, v, e, op)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_graphs(name, id_dtype, permuted, op):
    indptr, indices, eids = graph(GRAPHS[name], id_dtype, permuted)
    check(indptr, indices, eids, *rows_for(indptr, (3,), (3,), torch.float32), op)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("v_shape", "e_shape"), SHAPES)
def test_shapes(dtype, v_shape, e_shape):
    indptr, indices, eids = graph(GRAPHS["rows without entries"])
    for op in OPS:
        check(indptr, indices, eids, *rows_for(indptr, v_shape, e_shape, dtype), op)


def test_more_entries_than_are_taken_at_a_time():
    indptr, indices, eids = graph([70_000, 0, 70_000, 3])
    check(indptr, indices, eids, *rows_for(indptr, (2,), (1,), torch.float32), "mul")


def test_one_rounding_of_half_sums():
    # Rounded after each step, the small ones would be lost.
    for dtype in (torch.float16, torch.bfloat16):
        v = torch.tensor([[256.0], [0.25]], dtype=dtype)
        indptr, indices = torch.tensor([0, 1, 4001]), torch.zeros(4001, dtype=torch.int64)
        out = spmm_transposed(indptr, indices, None, v, None, 1, "copy_lhs")
        assert out.item() == torch.tensor(1256.0).to(dtype)


def test_it_is_the_transposed_product():
    indptr, indices, eids = graph(GRAPHS["many rows"])
    v, e = rows_for(indptr, (4, 3), (4, 1), torch.float64)
    u = torch.randn(SOURCES, 4, 3, dtype=torch.float64)
    # <A u, v> is <u, A^T v>.
    one = (spmm(indptr, indices, eids, u, e, "mul", "sum")[0] * v).sum()
    other = (u * spmm_transposed(indptr, indices, eids, v, e, SOURCES, "mul")).sum()
    torch.testing.assert_close(one, other)


def test_random_graphs():
    random = np.random.default_rng(5)
    for seed in range(20):
        degrees = np.minimum(random.pareto(0.8, random.integers(1, 40)), 500).astype(int)
        indptr, indices, eids = graph(degrees.tolist(), permuted=seed % 2 == 0, seed=seed)
        shapes = SHAPES[random.integers(len(SHAPES))]
        rows = rows_for(indptr, *shapes, torch.float64)
        check(indptr, indices, eids, *rows, OPS[random.integers(len(OPS))])


def test_operands_of_any_layout():
    indptr, indices, eids = graph(GRAPHS["many rows"])
    v, e = rows_for(indptr, (6, 4), (6, 4), torch.float32)
    spread = [ids.repeat_interleave(2)[::2] for ids in (indptr, indices, eids)]
    check(*spread, v[:, ::2], e.transpose(1, 2)[:, :3, :4], "mul")


def test_the_schema():
    indptr, indices, eids = graph(GRAPHS["many rows"])
    v, e = rows_for(indptr, (4, 3), (4, 1), torch.float32)
    for operands, shape in (((v, e), [4, 3]), ((v, None), [4, 3]), ((None, e), [4, 1])):
        torch.library.opcheck(
            torch.ops.dgl_mgpu.spmm_transposed.default,
            (indptr, indices, eids, *operands, SOURCES, shape),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_deterministic_algorithms_are_the_cpus():
    indptr, indices, eids = graph(GRAPHS["hub"])
    v, e = rows_for(indptr, (3,), (1,), torch.float32)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            spmm_transposed(indptr, indices, eids, v, e, SOURCES, "mul") for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(before)
    assert torch.equal(first, second)


BAD = {
    "an unknown op": ({"op": "add"}, "op='add'"),
    "no v": ({"v": None}, "v is None"),
    "no e": ({"e": None}, "e is None"),
    "no indices": ({"indices": None}, "indices is None"),
    "too few rows": ({"v": torch.ones(2, 4)}, "v has 2 rows, but the matrix has 1"),
    "two dtypes": ({"e": torch.ones(6, 4).double()}, "float32 and torch.float64"),
    "shapes": ({"e": torch.ones(6, 3)}, r"\(4,\) and \(3,\)"),
    "two id dtypes": ({"indices": torch.zeros(6, dtype=torch.int32)}, "torch.int32"),
    "too few edges": ({"e": torch.ones(5, 4), "eids": None}, "e has 5 rows"),
    "a negative size": ({"num_cols": -1}, "num_cols is -1"),
    "two devices": ({"v": torch.ones(1, 4, device="meta")}, "meta"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_inputs(what):
    changed, message = BAD[what]
    good = {
        "indptr": torch.tensor([0, 6]),
        "indices": torch.zeros(6, dtype=torch.int64),
        "eids": torch.arange(6),
        "v": torch.ones(1, 4),
        "e": torch.ones(6, 4),
        "num_cols": 3,
        "op": "mul",
    }
    spmm_transposed(**good)
    with pytest.raises(InvalidInputError, match=message):
        spmm_transposed(**(good | changed))

"""Segments against DGL's C++, and products against plain matrix products."""

from __future__ import annotations

import dgl
import pytest
import torch
from dgl import backend as F
from dgl.backend.pytorch import sparse

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.message_passing import segment

NULL = torch.empty(0, dtype=torch.int64)
LENGTHS = {
    "some": [3, 0, 1, 6, 0],
    "one": [10],
    "all empty": [0, 0, 0],
    "none": [],
    "many": [1, 2] * 40,
    "skewed": [1, 500, 0, 2],
}
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Close as sums go: what is lost is in proportion to the largest."""
    tolerance = dict(TOLERANCE[found.dtype])
    if expected.numel() and expected.isfinite().any():
        tolerance["atol"] *= max(1.0, expected[expected.isfinite()].abs().max().item())
    torch.testing.assert_close(found, expected.to(found.dtype), equal_nan=True, **tolerance)


def both(function):
    """What DGL's C++ gives, and what this package does."""
    expected = function()
    with tensor_backed_graphs():
        return expected, function()


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("row_shape", [(), (1,), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_segment_reduce_is_that_of_dgl_with_ties(op, lengths, row_shape, idtype):
    torch.manual_seed(0)
    # Few values: many are equally large.
    feat = torch.randint(-2, 3, (sum(lengths), *row_shape)).float()
    offsets = offsets_of(lengths, idtype)
    (out, arg), (our_out, our_arg) = both(lambda: sparse._segment_reduce(op, feat, offsets))
    assert torch.equal(our_out, out)
    assert (our_arg is None and arg is None) or torch.equal(our_arg, arg)


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins_no_segment(op):
    feat = torch.tensor([[1.0, float("nan")], [2.0, float("nan")], [float("nan"), 0.5]])
    (out, arg), (our_out, our_arg) = both(
        lambda: sparse._segment_reduce(op, feat, torch.tensor([0, 2, 3]))
    )
    assert torch.equal(our_out, out) and torch.equal(our_arg, arg)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_segment_reduce_of_every_element_type(op, dtype):
    torch.manual_seed(0)
    feat = torch.randn(600, 5).to(dtype)
    lengths = [0, 500, 99, 1]
    with tensor_backed_graphs():
        out, arg = sparse._segment_reduce(op, feat, offsets_of(lengths))
    parts = feat.double().split(lengths)
    worst = {"sum": 0.0, "max": -float("inf"), "min": float("inf")}[op]
    for place, part in enumerate(parts):
        if not len(part):
            assert (out[place] == worst).all() and (arg is None or (arg[place] == -1).all())
        elif op == "sum":
            assert_close(out[place], part.sum(0))
        else:
            assert torch.equal(out[place].double(), getattr(part, op)(0).values)
            assert torch.equal(feat[arg[place], torch.arange(5)], out[place])


@pytest.mark.parametrize("reducer", ["sum", "mean", "max", "min"])
def test_gradients_of_segment_reduce_are_those_of_dgl(reducer):
    torch.manual_seed(0)
    lengths = torch.tensor(LENGTHS["some"])
    values = torch.randint(0, 4, (10, 3)).float()
    weights = torch.randn(5, 3)

    def gradient():
        x = values.clone().requires_grad_()
        out = dgl.ops.segment_reduce(lengths, x, reducer)
        (out * weights).sum().backward()
        return out.detach(), x.grad

    (out, grad), (our_out, our_grad) = both(gradient)
    assert_close(our_out, out)
    assert_close(our_grad, grad)


@pytest.mark.parametrize("lengths", [[2, 3], [4], [4, -1], [-1, 4], [0, 0, 9]], ids=str)
@pytest.mark.parametrize("reducer", ["sum", "mean", "max"])
def test_segments_beyond_the_rows_are_refused(lengths, reducer):
    with tensor_backed_graphs(), pytest.raises(dgl.DGLError, match="lengths") as raised:
        dgl.ops.segment_reduce(torch.tensor(lengths), torch.ones(3, 2), reducer)
    assert isinstance(raised.value, InvalidInputError)


def test_rows_after_the_last_segment_are_in_none():
    values = torch.rand(7, 2)
    expected, found = both(lambda: dgl.ops.segment_reduce(torch.tensor([2, 0, 3]), values))
    assert torch.equal(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_segments_beyond_the_rows_have_those_that_there_are_on_a_gpu():
    values = torch.arange(6.0, device="cuda").view(3, 2)
    found = dgl.ops.segment_reduce(torch.tensor([2, 1000], device="cuda"), values)
    assert found.tolist() == [[2, 4], [4, 5]]


def test_an_unknown_reducer_is_refused():
    with pytest.raises(InvalidInputError, match="median"):
        segment.segment_reduce("median", torch.ones(1), offsets_of([1]), torch.ones(1), NULL)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_scatter_add_sums_rows_of_one_index(dtype):
    torch.manual_seed(0)
    x, idx = torch.randn(2000, 3).to(dtype), torch.randint(0, 4, (2000,))
    with tensor_backed_graphs():
        out = sparse._scatter_add(x, idx, 6)
    assert_close(out, torch.zeros(6, 3, dtype=torch.float64).index_add_(0, idx, x.double()))


def test_gradients_of_scatter_add_are_those_of_dgl():
    torch.manual_seed(0)
    x, idx, weights = torch.randn(20, 2), torch.randint(0, 5, (20,)), torch.randn(5, 2)

    def gradient():
        leaf = x.clone().requires_grad_()
        out = F.scatter_add(leaf, idx, 5)
        (out * weights).sum().backward()
        return out.detach(), leaf.grad

    (out, grad), (our_out, our_grad) = both(gradient)
    assert_close(our_out, out)
    assert_close(our_grad, grad)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64])
def test_segment_mm_and_its_gradients_are_those_of_a_product_a_segment(
    lengths, dtype, lengths_dtype
):
    torch.manual_seed(0)
    a = torch.randn(sum(lengths), 5).to(dtype).requires_grad_()
    b = torch.randn(len(lengths), 5, 7).to(dtype).requires_grad_()
    # As DGL calls it for CUDA tensors; on the CPU it has a loop of its own.
    out = sparse_on_tensors(sparse.SEGMENTMM, a, b, torch.tensor(lengths, dtype=lengths_dtype))
    wide_a, wide_b = (x.detach().double().requires_grad_() for x in (a, b))
    parts = [x @ m for x, m in zip(wide_a.split(lengths), wide_b, strict=True)]
    expected = torch.cat([*parts, wide_a[:0] @ wide_a.new_empty(5, 7)])
    assert_close(out, expected)
    weights = torch.randn(out.shape).to(dtype)
    with tensor_backed_graphs():
        out.backward(weights)
    expected.backward(weights.double())
    assert_close(a.grad, wide_a.grad)
    if lengths:
        assert_close(b.grad, wide_b.grad)


def sparse_on_tensors(function, *arguments):
    with tensor_backed_graphs():
        return function.apply(*arguments)


@pytest.mark.parametrize("lengths", [[3, 2], [3, 2, 1, 0], [3, 3, 3], [3, -1, 4]], ids=str)
def test_lengths_that_do_not_fit_are_refused(lengths):
    a, b, out = torch.ones(6, 2), torch.ones(3, 2, 4), torch.ones(6, 4)
    with pytest.raises(InvalidInputError, match="segment_mm"):
        segment.segment_mm(a, b, out, torch.tensor(lengths), False, False)
    with pytest.raises(InvalidInputError, match="backward"):
        segment.segment_mm_backward_b(a, out, b, torch.tensor(lengths))


INDICES = {
    "random": lambda n, r: torch.randint(0, r, (n,)),
    "sorted": lambda n, r: torch.randint(0, r, (n,)).sort().values,
    "one matrix": lambda n, r: torch.full((n,), r - 1),
    "one is rare": lambda n, r: (torch.arange(n) == n // 2).long() * (r - 1),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize(
    ("count", "matrices"), [(0, 3), (1, 1), (5, 50), (700, 3), (1000, 1)], ids=str
)
def test_gather_mm_and_its_gradients_are_those_of_a_product_a_row(count, matrices, kind, dtype):
    torch.manual_seed(0)
    a = torch.randn(count, 6).to(dtype).requires_grad_()
    b = torch.randn(matrices, 6, 4).to(dtype).requires_grad_()
    idx_b = INDICES[kind](count, matrices)
    out = sparse_on_tensors(sparse.GATHERMM, a, b, None, idx_b)
    wide_a, wide_b = (x.detach().double().requires_grad_() for x in (a, b))
    expected = torch.einsum("nk,nkm->nm", wide_a, wide_b[idx_b])
    assert_close(out, expected)
    weights = torch.randn(out.shape).to(dtype)
    with tensor_backed_graphs():
        out.backward(weights)
    expected.backward(weights.double())
    assert_close(a.grad, wide_a.grad)
    assert_close(b.grad, wide_b.grad)
    by_type = segment.ProductsByType.apply(a, b, idx_b)
    assert_close(by_type, expected)
    gradients = torch.autograd.grad(by_type, (a, b), weights)
    assert_close(gradients[0], wide_a.grad)
    assert_close(gradients[1], wide_b.grad)


@pytest.mark.parametrize("with_b", [True, False])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_gather_mm_takes_rows_by_index_too(with_b, idtype):
    torch.manual_seed(0)
    a = torch.randn(8, 3, requires_grad=True)
    b = torch.randn(30, 3, 2, requires_grad=True)
    idx_a = torch.randint(0, 8, (30,), dtype=idtype)
    idx_b = torch.randint(0, 30, (30,), dtype=idtype) if with_b else None
    out = sparse_on_tensors(sparse.GATHERMM, a, b, idx_a, idx_b)
    wide_a, wide_b = (x.detach().clone().requires_grad_() for x in (a, b))
    expected = torch.bmm(wide_a[idx_a.long()][:, None], wide_b if idx_b is None else wide_b[idx_b])
    assert_close(out, expected[:, 0])
    with tensor_backed_graphs():
        out.square().sum().backward()
    expected.square().sum().backward()
    assert_close(a.grad, wide_a.grad)
    assert_close(b.grad, wide_b.grad)


def test_products_are_added_to_what_is_there():
    a, b = torch.ones(4, 2), torch.ones(1, 2, 3)
    out = torch.full((2, 3), 10.0)
    zeros = torch.zeros(4, dtype=torch.int64)
    segment.gather_mm_scatter(a, b, out, NULL, zeros, torch.tensor([0, 1, 1, 1]))
    assert out.tolist() == [[12.0] * 3, [16.0] * 3]

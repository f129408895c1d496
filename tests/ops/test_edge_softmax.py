"""Softmax over the entries of rows against torch's, row by row, and against DGL's C++."""

from __future__ import annotations

from itertools import pairwise

import dgl
import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import edge_softmax, edge_softmax_backward

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INF = float("inf")


def rows_of(degrees: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([0, *degrees]).cumsum(0).to(dtype)


def row_by_row(
    indptr: torch.Tensor, eids: torch.Tensor | None, scores: torch.Tensor
) -> torch.Tensor:
    """Torch's own softmax, differentiable."""
    order = torch.arange(len(scores)) if eids is None else eids.long()
    entries = scores[order].double()
    rows = [entries[first:last].softmax(0) for first, last in pairwise(indptr.tolist())]
    softened = torch.cat(rows) if rows else entries
    return torch.zeros_like(softened).index_copy(0, order, softened)


GRAPHS = {
    "no rows": [],
    "no edges": [0, 0, 0],
    "one row": [5],
    "empty rows": [0, 3, 0, 0, 1, 7, 0],
    "a hub": [1, 2, 900, 0, 3],
}


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (0,)])
@pytest.mark.parametrize("graph", GRAPHS)
def test_against_torch(graph, shape, dtype, shuffled):
    torch.manual_seed(0)
    for id_dtype in (torch.int32, torch.int64):
        indptr = rows_of(GRAPHS[graph], id_dtype)
        count = int(indptr[-1])
        eids = torch.randperm(count).to(id_dtype) if shuffled else None
        scores = (5 * torch.randn(count, *shape)).to(dtype).requires_grad_()
        expected = row_by_row(indptr, eids, scores)
        found = edge_softmax(indptr, eids, scores.detach())
        assert found.dtype == dtype
        rounding = torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-7)
        grad = torch.randn(count, *shape).to(dtype)
        # The gradient takes the result as it was rounded.
        held = found.double()
        sums = row_sums(indptr, eids, held * grad.double())
        gradient = edge_softmax_backward(indptr, eids, found, grad)
        torch.testing.assert_close(
            gradient.double(), held * (grad.double() - sums), rtol=rounding, atol=1e-6
        )
        if dtype == torch.float64:
            (by_torch,) = torch.autograd.grad(expected, scores, grad)
            torch.testing.assert_close(gradient, by_torch)


def row_sums(indptr: torch.Tensor, eids: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """For each edge the sum over its row."""
    order = torch.arange(len(values)) if eids is None else eids.long()
    sums = torch.zeros_like(values)
    for first, last in pairwise(indptr.tolist()):
        sums[order[first:last]] = values[order[first:last]].sum(0)
    return sums


def test_the_gradient_by_finite_differences():
    torch.manual_seed(0)
    indptr, step = rows_of([3, 0, 1, 6]), 1e-6
    eids = torch.randperm(10)
    scores, grad = torch.randn(10, 2).double(), torch.randn(10, 2).double()
    found = edge_softmax_backward(indptr, eids, edge_softmax(indptr, eids, scores), grad)
    for place in range(scores.numel()):
        change = torch.zeros(20).double()
        change[place] = step
        more, less = (
            (edge_softmax(indptr, eids, scores + sign * change.view(10, 2)) * grad).sum()
            for sign in (1, -1)
        )
        assert float(found.view(-1)[place]) == pytest.approx(
            float(more - less) / (2 * step), abs=1e-8
        )


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_against_dgl(idtype):
    torch.manual_seed(0)
    src, dst = torch.randint(0, 30, (2, 300))
    graph = dgl.graph((src, dst), num_nodes=40, idtype=idtype)  # with loops and repeated edges
    indptr, _, eids = graph.adj_tensors("csc")
    for dtype in (torch.float32, torch.float64):
        scores = torch.randn(300, 3, 2, dtype=dtype)
        scores[::7] = -INF
        scores[(dst == dst[0]).nonzero()[:, 0]] = -INF  # a row of nothing else
        scores[(dst == dst[1]).nonzero()[:1, 0]] = INF
        scores = scores.requires_grad_()
        expected = dgl.ops.edge_softmax(graph, scores)
        found = edge_softmax(indptr, eids, scores.detach())
        assert found.isnan().any()
        torch.testing.assert_close(found, expected.detach(), equal_nan=True)
        grad = torch.randn_like(found)
        (by_dgl,) = torch.autograd.grad(expected, scores, grad)
        gradient = edge_softmax_backward(indptr, eids, found, grad)
        torch.testing.assert_close(gradient, by_dgl, equal_nan=True)


def test_large_scores_do_not_overflow():
    indptr, scores = rows_of([2, 3]), torch.tensor([1e4, 1e4 - 1, -1e4, -1e4, -2e4])
    found = edge_softmax(indptr, None, scores)
    e = torch.tensor(1.0).exp()
    torch.testing.assert_close(found, torch.tensor([e / (1 + e), 1 / (1 + e), 0.5, 0.5, 0.0]))


def test_scores_that_are_not_contiguous():
    indptr, scores = rows_of([2, 3]), torch.randn(3, 5).T
    assert torch.equal(
        edge_softmax(indptr, None, scores), edge_softmax(indptr, None, scores.contiguous())
    )


@pytest.mark.parametrize(
    ("indptr", "eids", "scores", "message"),
    [
        (torch.zeros(3), None, torch.zeros(0), "indptr has shape"),
        (torch.zeros(0, dtype=torch.int64), None, torch.zeros(0), "indptr has shape"),
        (torch.zeros(1, 2, dtype=torch.int64), None, torch.zeros(0), "indptr has shape"),
        (rows_of([2]), None, torch.zeros(2, dtype=torch.int64), "dtype torch.int64"),
        (rows_of([1]), None, torch.tensor(1.0), r"scores has shape \(\)"),
        (rows_of([2]), torch.arange(3), torch.zeros(2), r"eids has shape \(3,\)"),
        (rows_of([2]), torch.arange(2).int(), torch.zeros(2), "dtype torch.int32"),
        (rows_of([2]), None, torch.zeros(3), "from 0 to 2 does not rise from 0 to 3"),
        (rows_of([2, -1]), None, torch.zeros(1), "rises"),
    ],
)
def test_what_does_not_fit(indptr, eids, scores, message):
    with pytest.raises(InvalidInputError, match=message):
        edge_softmax(indptr, eids, scores)
    if scores.dim():
        with pytest.raises(InvalidInputError, match=message):
            edge_softmax_backward(indptr, eids, scores, scores)


@pytest.mark.parametrize("grad", [torch.zeros(3, 1), torch.zeros(2, 1).double()])
def test_a_gradient_that_does_not_fit(grad):
    with pytest.raises(InvalidInputError, match="grad has shape"):
        edge_softmax_backward(rows_of([2]), None, torch.zeros(2, 1), grad)


def test_registration():
    indptr, scores = rows_of([2, 0, 3]), torch.randn(5, 4)
    for eids in (None, torch.randperm(5)):
        torch.library.opcheck(torch.ops.dgl_mgpu.edge_softmax.default, (indptr, eids, scores))
        torch.library.opcheck(
            torch.ops.dgl_mgpu.edge_softmax_backward.default, (indptr, eids, scores, scores)
        )

"""The CUDA kernels of softmax over the entries of rows, against the CPU's in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.ops import edge_softmax, edge_softmax_backward
from dgl_mgpu.ops.edge_softmax import _edge_softmax_backward_cuda, _edge_softmax_cuda
from tests.ops.test_edge_softmax import DTYPES, INF, rows_of

#: Entries that a block takes of one column.
SHARE = 256 * 17


def degrees(kind: str) -> list[int]:
    random = np.random.default_rng(1)
    if kind == "skewed":
        return (3 * random.random(400) ** (-1 / 1.5)).astype(int).clip(max=3 * SHARE).tolist()
    if kind == "mostly empty":
        return [2 if i % 1500 == 0 else 0 for i in range(9000)]
    return {
        "a hub": [3, 0, 3 * SHARE + 5, 0, 1, 2],
        "one entry": [1],
        "single entries": [1] * 3000,
        # Rows that end, and begin, where shares of 8 columns do.
        "at bounds": [543, 542, 0, 1085, 544, 0, 0, 1630, 543, 0],
    }[kind]


KINDS = ("skewed", "mostly empty", "a hub", "one entry", "single entries", "at bounds")


def on(where: torch.device, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.to(where) for tensor in tensors]


def check(where, indptr, eids, scores, rounding) -> None:
    exact = edge_softmax(indptr, eids, scores.double())
    found = _edge_softmax_cuda(*on(where, indptr, eids, scores)).cpu()
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=1e-7, equal_nan=True)
    grad = torch.randn(scores.shape).to(scores.dtype)
    exact = edge_softmax_backward(indptr, eids, found.double(), grad.double())
    gradient = _edge_softmax_backward_cuda(*on(where, indptr, eids, found, grad)).cpu()
    torch.testing.assert_close(gradient.double(), exact, rtol=rounding, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_length(where, kind, shuffled):
    torch.manual_seed(0)
    indptr = rows_of(degrees(kind), torch.int32)
    count = int(indptr[-1])
    eids = torch.randperm(count).int() if shuffled else None
    check(where, indptr, eids, 5 * torch.randn(count, 8), 2e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "id_dtype"),
    [
        ((), torch.float32, torch.int64),
        ((2,), torch.float64, torch.int32),
        ((3,), torch.float16, torch.int32),
        ((4,), torch.bfloat16, torch.int64),
        ((2, 5), torch.float32, torch.int32),
    ],
)
def test_shapes_and_dtypes(where, shape, dtype, id_dtype):
    torch.manual_seed(0)
    indptr = rows_of(degrees("skewed"), id_dtype)
    count = int(indptr[-1])
    scores = (5 * torch.randn(count, *shape)).to(dtype)
    rounding = 1.01 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 2e-5
    check(where, indptr, torch.randperm(count).to(id_dtype), scores, rounding)


def test_scores_that_are_infinite(where):
    torch.manual_seed(0)
    indptr = rows_of([3000, 5, 0, 2000, 4, 3000, 3000, 7])
    scores = 1000 * torch.randn(int(indptr[-1]), 8)
    first = indptr.tolist()
    scores[: first[1] - 100] = -INF  # only the last share has others
    scores[first[3] : first[5]] = -INF  # whole rows
    scores[first[5] + 50] = INF
    scores[first[6] + 50, 2] = float("nan")
    check(where, indptr, None, scores, 2e-4)


def test_bits_do_not_change(where):
    indptr, scores = rows_of(degrees("a hub")), torch.randn(3 * SHARE + 11, 8)
    arguments = on(where, indptr, None, scores)
    assert torch.equal(_edge_softmax_cuda(*arguments), _edge_softmax_cuda(*arguments))


@pytest.mark.parametrize("shape", [(0, 4), (5, 0)])
def test_nothing_to_do(where, shape):
    indptr, scores = rows_of([shape[0], 0]).to(where), torch.zeros(shape, device=where)
    assert _edge_softmax_cuda(indptr, None, scores).shape == shape
    assert _edge_softmax_backward_cuda(indptr, None, scores, scores).shape == shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operators_find_their_kernels(dtype):
    indptr, scores = rows_of(degrees("skewed")), None
    scores = torch.randn(int(indptr[-1]), 4).to(dtype)
    exact = edge_softmax(indptr, None, scores.double())
    found = edge_softmax(indptr.cuda(), None, scores.cuda())
    rounding = torch.finfo(dtype).eps if dtype.itemsize == 2 else 2e-5
    torch.testing.assert_close(found.cpu().double(), exact, rtol=rounding, atol=1e-7)

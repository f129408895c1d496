"""Reductions and softmax of non-zeros."""

from __future__ import annotations

import dgl
import dgl.sparse as dglsp
import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from tests.graph.sparse.matrices import DEVICES, FORMATS, SHAPES, Case, make, same_gradients

#: What torch calls each.
NAMES = {"sum": "sum", "smin": "amin", "smax": "amax", "smean": "mean", "sprod": "prod"}


def groups(case: Case, dim: int | None) -> list[torch.Tensor]:
    """Values of the non-zeros of each column (``dim=0``) or row (``dim=1``), or all."""
    if dim is None:
        return [case.value]
    index = case.sparse.col if dim == 0 else case.sparse.row
    return [case.value[index == i] for i in range(case.sparse.shape[1 - dim])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("nnz", [0, 14])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_reductions(form, shape, nnz, width, device):
    case = make(form, shape, nnz, width, duplicates=True, device=device)
    for name, in_torch in NAMES.items():
        for dim in (0, 1, None):
            nothing = 0 * case.value.sum(0)
            parts = [
                getattr(part, in_torch)(0) if len(part) else nothing for part in groups(case, dim)
            ]
            expected = parts[0] if dim is None else torch.stack(parts)
            out = dglsp.reduce(case.sparse, dim, name)
            same_gradients(out, expected, case.value)
            torch.testing.assert_close(getattr(case.sparse, name)(dim), out)


def test_gradients_are_shared_among_several_that_are_the_largest():
    value = torch.tensor([2.0, 2.0, 1.0, 5.0], requires_grad=True)
    matrix = dglsp.spmatrix(torch.tensor([[0, 0, 0, 1], [0, 1, 2, 0]]), value)
    matrix.smax(1).sum().backward()
    assert value.grad.tolist() == [0.5, 0.5, 0, 1]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["sum", "smin", "smax", "sprod"])
def test_reductions_of_integers(name, dim):
    case = make("coo", (4, 5), 12, dtype=torch.int64)
    parts = [getattr(part, NAMES[name])(0) for part in groups(case, dim) if len(part)]
    out = case.sparse.reduce(dim, name)
    assert out.dtype == torch.int64 and out[out != 0].tolist() == torch.stack(parts).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reductions_of_half_types_are_made_in_single_precision(dtype):
    """Of a row so long that neither its sum nor its length is a number of the dtype's own."""
    count = 70_001
    indices = torch.stack([torch.zeros(count, dtype=torch.int64), torch.arange(count)])
    matrix = dglsp.spmatrix(indices, torch.full((count,), 0.75, dtype=dtype))
    assert matrix.smean(1).tolist() == [0.75]
    half = dglsp.val_like(matrix, matrix.val / 2)
    assert half.sum(1) == torch.tensor([count * 0.375]).to(dtype)


def test_what_cannot_be_reduced():
    matrix = make("coo", (4, 5), dtype=torch.int64).sparse
    with pytest.raises(InvalidInputError, match="dim=2"):
        matrix.sum(2)
    with pytest.raises(InvalidInputError, match="median"):
        matrix.reduce(0, "median")
    with pytest.raises(InvalidInputError, match="which has no mean"):
        matrix.smean()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("nnz", [0, 1, 14])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax(dim, form, nnz, width, device):
    case = make(form, (6, 5), nnz, width, duplicates=True, device=device)
    out = case.sparse.softmax(dim)
    assert out.indices() is case.sparse.indices()
    index = case.sparse.col if dim == 0 else case.sparse.row
    expected = torch.zeros_like(case.value)
    for i in index.unique():
        at = index == i
        expected = expected.index_put((at,), case.value[at].softmax(0))
    same_gradients(out.val, expected + 0 * case.value, case.value)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("width", [None, 3])
def test_gradients_of_a_softmax_can_be_differentiated_again(width, dim):
    case = make("coo", (4, 5), 9, width)

    def softmax(value: torch.Tensor) -> torch.Tensor:
        return dglsp.val_like(case.sparse, value / 4).softmax(dim).val

    assert torch.autograd.gradcheck(softmax, (case.value,))
    assert torch.autograd.gradgradcheck(softmax, (case.value,))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float16])
def test_reductions_of_nothing_keep_the_dtype(dtype):
    none = torch.zeros(0, dtype=torch.int64)
    matrix = dglsp.from_coo(none, none, none.to(dtype), (3, 4))
    assert matrix.smax().dtype == matrix.smin().dtype == dtype and not matrix.smax()


def test_softmax_is_dgls_edge_softmax():
    case = make("coo", (6, 6), 20)
    graph = dgl.graph((case.sparse.col, case.sparse.row), num_nodes=6)
    expected = dgl.nn.functional.edge_softmax(graph, case.value)
    same_gradients(case.sparse.softmax().val, expected, case.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_softmax_of_large_numbers(dtype):
    indices = torch.tensor([[0, 0, 1], [0, 1, 1]])
    matrix = dglsp.spmatrix(indices, torch.tensor([1e4, 1e4, -1e4], dtype=dtype))
    assert matrix.softmax().val.tolist() == [0.5, 0.5, 1]
    assert matrix.softmax().dtype == dtype


def test_what_has_no_softmax():
    matrix = make("coo", (4, 5), dtype=torch.int64).sparse
    with pytest.raises(InvalidInputError, match="int64"):
        matrix.softmax()
    with pytest.raises(InvalidInputError, match="dim=2"):
        matrix.float().softmax(2)

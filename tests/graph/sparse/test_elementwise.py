"""Operators on non-zeros: of two matrices, and of a matrix and a scalar or a vector."""

from __future__ import annotations

import operator

import dgl.sparse as dglsp
import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from tests.graph.sparse.matrices import DEVICES, FORMATS, SHAPES, make, same_gradients, to_dense


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("other", FORMATS)
@pytest.mark.parametrize("form", FORMATS)
def test_two_matrices(form, other, shape, width, device):
    a = make(form, shape, 9, width, device=device, seed=2)
    b = make(other, shape, 12, width, device=device, seed=3)
    for name in ("add", "sub", "mul"):
        out = getattr(dglsp, name)(a.sparse, b.sparse)
        expected = getattr(operator, name)(a.dense, b.dense)
        same_gradients(to_dense(out), expected, a.value, b.value)
        assert not out.has_duplicate()
        assert out.is_diag() is (form == other == "diag")
        keys = out.row * shape[1] + out.col
        assert (keys[1:] > keys[:-1]).all()


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_quotient_of_matrices_with_non_zeros_at_the_same_places(form, width):
    a = make(form, (5, 6), 11, width)
    order = torch.randperm(a.sparse.nnz, generator=torch.Generator().manual_seed(0))
    divisor = (torch.arange(a.value.numel()) + 1.0).view_as(a.value).double().requires_grad_()
    b = dglsp.spmatrix(a.sparse.indices()[:, order], divisor[order], a.sparse.shape)
    out = a.sparse / b
    assert torch.equal(out.indices(), a.sparse.indices())
    same_gradients(out.val, a.value / divisor, a.value, divisor)


def test_quotient_of_diagonal_matrices_may_be_of_integers():
    out = dglsp.diag(torch.arange(1, 4), (3, 4)) / dglsp.diag(torch.arange(10, 13), (3, 4))
    assert out.is_diag() and out.dtype == torch.float32
    torch.testing.assert_close(out.val, torch.tensor([1 / 10, 2 / 11, 3 / 12]))


@pytest.mark.parametrize("form", ["coo", "csr", "csc"])
def test_duplicates_are_added_up_by_a_sum_and_refused_otherwise(form):
    a = make(form, (3, 4), 20, duplicates=True)
    out = a.sparse + a.sparse
    same_gradients(to_dense(out), 2 * a.dense, a.value)
    assert not out.has_duplicate()
    for op in (operator.mul, operator.truediv):
        with pytest.raises(InvalidInputError, match="coalesce"):
            op(a.sparse, a.sparse)


@pytest.mark.parametrize("nnz", [0, 7])
@pytest.mark.parametrize("form", ["coo", "csr", "csc"])
def test_a_matrix_without_non_zeros(form, nnz):
    empty, other = make(form, (4, 5), 0), make(form, (4, 5), nnz)
    torch.testing.assert_close(to_dense(empty.sparse + other.sparse), other.dense)
    assert (empty.sparse * other.sparse).nnz == (other.sparse * empty.sparse).nnz == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_dtypes(dtype):
    a, b = (make("coo", (5, 6), 12, dtype=dtype, seed=seed) for seed in (0, 1))
    for op in (operator.add, operator.sub, operator.mul):
        out = op(a.sparse, b.sparse)
        assert out.dtype == dtype
        torch.testing.assert_close(to_dense(out), op(a.dense, b.dense))


@pytest.mark.parametrize("scalar", [2, 2.5, torch.tensor(2), torch.tensor(2.5)])
@pytest.mark.parametrize("form", FORMATS)
def test_scalars(form, scalar):
    case = make(form, (5, 6), width=2)
    matrix = case.sparse
    for out, expected in (
        (matrix * scalar, case.value * scalar),
        (scalar * matrix, case.value * scalar),
        (matrix / scalar, case.value / scalar),
        (matrix**scalar, case.value**scalar),
        (-matrix, -case.value),
    ):
        same_gradients(out.val, expected, case.value)
        assert out.indices() is matrix.indices() and out.is_diag() == matrix.is_diag()
    for op in (operator.add, operator.sub):
        for operands in ((matrix, scalar), (scalar, matrix)):
            with pytest.raises(TypeError):
                op(*operands)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv"])
@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.parametrize("form", FORMATS)
def test_vectors(form, width, along, name):
    case = make(form, (4, 7), width=width)
    v = torch.rand(7 if along == 0 else 4, dtype=torch.float64).add(1).requires_grad_()
    shaped = v if along == 0 else v[:, None]
    out = dglsp.sp_broadcast_v(case.sparse, shaped, name)
    at = v[case.sparse.col if along == 0 else case.sparse.row]
    expected = getattr(operator, name)(case.value, at[:, None] if width else at)
    same_gradients(out.val, expected, case.value, v)


def test_inverse():
    case = make("diag", (5, 5))
    inverse = case.sparse.inv()
    product = (inverse @ case.sparse).to_dense()
    torch.testing.assert_close(product, torch.eye(5, dtype=torch.float64))
    same_gradients(to_dense(inverse), torch.linalg.inv(case.dense), case.value)
    for wrong in (make("diag", (4, 5)), make("coo", (5, 5)), make("diag", (5, 5), width=2)):
        with pytest.raises(AssertionError):
            wrong.sparse.inv()


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv])
@pytest.mark.parametrize("form", FORMATS)
def test_matrices_that_do_not_go_together(op, form):
    a = make(form, (4, 5)).sparse
    for other, error in (
        (make(form, (5, 4)).sparse, "shapes"),
        (a.float(), "torch.float32"),
        (make(form, (4, 5), width=2).sparse, "their values have the shapes"),
    ):
        with pytest.raises(InvalidInputError, match=error):
            op(a, other)
    if form != "diag":
        with pytest.raises(InvalidInputError, match="different places"):
            a / make(form, (4, 5), seed=1).sparse

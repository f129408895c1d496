"""Products: sparse with dense, sparse with sparse, and dense with dense at non-zeros."""

from __future__ import annotations

import dgl.sparse as dglsp
import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.sparse import products as sparse_products
from tests.graph.sparse.matrices import DEVICES, FORMATS, SHAPES, make, same_gradients, to_dense


def dense_tensor(*shape: int, device: str = "cpu", seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nnz", [0, 1, 20])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_spmm(form, shape, nnz, device):
    for idtype in (torch.int32, torch.int64):
        a = make(form, shape, nnz, duplicates=True, idtype=idtype, device=device)
        for columns in ((), (1,), (3,)):
            x = dense_tensor(shape[1], *columns, device=device)
            same_gradients(a.sparse @ x, a.dense @ x, a.value, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nnz", [0, 20])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_bspmm(form, shape, nnz, device):
    a = make(form, shape, nnz, 4, duplicates=True, device=device)
    x = dense_tensor(shape[1], 3, 4, device=device)
    expected = torch.einsum("lmk,mnk->lnk", a.dense, x)
    same_gradients(dglsp.bspmm(a.sparse, x), expected, a.value, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nnz", [0, 20])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_sddmm(form, shape, nnz, device):
    a = make(form, shape, nnz, duplicates=True, device=device)
    row, col = a.sparse.coo()
    for x, y in (
        (dense_tensor(shape[0], 3, device=device), dense_tensor(3, shape[1], device=device)),
        (dense_tensor(shape[0], device=device), dense_tensor(shape[1], device=device)),
    ):
        product = x @ y if x.dim() == 2 else x[:, None] * y
        out = dglsp.sddmm(a.sparse, x, y)
        same_gradients(out.val, product[row, col] * a.value, a.value, x, y)
        assert out.indices() is a.sparse.indices()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [None, 4])
@pytest.mark.parametrize("form", FORMATS)
def test_bsddmm(form, width, device):
    a = make(form, (4, 7), 20, width, device=device)
    x, y = dense_tensor(4, 3, 4, device=device), dense_tensor(3, 7, 4, device=device)
    product = torch.einsum("lmk,mnk->lnk", x, y)[a.sparse.row, a.sparse.col]
    expected = product * (a.value if width else a.value[:, None])
    same_gradients(dglsp.bsddmm(a.sparse, x, y).val, expected, a.value, x, y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nnz", [0, 1, 12])
@pytest.mark.parametrize("shapes", [((5, 5), (5, 6)), ((4, 6), (6, 3)), ((6, 4), (4, 7))])
@pytest.mark.parametrize("other", FORMATS)
@pytest.mark.parametrize("form", FORMATS)
def test_spspmm(form, other, shapes, nnz, device):
    a = make(form, shapes[0], nnz, device=device, seed=1)
    b = make(other, shapes[1], 11, device=device, seed=2)
    out = a.sparse @ b.sparse
    same_gradients(to_dense(out), a.dense @ b.dense, a.value, b.value)
    assert out.shape == (shapes[0][0], shapes[1][1])
    assert not out.has_duplicate()
    assert out.is_diag() is (form == other == "diag")
    torch.testing.assert_close(dglsp.matmul(a.sparse, b.sparse).to_dense(), out.to_dense())


def test_spspmm_in_parts(monkeypatch):
    """Whatever of the products is in memory at a time, the result is the same."""
    a, b = make("coo", (30, 40), 300, seed=1), make("csc", (40, 20), 200, seed=2)
    whole = a.sparse @ b.sparse
    for products in (40, 500, 10**6):
        monkeypatch.setattr(sparse_products, "PRODUCTS", products)
        parts = a.sparse @ b.sparse
        assert torch.equal(parts.indices(), whole.indices())
        same_gradients(to_dense(parts), a.dense @ b.dense, a.value, b.value)


def test_a_sum_of_products_that_is_zero_stays_a_non_zero():
    a = dglsp.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([1.0, 1.0]))
    b = dglsp.from_coo(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([1.0, -1.0]))
    assert (a @ b).nnz == 1 and (a @ b).val.tolist() == [0]


@pytest.mark.parametrize("form", ["coo", "csr", "csc"])
def test_a_diagonal_matrix_leaves_the_non_zeros_of_the_other_where_they_are(form):
    a = make(form, (5, 6), duplicates=True).sparse
    left, right = make("diag", (5, 5)).sparse, make("diag", (6, 6)).sparse
    assert (left @ a).indices() is (a @ right).indices() is a.indices()


def test_gradients_can_be_differentiated_again():
    a = make("coo", (4, 5), 9)
    x, y = dense_tensor(5, 2), dense_tensor(4, 2)

    def products(value: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        matrix = dglsp.val_like(a.sparse, value)
        return torch.cat([(matrix @ x).flatten(), dglsp.sddmm(matrix, y, x.T).val])

    assert torch.autograd.gradcheck(products, (a.value, x, y))
    assert torch.autograd.gradgradcheck(products, (a.value, x, y))


def test_gradients_of_a_product_of_sparse_matrices_can_be_differentiated_again():
    a, b = make("coo", (4, 5), 9), make("csr", (5, 4), 8, seed=1)

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (dglsp.val_like(a.sparse, left) @ dglsp.val_like(b.sparse, right)).val

    def scaled(values: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
        matrix = dglsp.val_like(a.sparse, values)
        return (dglsp.diag(diagonal[:4]) @ matrix @ dglsp.diag(diagonal)).val

    for function, inputs in ((product, (a.value, b.value)), (scaled, (a.value, b.value[:5]))):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_many_values_of_half_types(dtype):
    many = torch.arange(5000)
    ones, zeros = torch.ones(5000, dtype=dtype), torch.zeros(5000, dtype=torch.int64)
    duplicates = dglsp.from_coo(zeros, zeros, ones, (1, 1))
    expected = torch.tensor([5000.0]).to(dtype)
    assert duplicates.coalesce().val == expected
    assert (duplicates + duplicates).val == 2 * expected
    diagonal = torch.ones(1, dtype=dtype, requires_grad=True)
    for left, right in (
        (dglsp.diag(diagonal), dglsp.from_coo(zeros, many, ones, (1, 5000))),
        (dglsp.from_coo(many, zeros, ones, (5000, 1)), dglsp.diag(diagonal)),
    ):
        diagonal.grad = None
        (left @ right).val.sum().backward()
        assert diagonal.grad == expected


def test_places_that_cannot_be_numbered_are_refused():
    ends = torch.tensor([0, 2**32 - 1])
    large = dglsp.from_coo(ends, ends, torch.ones(2), (2**32, 2**32))
    tall = dglsp.from_coo(ends, ends % 2, torch.ones(2), (2**32, 2))
    for asked in (large.coalesce, lambda: large + large, lambda: tall @ tall.T):
        with pytest.raises(InvalidInputError, match=r"less than 2\^63 places"):
            asked()


@pytest.mark.parametrize("form", ["coo", "csr", "csc"])
@pytest.mark.parametrize(
    "first", [repr, lambda a: a.coo(), lambda a: a.smax(1), lambda a: a.sum(0), lambda a: a.csc()]
)
def test_a_matrix_used_without_gradients_can_be_trained(form, first):
    """What was made of it then is kept, and saved for backward passes."""
    case = make(form, (4, 5))
    with torch.inference_mode():
        first(case.sparse)
    matrix = dglsp.val_like(case.sparse, case.value)
    diagonal, dense = torch.ones(4, requires_grad=True), dense_tensor(5, 2)
    scaled = dglsp.diag(diagonal.double()) @ matrix
    for each in (scaled.val, matrix.smax(1), matrix.sum(0), matrix.to_dense(), matrix @ dense):
        each.sum().backward()
    assert (matrix.T @ dense_tensor(4, 2)).sum().backward() is None
    assert case.value.grad is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
)
def test_dtypes(dtype, tolerance, device):
    """Against the same numbers in float64."""
    a, b = (
        make("coo", (40, 30), 300, dtype=dtype, device=device),
        make("coo", (30, 20), 200, dtype=dtype, device=device, seed=1),
    )
    x = dense_tensor(30, 8, device=device).to(dtype)
    y, z = (dense_tensor(n, 8, device=device, seed=n).to(dtype) for n in (40, 30))
    for out, expected in (
        (a.sparse @ x, a.dense.double() @ x.double()),
        (to_dense(a.sparse @ b.sparse), a.dense.double() @ b.dense.double()),
        (to_dense(dglsp.sddmm(a.sparse, y, z.T)), a.dense.double() * (y @ z.T).double()),
    ):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_integers_are_multiplied_with_matrices_alone():
    a, b = (make("coo", shape, dtype=torch.int64) for shape in ((4, 5), (5, 4)))
    expected = (a.dense.double() @ b.dense.double()).long()
    assert torch.equal(to_dense(a.sparse @ b.sparse), expected)
    with pytest.raises(InvalidInputError, match="int64"):
        a.sparse @ torch.ones(5, 2, dtype=torch.int64)


def test_matrices_that_cannot_be_multiplied():
    a = make("coo", (4, 5)).sparse
    vectors = make("coo", (4, 5), width=3).sparse
    for matrix, dense in (
        (a, torch.rand(4, 2)),
        (a, torch.rand(5, 2, 3)),
        (a, torch.tensor(1.0)),
        (vectors, torch.rand(5, 2)),
        (vectors, torch.rand(5)),
        (vectors, torch.rand(5, 2, 4)),
    ):
        with pytest.raises(InvalidInputError, match="pass a dense matrix of shape"):
            matrix @ dense.double()
    with pytest.raises(InvalidInputError, match="float32"):
        a @ torch.rand(5, 2)
    with pytest.raises(InvalidInputError, match="meta"):
        a @ torch.rand(5, 2, device="meta", dtype=torch.float64)
    with pytest.raises(AssertionError):
        dglsp.matmul(torch.rand(3, 4), a)
    for b, error in (
        (a, "rows"),
        (make("coo", (5, 4), width=3).sparse, "scalar values"),
        (make("coo", (5, 4), dtype=torch.float32).sparse, "float32"),
        (make("coo", (5, 4), 30, duplicates=True).sparse, "coalesce"),
    ):
        with pytest.raises(InvalidInputError, match=error):
            a @ b
    for x, y in (
        (torch.rand(5, 2), torch.rand(2, 5)),
        (torch.rand(4, 2), torch.rand(3, 5)),
        (torch.rand(4, 2), torch.rand(2, 4)),
        (torch.rand(4, 2, 3), torch.rand(2, 5, 4)),
        (torch.rand(4, 2, 3), torch.rand(2, 5)),
        (torch.rand(4), torch.rand(4)),
    ):
        with pytest.raises(InvalidInputError, match="at the non-zeros"):
            dglsp.sddmm(a, x, y)
    with pytest.raises(InvalidInputError, match="at the non-zeros"):
        dglsp.bsddmm(vectors, torch.rand(4, 2, 4), torch.rand(2, 5, 4))
    with pytest.raises(InvalidInputError, match="float64"):
        dglsp.sddmm(a, torch.rand(4, 2), torch.rand(2, 5).double())

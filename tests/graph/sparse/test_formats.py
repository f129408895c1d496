"""Creation, conversion between formats, and what a matrix tells of itself."""

from __future__ import annotations

import copy
import pickle

import dgl.sparse as dglsp
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from tests.graph.sparse.matrices import DEVICES, FORMATS, SHAPES, make, to_dense

INDICES = torch.tensor([[1, 0, 2], [0, 3, 2]])


def entries(matrix: dglsp.SparseMatrix, form: str) -> list[tuple[int, int, float]]:
    """(row, column, value) of every non-zero as a format has it, in its order."""
    if form == "coo":
        row, col = matrix.coo()
        value = matrix.val
    else:
        indptr, minor, order = getattr(matrix, form)()
        major = torch.arange(len(indptr) - 1, device=minor.device).repeat_interleave(indptr.diff())
        row, col = (major, minor) if form == "csr" else (minor, major)
        value = matrix.val if order is None else matrix.val[order.long()]
    return list(zip(row.tolist(), col.tolist(), value.tolist(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("nnz", [0, 1, 12])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_the_same_non_zeros(form, shape, nnz, idtype, device):
    case = make(form, shape, nnz, duplicates=True, idtype=idtype, device=device)
    matrix = case.sparse
    assert matrix.shape == shape and matrix.device == case.value.device
    assert matrix.val is case.value and matrix.dtype == torch.float64
    assert matrix.nnz == len(case.value)
    in_order = entries(matrix, "coo")
    assert torch.equal(matrix.indices(), torch.stack(matrix.coo()))
    assert entries(matrix, "csr") == sorted(in_order, key=lambda entry: entry[0])
    assert entries(matrix, "csc") == sorted(in_order, key=lambda entry: entry[1])
    assert len(matrix.csr()[0]) == shape[0] + 1 and len(matrix.csc()[0]) == shape[1] + 1


@pytest.mark.parametrize("form", FORMATS)
def test_formats_are_made_once_and_shared_with_what_has_the_same_non_zeros(form):
    matrix = make(form, (5, 6)).sparse
    others = (dglsp.val_like(matrix, torch.rand(matrix.nnz, 2)), -matrix, matrix * 2)
    for other in (matrix, *others):
        assert other.csr()[1] is matrix.csr()[1]
        assert other.csc()[1] is matrix.csc()[1]
        assert other.indices() is matrix.indices()
    assert matrix.T.csc()[1] is matrix.csr()[1]
    assert matrix.T.csr()[1] is matrix.csc()[1]


def test_tensors_that_a_matrix_is_made_of_are_not_copied():
    value = torch.rand(3)
    assert dglsp.spmatrix(INDICES, value).indices() is INDICES
    indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([2, 0, 1])
    for create, form in ((dglsp.from_csr, "csr"), (dglsp.from_csc, "csc")):
        a, b, order = getattr(create(indptr, indices, value), form)()
        assert a is indptr and b is indices and order is None


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0)])
def test_matrices_without_rows_or_columns(shape):
    a = dglsp.spmatrix(torch.zeros(2, 0, dtype=torch.int64), shape=shape)
    assert entries(a, "csr") == entries(a, "csc") == []
    for out in (a + a, a * a, a / a, -a, a.coalesce(), a.softmax(), a.T.T):
        assert out.shape == shape and out.nnz == 0
    assert (a @ a.T).shape == (shape[0], shape[0]) and not a.has_duplicate()
    assert (a @ torch.ones(shape[1], 2)).tolist() == [[0, 0]] * shape[0]
    assert a.sum(1).tolist() == [0] * shape[0] and a.smax(0).tolist() == [0] * shape[1]
    assert a.compact(0)[0].shape == (0, shape[1]) and a.sample(0, 2).shape == shape


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_with_gaps(device):
    """Given with strides, as a part of something larger."""

    def gap(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, tensor + 1], -1)[..., 0].detach()

    case = make("csr", (4, 5), 12, 2, device=device)
    indptr, indices, _ = case.sparse.csr()
    value = gap(case.value).requires_grad_()
    x = gap(torch.rand(5, 3, 2, dtype=torch.float64, device=device))
    expected = torch.einsum("lmk,mnk->lnk", case.dense, x)
    for a in (
        dglsp.spmatrix(gap(case.sparse.indices()), value, (4, 5)),
        dglsp.from_csr(gap(indptr), gap(indices), value, (4, 5)),
        dglsp.from_csc(gap(indptr), gap(indices), value, (5, 4)).T,
    ):
        assert not a.val.is_contiguous()
        torch.testing.assert_close(a @ x, expected)
        torch.testing.assert_close(a.T.softmax(0).val, case.sparse.softmax().val)
        torch.testing.assert_close(a.sum(0), case.dense.sum(0))
        grad = torch.autograd.grad((a @ x).sum(), value)[0]
        expected_grad = torch.autograd.grad((case.sparse @ x).sum(), case.value)[0]
        torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_transposing_exchanges_rows_and_columns_and_keeps_the_order(form, shape, width):
    case = make(form, shape, width=width)
    turned = case.sparse.T
    assert turned.shape == shape[::-1] and turned.val is case.value
    assert torch.equal(turned.indices(), case.sparse.indices().flip(0))
    assert torch.equal(to_dense(turned), case.dense.transpose(0, 1))
    assert turned.is_diag() is case.sparse.is_diag() is (form == "diag")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 3), (3, 5), (5, 3)])
@pytest.mark.parametrize("width", [None, 2])
def test_identity(shape, width, device):
    eye = dglsp.identity(shape, width, dtype=torch.float64, device=device)
    expected = torch.eye(*shape, dtype=torch.float64, device=device)
    for dense in eye.to_dense().unbind(-1) if width else [eye.to_dense()]:
        assert torch.equal(dense, expected)
    assert eye.is_diag() and not eye.has_duplicate()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_exchange_with_torch(layout, form, device):
    case = make(form, (4, 7), device=device)
    theirs = getattr(dglsp, f"to_torch_sparse_{layout}")(case.sparse)
    assert theirs.layout == getattr(torch, f"sparse_{layout}")
    torch.testing.assert_close(theirs.to_dense(), case.dense)
    back = dglsp.from_torch_sparse(theirs)
    torch.testing.assert_close(to_dense(back), case.dense)
    if layout == form:
        assert back.val.data_ptr() == case.value.data_ptr()


@pytest.mark.parametrize("form", FORMATS)
def test_conversion_of_dtype_and_device(form):
    case = make(form, (4, 7))
    for name, dtype in (("float", torch.float32), ("int", torch.int32), ("long", torch.int64)):
        converted = getattr(case.sparse, name)()
        assert converted.dtype == dtype
        torch.testing.assert_close(to_dense(converted), case.dense.to(dtype))
    assert case.sparse.double() is case.sparse
    assert case.sparse.cpu() is case.sparse and case.sparse.to("cpu") is case.sparse
    if torch.cuda.is_available():
        moved = case.sparse.to(device="cuda", dtype=torch.float32)
        assert moved.device.type == "cuda"
        torch.testing.assert_close(to_dense(moved).cpu(), case.dense.float())


@pytest.mark.parametrize("form", FORMATS)
def test_has_duplicate(form):
    assert not make(form, (5, 6)).sparse.has_duplicate()
    if form != "diag":
        assert make(form, (3, 3), 20, duplicates=True).sparse.has_duplicate()
        assert not make(form, (3, 3), 0).sparse.has_duplicate()


@pytest.mark.parametrize("form", FORMATS)
def test_pickling_and_copying(form):
    matrix = make(form, (4, 7)).sparse.float()
    matrix = dglsp.val_like(matrix, matrix.val.detach())
    for again in (pickle.loads(pickle.dumps(matrix)), copy.deepcopy(matrix)):
        assert again.shape == matrix.shape and again.is_diag() == matrix.is_diag()
        assert torch.equal(again.indices(), matrix.indices()) and torch.equal(again.val, matrix.val)


@pytest.mark.parametrize(
    ("indices", "value", "shape", "error"),
    [
        (INDICES, torch.rand(2), (3, 4), "the values have shape"),
        (INDICES, torch.tensor(1.0), (3, 4), "the values have shape"),
        (INDICES.float(), torch.rand(3), (3, 4), "float32"),
        (INDICES.T, torch.rand(3), (3, 4), r"indices have shape \(3, 2\)"),
        (INDICES, torch.rand(3), (3, 4, 5), "shape"),
        (INDICES, torch.rand(3), (-3, 4), "shape"),
        (INDICES, torch.rand(3, device="meta"), (3, 4), "values are on meta"),
    ],
)
def test_bad_coo(indices, value, shape, error):
    with pytest.raises(InvalidInputError, match=error):
        dglsp.spmatrix(indices, value, shape)


@pytest.mark.parametrize("shape", [(2, 4), (3, 3)])
def test_indices_beyond_the_shape(shape):
    with pytest.raises(IdOutOfRangeError):
        dglsp.spmatrix(INDICES, shape=shape)
    with pytest.raises(IdOutOfRangeError, match="index -1"):
        dglsp.spmatrix(INDICES - 1, shape=(3, 4))


@pytest.mark.parametrize("create", [dglsp.from_csr, dglsp.from_csc])
@pytest.mark.parametrize(
    ("indptr", "indices", "error"),
    [
        ([0, 1], [0, 1], "indptr"),
        ([1, 1, 2], [0, 1], "indptr"),
        ([0, 3, 2], [0, 1], "indptr"),
        ([0, 1, 1], [0, 1], "indptr"),
        ([0, 1, 2], [0, 2], "index 2"),
        ([0, 1, 2], [-1, 0], "index -1"),
        ([0, 1, 2], [[0], [1]], "shape"),
        ([0, 1, 2], [0.0, 1.0], "float"),
    ],
)
def test_bad_csr_and_csc(create, indptr, indices, error):
    with pytest.raises(InvalidInputError, match=error):
        create(torch.tensor(indptr), torch.tensor(indices), torch.rand(2), (2, 2))


def test_bad_diagonals_and_new_values():
    with pytest.raises(AssertionError):
        dglsp.diag(torch.rand(3), (4, 5))
    matrix = dglsp.spmatrix(INDICES)
    with pytest.raises(InvalidInputError, match="3 non-zeros"):
        dglsp.val_like(matrix, torch.rand(4))
    with pytest.raises(InvalidInputError, match="meta"):
        dglsp.val_like(matrix, torch.rand(3, device="meta"))

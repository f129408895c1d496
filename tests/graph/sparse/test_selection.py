"""Parts of matrices: coalesced, selected, compacted and sampled."""

from __future__ import annotations

import dgl
import dgl.sparse as dglsp
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, InvalidWeightError
from tests.graph.sparse.matrices import DEVICES, FORMATS, SHAPES, make, same_gradients, to_dense

EXAMPLE = dglsp.spmatrix(
    torch.tensor([[0, 1, 1, 2, 3, 4], [0, 2, 4, 3, 5, 0]]), torch.tensor([0, 1, 2, 3, 4, 5])
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.parametrize("nnz", [0, 1, 20])
@pytest.mark.parametrize("form", FORMATS)
def test_coalesce(form, nnz, width, device):
    case = make(form, (3, 4), nnz, width, duplicates=True, device=device)
    out = case.sparse.coalesce()
    row, col = out.coo()
    assert ((row * 4 + col).diff() > 0).all() and not out.has_duplicate()
    same_gradients(to_dense(out), case.dense, case.value)
    assert out.nnz == len({*zip(*case.sparse.indices().tolist(), strict=True)})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dim", [0, 1])
def test_selecting(dim, form, shape, width, device):
    case = make(form, shape, 15, width, duplicates=True, device=device)
    for ids in ([2, 0], [0, 1, 2, 3], [3, 3, 1], []):
        ids = torch.tensor(ids, dtype=torch.int64, device=device)
        out = case.sparse.index_select(dim, ids)
        same_gradients(to_dense(out), case.dense.index_select(dim, ids), case.value)
    for part in (slice(1, 3), slice(None, 2), slice(2, None), slice(1, 1), slice(None)):
        out = case.sparse.range_select(dim, part)
        expected = case.dense[part] if dim == 0 else case.dense[:, part]
        same_gradients(to_dense(out), expected, case.value)


def test_dgls_examples_of_selecting():
    a = EXAMPLE.index_select(0, torch.tensor([0, 1, 4]))
    assert a.indices().tolist() == [[0, 1, 1, 2], [0, 2, 4, 0]] and a.val.tolist() == [0, 1, 2, 5]
    a = EXAMPLE.index_select(1, torch.tensor([0, 4, 5]))
    assert a.indices().tolist() == [[0, 4, 1, 3], [0, 0, 1, 2]] and a.val.tolist() == [0, 5, 2, 4]
    a = EXAMPLE.range_select(0, slice(1, 3))
    assert a.indices().tolist() == [[0, 0, 1], [2, 4, 3]] and a.shape == (2, 6)
    a = EXAMPLE.range_select(1, slice(3, 6))
    assert a.indices().tolist() == [[2, 1, 3], [0, 1, 2]] and a.shape == (5, 3)


def test_what_cannot_be_selected():
    for ids in (torch.tensor([5]), torch.tensor([0, -1])):
        with pytest.raises(IdOutOfRangeError, match="pass indices in"):
            EXAMPLE.index_select(0, ids)
    for ids in (torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([1], device="meta")):
        with pytest.raises(InvalidInputError):
            EXAMPLE.index_select(0, ids)
    for part in (slice(0, 6), slice(3, 2), slice(-1, 2)):
        with pytest.raises(InvalidInputError, match="is not within"):
            EXAMPLE.range_select(0, part)
    with pytest.raises(NotImplementedError):
        EXAMPLE.range_select(0, slice(0, 4, 2))
    with pytest.raises(ValueError, match="0 or 1"):
        EXAMPLE.index_select(2, torch.tensor([0]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nnz", [0, 1, 8])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("leading", [None, [], [1, 3], [4, 0, 2], [0, 0, 2]])
@pytest.mark.parametrize("dim", [0, 1])
def test_compact(dim, leading, form, nnz, device):
    case = make(form, (5, 5), nnz, 2, device=device)
    given = None if leading is None else torch.tensor(leading, dtype=torch.int64, device=device)
    out, old = case.sparse.compact(dim, given)
    occupied = sorted(set(case.sparse.indices()[dim].tolist()))
    first = list(dict.fromkeys(leading or []))
    assert old.tolist() == first + [i for i in occupied if i not in first]
    same_gradients(to_dense(out), case.dense.index_select(dim, old), case.value)
    assert out.val is case.value


def test_leading_indices_may_be_a_list_and_must_be_in_the_matrix():
    matrix = make("coo", (5, 6)).sparse
    assert torch.equal(matrix.compact(0, [])[1], matrix.compact(0)[1])
    matrix = dglsp.spmatrix(torch.tensor([[0, 2], [1, 2]]))
    out, old = matrix.compact(0, [1, 2])
    assert old.tolist() == [1, 2, 0]
    assert out.to_dense().tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0]]
    with pytest.raises(IdOutOfRangeError):
        matrix.compact(0, torch.tensor([3]))
    with pytest.raises(InvalidInputError, match="float32"):
        matrix.compact(0, torch.tensor([1.0]))
    with pytest.raises(InvalidInputError, match="dim=2"):
        matrix.compact(2)


def picks(sampled: dglsp.SparseMatrix, dim: int) -> list[list[float]]:
    """Values drawn from each row (``dim=0``) or column (``dim=1``)."""
    index = sampled.indices()[dim]
    return [sampled.val[index == i].tolist() for i in range(sampled.shape[dim])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dim", [0, 1])
def test_samples_are_non_zeros_of_their_rows(dim, form, replace, bias, device):
    dgl.seed(0)
    case = make(form, (6, 7), 20, device=device)
    ids = torch.tensor([0, 4, 4, 2, 5], device=device)
    available = picks(case.sparse.index_select(dim, ids), dim)
    for fanout in (0, 1, 3, 50):
        out = case.sparse.sample(dim, fanout, ids, replace, bias)
        assert out.shape == ((5, 7) if dim == 0 else (6, 5))
        for drawn, there in zip(picks(out, dim), available, strict=True):
            assert set(drawn) <= set(there)  # values are all different
            if replace:
                assert len(drawn) == (fanout if there else 0)
            else:
                assert len(drawn) == len(set(drawn)) == min(fanout, len(there))
        other = case.sparse.index_select(dim, ids)
        places = {*zip(*other.indices().tolist(), other.val.tolist(), strict=True)}
        assert {*zip(*out.indices().tolist(), out.val.tolist(), strict=True)} <= places


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dim", [0, 1])
def test_without_ids_all_rows_are_sampled(dim):
    case = make("coo", (5, 6), 20)
    out = case.sparse.sample(dim, 50)
    torch.testing.assert_close(to_dense(out), case.dense)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_samples_are_drawn_by_their_weights(bias, replace):
    """Frequencies over many rows, within five standard deviations."""
    dgl.seed(0)
    rows = 20_000
    weight = torch.tensor([0.0, 1.0, 3.0, 6.0])
    matrix = dglsp.spmatrix(
        torch.stack([torch.arange(rows).repeat_interleave(4), torch.arange(4).repeat(rows)]),
        weight.repeat(rows),
    )
    out = matrix.sample(0, 2, torch.arange(rows), replace, bias)
    assert torch.bincount(out.row, minlength=rows).eq(2).all()
    counts = torch.bincount(out.col, minlength=4).double() / rows
    p = weight.double() / weight.sum() if bias else torch.full((4,), 0.25, dtype=torch.float64)
    if replace:
        expected = 2 * p
    else:  # second draws are from what the first left
        left = p[:, None] * p / (1 - p)[:, None]
        expected = p + left.fill_diagonal_(0).sum(0)
    assert ((counts - expected).abs() <= 5 * (0.5 / rows) ** 0.5).all()
    assert not bias or counts[0] == 0


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("scale", [1e-40, 1e-9, 1e60])
def test_a_row_is_sampled_by_its_own_weights(replace, scale):
    """Whatever the weights of other rows, and however small or large its own."""
    dgl.seed(0)
    rows = 3000
    row = torch.arange(rows).repeat_interleave(3)
    weight = torch.tensor([1.0, 3.0, 4.0], dtype=torch.float64).repeat(rows)
    weight = torch.where(row % 2 == 0, weight * 1e12, weight * scale)
    matrix = dglsp.spmatrix(torch.stack([row, torch.arange(3).repeat(rows)]), weight)
    out = matrix.sample(0, 1, torch.arange(rows), replace, True)
    assert torch.equal(out.row, torch.arange(rows))
    for first in (0, 1):
        drawn = torch.bincount(out.col[first::2], minlength=3).double() / (rows / 2)
        expected = torch.tensor([0.125, 0.375, 0.5], dtype=torch.float64)
        assert ((drawn - expected).abs() <= 5 * (0.25 / (rows / 2)) ** 0.5).all()


def test_samples_repeat_with_the_seed():
    matrix = make("coo", (50, 60), 2000).sparse

    def draw(seed: int) -> list[list[int]]:
        dgl.seed(seed)
        return [matrix.sample(0, 3, replace=r, bias=b).col.tolist() for r in (0, 1) for b in (0, 1)]

    assert draw(1) == draw(1)
    assert all(a != b for a, b in zip(draw(1), draw(2), strict=True))


def test_rows_without_weight_are_not_sampled():
    indices = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
    matrix = dglsp.spmatrix(indices, torch.tensor([0, 0, 0, 2.0]))
    for replace, expected in ((False, 1), (True, 3)):
        out = matrix.sample(0, 3, torch.tensor([0, 1]), replace, True)
        assert out.row.tolist() == [1] * expected and out.col.tolist() == [1] * expected
    assert matrix.sample(0, -1, torch.tensor([0, 1])).nnz == 4


def test_what_cannot_be_sampled():
    matrix = make("coo", (5, 6)).sparse
    ids = torch.tensor([0, 1])
    with pytest.raises(InvalidInputError, match="the fanout is -2"):
        matrix.sample(0, -2, ids)
    for dim in (-1, 2):
        with pytest.raises(InvalidInputError, match=f"dim={dim}"):
            matrix.sample(dim, 2, ids)
    with pytest.raises(InvalidInputError, match="index is of type list"):
        matrix.sample(0, 2, [0, 1])
    with pytest.raises(IdOutOfRangeError):
        matrix.sample(0, 2, torch.tensor([5]))
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidWeightError):
            (matrix * bad).sample(0, 2, torch.arange(5), bias=True)
    with pytest.raises(InvalidInputError, match="the weights are vectors of 2"):
        make("coo", (5, 6), width=2).sparse.sample(0, 2, ids, bias=True)

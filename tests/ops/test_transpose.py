"""The transposed matrix, against torch's stable sort."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.transpose import transpose

#: Rows, and how many entries each column has.
MATRICES = {
    "neither rows nor columns": (0, []),
    "no rows": (0, [0, 0, 0]),
    "no columns": (4, []),
    "no entries": (3, [0, 0]),
    "one entry": (1, [1]),
    "one row": (1, [3, 0, 2]),
    "the same pair many times": (2, [40, 30]),
    "columns of all lengths": (500, [1, 0, 2, 31, 32, 33, 0, 64, 255, 256, 257, 300, 7, 511, 1, 0]),
    "long columns": (300, [512, 3, 513, 1024, 1025, 0, 1, 2600, 769]),
    "one column": (700, [0, 5000, 0]),
    "more columns than entries": (20, [0, 1] * 3000),
    "many rows": (6000, [2] * 900),
}
ID_DTYPES = (torch.int32, torch.int64)


def matrix(name, dtype=torch.int64, permuted=True, seed=0):
    """Indptr, indices, edge ids and the number of columns; entries are drawn in any order."""
    draw = torch.Generator().manual_seed(seed)
    num_rows, lengths = MATRICES[name]
    columns = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    count = len(columns)
    columns = columns[torch.randperm(count, generator=draw)]
    # Of squares: some rows have many, and some have none.
    rows = (torch.rand(count, generator=draw) ** 2 * num_rows).long()
    indptr = torch.zeros(num_rows + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(rows, minlength=num_rows).cumsum(0)
    eids = torch.randperm(count, generator=draw).to(dtype) if permuted else None
    return indptr.to(dtype), columns.to(dtype), eids, len(lengths)


def sorted_by_column(indptr, indices, eids, num_cols):
    """What is expected."""
    rows = torch.arange(len(indptr) - 1).repeat_interleave(indptr.diff().long())
    if eids is not None:
        by_edge = eids.argsort()
        rows, indices = rows[by_edge], indices[by_edge]
    order = indices.argsort(stable=True)
    counts = torch.bincount(indices, minlength=num_cols)
    expected = torch.cat([counts.new_zeros(1), counts.cumsum(0)]), rows[order], order
    return [each.to(indptr.dtype) for each in expected]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("dtype", ID_DTYPES)
@pytest.mark.parametrize("permuted", [False, True])
def test_matrices(name, dtype, permuted):
    given = matrix(name, dtype, permuted)
    assert_same(transpose(*given), sorted_by_column(*given))


def test_there_and_back():
    indptr, indices, eids, num_cols = matrix("columns of all lengths")
    back = transpose(*transpose(indptr, indices, eids, num_cols), len(indptr) - 1)
    # Rows are in the order of edge ids now.
    rows = torch.arange(len(indptr) - 1).repeat_interleave(indptr.diff())
    order = (rows * len(eids) + eids).argsort()
    assert_same(back, [indptr, indices[order], eids[order]])


def test_vectors_of_any_layout():
    indptr, indices, eids, num_cols = matrix("columns of all lengths")
    spread = [ids.repeat_interleave(2)[::2] for ids in (indptr, indices, eids)]
    assert_same(transpose(*spread, num_cols), sorted_by_column(indptr, indices, eids, num_cols))


def test_the_arguments_are_left_as_they_are():
    given = matrix("long columns")
    before = [ids.clone() for ids in given[:3]]
    transpose(*given)
    assert_same(given[:3], before)


@pytest.mark.parametrize("permuted", [False, True])
def test_the_schema(permuted):
    torch.library.opcheck(
        torch.ops.dgl_mgpu.transpose.default,
        matrix("columns of all lengths", torch.int32, permuted),
        test_utils=("test_schema", "test_faketensor"),
    )


BAD = {
    "a list": ({"indptr": [0, 6]}, "list"),
    "a float indptr": ({"indptr": torch.ones(2)}, "float32"),
    "short ids": ({"indices": torch.zeros(6, dtype=torch.int16)}, "int16"),
    "an empty indptr": ({"indptr": torch.zeros(0, dtype=torch.int64)}, "empty"),
    "two dtypes": (
        {"indices": torch.zeros(6, dtype=torch.int32)},
        "int64, but the ids have dtype .*int32",
    ),
    "other edge ids": ({"eids": torch.arange(6).int()}, "int64, but the ids have dtype .*int32"),
    "a matrix": ({"indices": torch.zeros(2, 3, dtype=torch.int64)}, r"\(2, 3\)"),
    "too few edge ids": ({"eids": torch.arange(5)}, "6 columns, but 5 edge ids"),
    "a negative size": ({"num_cols": -1}, "num_cols is -1"),
    "no number": ({"num_cols": 2.5}, "num_cols is 2.5"),
    "two devices": ({"indices": torch.zeros(6, dtype=torch.int64, device="meta")}, "meta"),
    "edge ids elsewhere": ({"eids": torch.zeros(6, dtype=torch.int64, device="meta")}, "meta"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_inputs(what):
    changed, message = BAD[what]
    good = {
        "indptr": torch.tensor([0, 6]),
        "indices": torch.zeros(6, dtype=torch.int64),
        "eids": torch.arange(6),
        "num_cols": 3,
    }
    transpose(**good)
    with pytest.raises(InvalidInputError, match=message):
        transpose(**(good | changed))

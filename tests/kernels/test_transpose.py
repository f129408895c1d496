"""The CUDA kernel that transposes matrices, against torch's stable sort."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.transpose import _transpose_cuda
from tests.ops.test_transpose import ID_DTYPES, MATRICES, assert_same, matrix, sorted_by_column


def transposed(where, indptr, indices, eids, num_cols):
    moved = [None if ids is None else ids.to(where) for ids in (indptr, indices, eids)]
    return [each.cpu() for each in _transpose_cuda(*moved, num_cols)]


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("dtype", ID_DTYPES)
@pytest.mark.parametrize("permuted", [False, True])
def test_matrices(where, name, dtype, permuted):
    given = matrix(name, dtype, permuted)
    assert_same(transposed(where, *given), sorted_by_column(*given))


def test_columns_that_are_merged_any_number_of_times(where):
    """What is merged moves between two places, and must come to be in the output."""
    for merges in range(6):
        for length in (256 << merges, (256 << merges) + 1):
            indptr = torch.tensor([0, 3, 3, 40, length])
            indices = torch.full((length,), 2)
            eids = torch.arange(length).flip(0)
            given = indptr, indices, eids, 4
            assert_same(transposed(where, *given), sorted_by_column(*given))


def test_one_call_after_another(where):
    """What blocks share is left as it was found."""
    for name in ("long columns", "one column", "no entries", "columns of all lengths") * 2:
        given = matrix(name, torch.int32)
        assert_same(transposed(where, *given), sorted_by_column(*given))


def test_vectors_of_any_layout(where):
    indptr, indices, eids, num_cols = matrix("long columns")
    spread = [ids.to(where).repeat_interleave(2)[::2] for ids in (indptr, indices, eids)]
    found = [each.cpu() for each in _transpose_cuda(*spread, num_cols)]
    assert_same(found, sorted_by_column(indptr, indices, eids, num_cols))


def test_results_are_memory_of_their_own(where):
    """As torch.compile takes them to be, which reads 16 bytes at a time."""
    indptr, indices, _, num_cols = matrix("long columns", torch.int64)
    for more in (0, 1):
        found = _transpose_cuda(indptr.to(where), indices.to(where), None, num_cols + more)
        assert [each.storage_offset() for each in found] == [0, 0, 0]
        assert [each.data_ptr() % 16 for each in found] == [0, 0, 0]
        assert len({each.untyped_storage().data_ptr() for each in found}) == 3


def test_more_entries_than_are_numbered(where):
    ids = torch.zeros(1, dtype=torch.int64, device=where)
    with pytest.raises(InvalidInputError, match="2147483648 entries in 0 rows"):
        _transpose_cuda(ids, ids.expand(2**31), None, 1)
    with pytest.raises(InvalidInputError, match="1 entries in 2147483648 rows"):
        _transpose_cuda(ids.expand(2**31 + 1), ids, None, 1)

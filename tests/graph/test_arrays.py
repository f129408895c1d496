"""Filters, order of edges and arrays, against DGL's C++ where it has them for the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dgl import ndarray as nd
from dgl.utils import Filter
from dgl.utils.checks import is_sorted_srcdst

from dgl_mgpu.graph.dispatch import as_tensor, cast_to_signed, is_null, tensor_backed_graphs

IDTYPES = [torch.int32, torch.int64]


@pytest.mark.parametrize("idtype", IDTYPES)
@pytest.mark.parametrize("size", [0, 1, 40])
@pytest.mark.parametrize("tested", [0, 1, 200])
def test_a_filter_tells_ids_of_its_set_from_others(size, tested, idtype):
    torch.manual_seed(0)
    ids = torch.randperm(100)[:size].to(idtype)
    test = torch.randint(-5, 120, (tested,)).to(idtype)
    with tensor_backed_graphs():
        found = Filter(ids)
        included, excluded = found.find_included_indices(test), found.find_excluded_indices(test)
    inside = np.isin(test.numpy(), ids.numpy())
    assert included.tolist() == np.flatnonzero(inside).tolist()
    assert excluded.tolist() == np.flatnonzero(~inside).tolist()
    assert included.dtype == excluded.dtype == idtype


ORDERS = {
    "no edge": ([], []),
    "one edge": ([3], [2]),
    "by both": ([0, 0, 1, 1], [1, 1, 0, 5]),
    "by row": ([0, 0, 1, 1], [2, 1, 0, 5]),
    "by column": ([3, 1, 2], [0, 1, 2]),
    "by neither": ([3, 1, 2], [0, 4, 2]),
}


@pytest.mark.parametrize("idtype", IDTYPES)
@pytest.mark.parametrize(("row", "col"), ORDERS.values(), ids=ORDERS)
def test_edges_are_sorted_where_dgl_says_so(row, col, idtype):
    row, col = (torch.tensor(x, dtype=idtype) for x in (row, col))
    expected = is_sorted_srcdst(row, col, 6, 6)
    with tensor_backed_graphs():
        assert is_sorted_srcdst(row, col, 6, 6) == expected


@pytest.mark.parametrize("seed", range(20))
def test_random_edges_are_sorted_where_dgl_says_so(seed):
    torch.manual_seed(seed)
    row = torch.randint(0, 3, (4,)).sort().values
    col = torch.randint(0, 3, (4,))
    expected = is_sorted_srcdst(row, col, 6, 6)
    with tensor_backed_graphs():
        assert is_sorted_srcdst(row, col, 6, 6) == expected


def test_unsigned_arrays_become_signed_ones_of_the_same_memory():
    with tensor_backed_graphs():
        for unsigned, signed in (
            (torch.uint32, torch.int32),
            (torch.uint64, torch.int64),
            (torch.int64, torch.int64),
        ):
            array = torch.tensor([1, 2], dtype=torch.int64).to(unsigned)
            cast = nd.cast_to_signed(array)
            assert cast.dtype == signed and cast.tolist() == [1, 2]
            assert cast.data_ptr() == array.data_ptr()
    assert cast_to_signed(torch.ones(2)).dtype == torch.float32


def test_arrays_of_dgl_are_tensors_of_the_same_memory():
    array = nd.array(np.arange(3))
    tensor = as_tensor(array)
    tensor[0] = 5
    assert array.asnumpy().tolist() == [5, 1, 2]
    assert as_tensor(tensor) is tensor


def test_null_is_a_vector_of_nothing():
    assert is_null(nd.NULL["int64"]) and is_null(torch.empty(0))
    assert not is_null(torch.empty(0, 3)) and not is_null(torch.empty(1))

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from dgl_mgpu.data.csc import (
    add_self_loops,
    csc_from_chunks,
    csc_with_self_loops,
    from_edges,
    index_dtype,
    unique_edges,
)
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError


@given(st.integers(1, 60), st.integers(0, 300), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_same_matrix_as_scipy_and_stable(num_nodes, num_edges, seed):
    generator = np.random.default_rng(seed)
    src, dst = generator.integers(0, num_nodes, (2, num_edges))
    csc = from_edges(src, dst, num_nodes, with_eids=True)
    expected = sparse.coo_matrix((np.ones(num_edges), (src, dst)), (num_nodes, num_nodes)).tocsc()
    ours = sparse.csc_matrix((np.ones(num_edges), csc.indices, csc.indptr), (num_nodes, num_nodes))
    assert (expected != ours).nnz == 0
    # Stable: within a destination the edges keep their order.
    np.testing.assert_array_equal(csc.eids, np.argsort(dst, kind="stable"))
    np.testing.assert_array_equal(csc.indices, src[csc.eids])


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("both_directions", [False, True])
def test_chunks_do_not_matter(edges, step, both_directions):
    src, dst, num_nodes = edges

    def chunks():
        for start in range(0, len(src), step):
            yield src[start : start + step], dst[start : start + step]

    csc = csc_from_chunks(chunks, num_nodes, both_directions=both_directions, with_eids=True)
    if both_directions:  # OGB's order: an edge, then its reverse
        src, dst = np.stack([src, dst], 1).ravel(), np.stack([dst, src], 1).ravel()
    whole = from_edges(src, dst, num_nodes, with_eids=True)
    for ours, expected in zip(csc, whole, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_dtypes(edges):
    src, dst, num_nodes = edges
    csc = from_edges(src.astype(np.int32), dst.astype(np.int32), num_nodes)
    assert (csc.indptr.dtype, csc.indices.dtype, csc.eids) == (np.int64, np.int32, None)
    assert index_dtype(2**31 - 1) == np.int32
    assert index_dtype(2**31) == np.int64


@pytest.mark.parametrize(
    ("src", "dst"), [([0, -1], [1, 1]), ([0, 1], [1, 5]), ([0, 5], [1, 1]), ([0, 1], [1, -7])]
)
def test_ids_out_of_range(src, dst):
    with pytest.raises(IdOutOfRangeError, match="edge 1 is"):
        from_edges(np.array(src), np.array(dst), 5)


@pytest.mark.parametrize(
    ("src", "dst", "found"),
    [
        (np.array([0.0, 1.0]), np.array([0, 1]), "float64"),
        (np.array([0, 1]), np.array([0]), "2 sources but 1"),
        (np.zeros((2, 2), int), np.zeros(2, int), "shape"),
    ],
)
def test_no_ids(src, dst, found):
    with pytest.raises(InvalidInputError, match=found):
        from_edges(src, dst, 5)


def dense(indptr, indices) -> np.ndarray:
    size = len(indptr) - 1
    return sparse.csc_matrix((np.ones(len(indices)), indices, indptr), (size, size)).toarray()


def test_self_loops_exactly_one_each(edges):
    src, dst, num_nodes = edges
    assert (src == dst).any()
    listed = from_edges(*add_self_loops(src, dst, num_nodes), num_nodes)
    csc = from_edges(src, dst, num_nodes)
    direct = csc_with_self_loops(csc.indptr, csc.indices)
    np.testing.assert_array_equal(listed.indptr, direct[0])
    np.testing.assert_array_equal(listed.indices, direct[1])
    expected = dense(csc.indptr, csc.indices)
    np.fill_diagonal(expected, 1)
    np.testing.assert_array_equal(dense(*direct), expected)


def test_unique_edges(edges):
    src, dst, num_nodes = edges
    unique = unique_edges(src, dst, num_nodes)
    expected = sorted(set(zip(dst.tolist(), src.tolist(), strict=True)))
    assert list(zip(unique[1].tolist(), unique[0].tolist(), strict=True)) == expected

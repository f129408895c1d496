from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse

from dgl_mgpu.data import transform
from dgl_mgpu.data.csc import from_edges
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError


def dense(indptr, indices) -> np.ndarray:
    size = len(indptr) - 1
    return sparse.csc_matrix((np.ones(len(indices)), indices, indptr), (size, size)).toarray()


def test_add_reverse(edges):
    src, dst, _ = edges
    both_src, both_dst = transform.add_reverse(src, dst)
    np.testing.assert_array_equal(both_src[200:], both_dst[:200])
    np.testing.assert_array_equal(both_dst[200:], both_src[:200])
    np.testing.assert_array_equal(both_src[:200], src)


def test_self_loops_exactly_one_each(edges):
    src, dst, num_nodes = edges
    assert (src == dst).any()
    listed = from_edges(*transform.add_self_loops(src, dst, num_nodes), num_nodes)
    csc = from_edges(src, dst, num_nodes)
    direct = transform.csc_with_self_loops(csc.indptr, csc.indices)
    np.testing.assert_array_equal(listed.indptr, direct[0])
    np.testing.assert_array_equal(listed.indices, direct[1])
    expected = dense(csc.indptr, csc.indices)
    np.fill_diagonal(expected, 1)
    np.testing.assert_array_equal(dense(*direct), expected)


def test_unique_edges(edges):
    src, dst, num_nodes = edges
    unique = transform.unique_edges(src, dst, num_nodes)
    expected = sorted(set(zip(dst.tolist(), src.tolist(), strict=True)))
    assert list(zip(unique[1].tolist(), unique[0].tolist(), strict=True)) == expected


@pytest.mark.parametrize("to_disk", [False, True])
def test_reorder_keeps_everything_consistent(toy, edges, tmp_path, monkeypatch, to_disk):
    monkeypatch.setattr(transform, "_CHUNK_BYTES", 16)  # several chunks
    order = np.random.default_rng(3).permutation(toy.num_nodes)
    reordered, rank = transform.reorder(toy, order, tmp_path if to_disk else None)
    np.testing.assert_array_equal(order[rank], np.arange(toy.num_nodes))
    # Every node kept its features and label, and every edge id its end points.
    np.testing.assert_array_equal(reordered.node_features["feat"][:, 0], order)
    np.testing.assert_array_equal(reordered.labels, toy.labels[order])
    dst = np.repeat(np.arange(toy.num_nodes), np.diff(reordered.indptr))
    pairs = toy.edge_features["pair"][reordered.eids]
    np.testing.assert_array_equal(order[reordered.indices], pairs[:, 0])
    np.testing.assert_array_equal(order[dst], pairs[:, 1])
    for part in ("train", "valid", "test"):
        np.testing.assert_array_equal(order[getattr(reordered, part)], getattr(toy, part))
    assert isinstance(reordered.indices, np.memmap) == to_disk
    # The same matrix with rows and columns permuted.
    before, after = (dense(graph.indptr, graph.indices) for graph in (toy, reordered))
    np.testing.assert_array_equal(after, before[np.ix_(order, order)])


def test_reorder_without_ids_and_back(edges, build_dataset):
    plain = build_dataset(
        *edges, eids=None, edge_features={}, node_features={"feat": torch.arange(40)}
    )
    order = np.random.default_rng(4).permutation(40)
    there, rank = transform.reorder(plain, order)
    back, _ = transform.reorder(there, rank)
    assert there.eids is None
    assert torch.equal(there.node_features["feat"], torch.from_numpy(order))
    np.testing.assert_array_equal(back.indptr, plain.indptr)
    np.testing.assert_array_equal(back.indices, plain.indices)


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (np.arange(39), InvalidInputError),
        (np.arange(40.0), InvalidInputError),
        (np.r_[0, np.arange(39)], InvalidInputError),
        (np.r_[40, np.arange(39)], IdOutOfRangeError),
        (np.r_[-1, np.arange(39)], IdOutOfRangeError),
    ],
)
def test_reorder_refuses_what_is_no_permutation(toy, order, error):
    with pytest.raises(error, match="exactly once"):
        transform.reorder(toy, order)

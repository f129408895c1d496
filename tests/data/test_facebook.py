from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import sparse

from dgl_mgpu.data import load
from dgl_mgpu.errors import DataFormatError


def write_pages(folder):
    """Five pages in the format of the Facebook graph, with one self-loop."""
    (folder / "facebook_target.csv").write_text(
        "id,page_type\n0,tvshow\n1,company\n2,tvshow\n3,politician\n4,company\n"
    )
    (folder / "facebook_edges.csv").write_text("id_1,id_2\n0,1\n1,2\n3,3\n4,0\n")
    words = {"0": [1, 2], "1": [2], "2": [1, 2], "3": [0, 5], "4": [5, 5, 0]}
    (folder / "facebook.json").write_text(json.dumps(words))
    return folder


@pytest.fixture
def pages(tmp_path):
    return write_pages(tmp_path)


def test_the_real_graph(shared_data):
    data = load("facebook", shared_data)
    assert (data.num_nodes, data.num_classes) == (22470, 4)
    assert data.num_edges == 2 * (171_002 - 179)
    assert data.node_features["feat"].shape == (22470, 128)
    matrix = sparse.csc_matrix((np.ones(data.num_edges), data.indices, data.indptr))
    assert (matrix != matrix.T).nnz == 0
    assert matrix.diagonal().sum() == 0
    parts = np.concatenate([data.train, data.valid, data.test])
    np.testing.assert_array_equal(np.sort(parts), np.arange(22470))
    assert [len(data.train), len(data.valid), len(data.test)] == [13482, 4494, 4494]


def test_projection_keeps_distances(shared_data):
    """The cosine of two pages survives the projection: errors have a deviation of 1/sqrt(dim)."""
    words = json.loads((shared_data / "facebook_pages" / "facebook.json").read_text())
    feat = load("facebook", shared_data).node_features["feat"]
    generator = np.random.default_rng(0)
    errors = []
    for a, b in generator.integers(0, 22470, (2000, 2)):
        first, second = set(words[str(a)]), set(words[str(b)])
        exact = len(first & second) / np.sqrt(len(first) * len(second))
        errors.append(feat[a] @ feat[b] / 128 - exact)
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 1.2 / np.sqrt(128)


def test_small(pages):
    data = load("facebook", pages, num_features=16, self_loops=True)
    np.testing.assert_array_equal(data.labels, [2, 0, 2, 1, 0])  # alphabetical
    assert data.num_edges == 6 + 5
    feat = data.node_features["feat"]
    np.testing.assert_array_equal(feat[0], feat[2])
    np.testing.assert_array_equal(feat[3], feat[4])  # a word listed twice counts once
    np.testing.assert_allclose((feat**2).mean(1), 1, rtol=1e-5)
    assert feat.dtype == np.float32


def test_seed_and_tfidf(pages):
    first, again, other = (load("facebook", pages, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.train, again.train)
    assert not np.array_equal(first.train, other.train)
    weighted = load("facebook", pages, tfidf=True).node_features["feat"]
    assert not np.allclose(weighted, first.node_features["feat"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("facebook_edges.csv", "id_1,id_2\n0,1\n1,"),
        ("facebook_edges.csv", "id_1,id_2\n0,1\n1,5\n"),
        ("facebook_edges.csv", "id_1,id_2\n0,-1\n"),
        ("facebook_edges.csv", "id_1,id_2\n0,x\n"),
        ("facebook_target.csv", "id,page_type\n0,tvshow\n2,company\n"),
        ("facebook_target.csv", "id\n0\n"),
        ("facebook_target.csv", ""),
        ("facebook.json", '{"0": [1, 2], "1"'),
        ("facebook.json", '{"0": [1, 2]}'),
        ("facebook.json", "[]"),
        ("facebook.json", '{"0": [], "1": [], "2": [], "3": [-1], "4": []}'),
        ("facebook.json", '{"0": [], "1": [], "2": [], "3": ["a"], "4": []}'),
        ("facebook.json", '{"0":[],"1":[],"2":[],"3":[],"4":[1],"5":[]}'),
    ],
)
def test_damaged(pages, name, text):
    (pages / name).write_text(text)
    with pytest.raises(DataFormatError, match=r"facebook.*truncated or corrupt"):
        load("facebook", pages)


@pytest.mark.parametrize("name", ["facebook_edges.csv", "facebook_target.csv", "facebook.json"])
def test_a_file_that_has_changed_since_it_was_first_read(pages, name):
    load("facebook", pages)
    path = pages / name
    path.write_text(path.read_text().replace("2", "1", 1))
    with pytest.raises(DataFormatError, match=f"{name}: it is not as it was.*facebook.checksums"):
        load("facebook", pages)


def test_missing(pages):
    (pages / "facebook.json").unlink()
    with pytest.raises(DataFormatError, match=r"no file facebook\.json in"):
        load("facebook", pages)

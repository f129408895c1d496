"""DGL's own reader of Reddit's files is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)
from dgl_mgpu.data import reddit
from dgl_mgpu.errors import DataFormatError

# isort: split
from dgl.data import RedditDataset

NUM_NODES = 30


def write_reddit(root):
    """Small files in the format of DGL's."""
    random = np.random.default_rng(0)
    folder = root / "reddit"
    folder.mkdir()
    graph = sparse.random(NUM_NODES, NUM_NODES, 0.2, "coo", random_state=1)
    sparse.save_npz(folder / "reddit_graph.npz", graph)
    np.savez(
        folder / "reddit_data.npz",
        feature=random.standard_normal((NUM_NODES, 5)),
        label=random.integers(0, 41, NUM_NODES),
        node_ids=np.arange(NUM_NODES),
        node_types=random.integers(1, 4, NUM_NODES),
    )
    return root


@pytest.fixture
def root(tmp_path):
    return write_reddit(tmp_path)


def test_as_dgl_reads_it(root):
    data = reddit.load("reddit", root)
    (root / "reddit").rename(root / "reddit_69f818f5")
    theirs = RedditDataset(raw_dir=str(root))[0]
    assert reddit.load("reddit", root).num_edges == data.num_edges
    # DGL reorders nodes; their features tell which is which.
    expected = theirs.ndata["feat"].numpy()
    of_row = {row.tobytes(): node for node, row in enumerate(data.node_features["feat"])}
    ours = np.array([of_row[row.tobytes()] for row in expected])
    assert len(set(ours.tolist())) == data.num_nodes == NUM_NODES
    np.testing.assert_array_equal(data.labels[ours], theirs.ndata["label"].numpy())
    for name, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        ids = ours[theirs.ndata[mask].numpy().astype(bool)]
        np.testing.assert_array_equal(np.sort(ids), getattr(data, name))
    src, dst = (ours[ends.numpy()] for ends in theirs.edges())
    targets = np.repeat(np.arange(NUM_NODES), np.diff(data.indptr))
    assert sorted(zip(src, dst, strict=True)) == sorted(zip(data.indices, targets, strict=True))
    loops = reddit.load("reddit", root, self_loops=True)
    assert loops.num_edges == (src != dst).sum() + NUM_NODES


@pytest.mark.parametrize("name", ["reddit_graph.npz", "reddit_data.npz"])
def test_damage_is_told_of(root, name):
    path = root / "reddit" / name
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataFormatError, match="truncated or corrupt"):
        reddit.load("reddit", root)
    path.unlink()
    with pytest.raises(DataFormatError, match=f"no file {name} in .*reddit; put it there"):
        reddit.load("reddit", root)


def test_files_that_do_not_belong_together(root):
    graph = sparse.identity(NUM_NODES + 1, format="coo")
    sparse.save_npz(root / "reddit" / "reddit_graph.npz", graph)
    with pytest.raises(
        DataFormatError, match=r"30 labels, 30 parts of the split and a graph of shape \(31, 31\)"
    ):
        reddit.load("reddit", root)

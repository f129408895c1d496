"""The generated graph whose labels are told by relations."""

from __future__ import annotations

import numpy as np
import pytest

from dgl_mgpu.data import HeteroDataset, load_hetero
from dgl_mgpu.errors import ConfigError

LIKES, DISLIKES = ("user", "likes", "item"), ("user", "dislikes", "item")


def load(**parameters) -> HeteroDataset:
    return load_hetero("generated-relations", "/nowhere", **parameters)


def accuracy(data: HeteroDataset, rows: np.ndarray) -> float:
    """Share of test items that are nearest to the mean row of their class."""
    train, test = data.labels[data.train], data.labels[data.test]
    means = np.stack([rows[data.train][train == each].mean(0) for each in range(data.num_classes)])
    distances = ((rows[data.test][:, None] - means) ** 2).sum(-1)
    return float((distances.argmin(1) == test).mean())


def test_relations_tell_the_class_and_neighbours_alone_do_not():
    data = load()
    users = data.node_features["user"]["feat"]

    def mean(*relations) -> np.ndarray:
        csc = [data.edges[each] for each in relations]
        sums = sum(np.add.reduceat(users[each.indices], each.indptr[:-1]) for each in csc)
        return sums / sum(np.diff(each.indptr) for each in csc)[:, None]

    items = data.node_features["item"]["feat"]
    assert 1 / 8 < accuracy(data, items) < 0.3
    # Two classes look alike if relations are not told apart.
    assert 0.35 < accuracy(data, mean(LIKES, DISLIKES)) < 0.6
    assert accuracy(data, mean(LIKES)) > 0.8
    assert accuracy(data, np.concatenate([mean(LIKES), mean(DISLIKES)], 1)) > 0.8


def test_users_of_a_relation_are_of_one_class():
    data = load(homophily=1.0, signal=100.0)
    of_user = data.node_features["user"]["feat"] @ data.node_features["user"]["feat"].T > 0
    liking, disliking = (data.edges[each].indices.reshape(-1, 6) for each in (LIKES, DISLIKES))
    same = np.array([of_user[row[0], row].all() for row in liking])
    assert same.all()
    assert not np.array([of_user[a[0], b[0]] for a, b in zip(liking, disliking, strict=True)]).all()


def test_types_and_sizes():
    data = load(num_items=500, num_users=60, num_tags=20, num_features=10, degree=4)
    assert data.num_nodes == {"item": 500, "user": 60, "tag": 20}
    assert data.target == "item" and data.widths == {"item": 5, "user": 10}
    assert len(data.edges) == 6 and data.num_edges == 2 * 500 * (4 + 4 + 2)
    split = np.concatenate([data.train, data.valid, data.test])
    np.testing.assert_array_equal(np.sort(split), np.arange(500))


def test_the_seed_decides_all():
    first, again, other = load(), load(), load(seed=1)
    for etype, csc in first.edges.items():
        np.testing.assert_array_equal(csc.indices, again.edges[etype].indices)
    np.testing.assert_array_equal(first.labels, again.labels)
    assert not np.array_equal(first.edges[LIKES].indices, other.edges[LIKES].indices)


@pytest.mark.parametrize(
    "values",
    [{"num_classes": 1}, {"num_tags": 7}, {"homophily": 2}, {"degree": 2.5}, {"items": 3}],
)
def test_values_out_of_range(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        load(**values)

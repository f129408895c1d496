"""The order of rows: hottest first, stable, a permutation both ways; files of counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.placement import expected_reads, load_accesses, order_by_hotness, save_accesses


@given(arrays(np.int16, st.integers(0, 60), elements=st.integers(0, 5)))
def test_hottest_first_and_equal_ones_by_id(hotness):
    order, position = order_by_hotness(hotness)
    expected = sorted(range(len(hotness)), key=lambda row: (-int(hotness[row]), row))
    assert order.tolist() == expected
    assert position[order].tolist() == list(range(len(hotness)))
    assert order.dtype == position.dtype == np.int32


def test_unsigned_and_float_hotness():
    assert order_by_hotness(np.array([0, 255, 3], np.uint8)).order.tolist() == [1, 2, 0]
    assert order_by_hotness(np.array([0.5, -np.inf, 2.0])).order.tolist() == [2, 0, 1]


@pytest.mark.parametrize("bad", [np.ones((2, 2)), np.array(["a"]), np.array([1.0, np.nan])])
def test_what_is_no_hotness_is_refused(bad):
    with pytest.raises(InvalidInputError):
        order_by_hotness(bad)


def test_rows_not_seen_get_the_share_that_they_turn_out_to_have():
    rng = np.random.default_rng(0)
    degrees = np.maximum(rng.pareto(1.5, 20_000) * 4, 0.5)
    sample, later = rng.multinomial(30_000, degrees / degrees.sum(), size=2)
    unseen = sample == 0
    expected = expected_reads(sample, degrees)
    assert expected[unseen].sum() == pytest.approx(later[unseen].sum(), rel=0.1)
    assert np.array_equal(expected[~unseen], sample[~unseen])
    # Among them, those of a higher degree are read more; all less than what was seen once.
    rising = expected[unseen][np.argsort(degrees[unseen])]
    assert (np.diff(rising) >= 0).all() and 0 < rising[0] < rising[-1] < 1


@pytest.mark.parametrize("counts", [[], [0, 0], [3, 2], [0, 1]])
def test_expected_reads_of_few_rows(counts):
    counts = np.array(counts, np.int64)
    reads = expected_reads(counts, np.zeros(len(counts)))
    assert np.array_equal(reads >= 1, counts >= 1) and (reads <= np.maximum(counts, 0.99)).all()


def test_counts_come_back_from_their_file(tmp_path):
    path = tmp_path / "new" / "counts"
    counts = {"user": np.array([0, 7, 2**40]), "file/odd": np.array([], np.int32)}
    save_accesses(path, counts)
    assert [found.name for found in path.parent.iterdir()] == ["counts"]
    loaded = load_accesses(path, {"file/odd": 0, "user": 3})
    assert loaded.keys() == counts.keys()
    assert all(np.array_equal(loaded[ntype], counts[ntype]) for ntype in counts)
    assert {each.dtype for each in loaded.values()} == {np.dtype(np.int64)}
    save_accesses(path, {"user": np.array([1])})  # in the place of the old
    assert load_accesses(path, {"user": 1})["user"].tolist() == [1]


@pytest.mark.parametrize(
    ("num_nodes", "message"),
    [
        ({"user": 4}, "3 nodes of type 'user', but the graph has 4 nodes of type 'user'"),
        ({"item": 3}, "the graph has 3 nodes of type 'item'"),
        ({"user": 3, "item": 1}, "1 nodes of type 'item'"),
    ],
)
def test_counts_of_another_graph_are_refused(tmp_path, num_nodes, message):
    save_accesses(tmp_path / "counts", {"user": np.arange(3)})
    with pytest.raises(ConfigError, match=message):
        load_accesses(tmp_path / "counts", num_nodes)


def test_what_is_no_file_of_counts_is_refused(tmp_path):
    path = tmp_path / "counts"
    with pytest.raises(ConfigError, match="no such file"):
        load_accesses(path, {"user": 3})
    save_accesses(path, {"user": np.arange(3000)})
    whole = path.read_bytes()
    middle = len(whole) // 2
    for content in (
        b"",
        b"no archive",
        whole[:-40],
        whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not a file of counts, or it is damaged"):
            load_accesses(path, {"user": 3000})
    np.save(path.with_suffix(".npy"), np.arange(3))
    with pytest.raises(ConfigError, match="not a file of counts, or it is damaged"):
        load_accesses(path.with_suffix(".npy"), {"user": 3})
    name, good = "accesses/user", np.arange(3)
    for content, message in (
        ({name: good}, "damaged"),
        ({name: good, "version": 2}, "version is 2"),
        ({name: good / 2, "version": 1}, "are not counts"),
        ({name: -good, "version": 1}, "are not counts"),
        ({name: good[None], "version": 1}, "are not counts"),
        ({name: good.astype(object), "version": 1}, "damaged"),
        ({"user": good, "version": 1}, "they are of none"),
    ):
        with open(path, "wb") as file:
            np.savez(file, **content)
        with pytest.raises(ConfigError, match=message):
            load_accesses(path, {"user": 3})


def test_counts_that_cannot_be_written_are_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="another file"):
        save_accesses(tmp_path / "file" / "counts", {"user": np.arange(3)})
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidInputError, match="another file"):
        save_accesses(tmp_path / "folder", {"user": np.arange(3)})
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file", "folder"]

"""Edges held out of a data set, against sets of pairs made by Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dgl_mgpu.data.links import edges_to_learn, hold_out, rings_of_edges
from dgl_mgpu.errors import InvalidInputError


def pairs_of(dataset) -> list[tuple[int, int]]:
    """Source and destination of every edge, by its place."""
    destinations = np.repeat(np.arange(dataset.num_nodes), np.diff(dataset.indptr))
    return list(zip(dataset.indices.tolist(), destinations.tolist(), strict=True))


def unordered(pairs) -> set[tuple[int, ...]]:
    return {tuple(sorted(pair)) for pair in pairs}


def listed(ends: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(*ends.tolist(), strict=True))


@pytest.fixture
def large(build_dataset):
    """A multigraph of 300 nodes with 10,000 edges, some of them self-loops."""
    draw = np.random.default_rng(2)
    return build_dataset(draw.integers(0, 250, 10_000), draw.integers(0, 250, 10_000), 300)


def test_parts_are_all_edges_and_share_no_pair_of_nodes(toy):
    found = hold_out(toy, 0.2, 0.3, seed=1)
    parts = [pairs_of(found.dataset), listed(found.valid), listed(found.test)]
    assert all(parts)
    assert sorted(itertools.chain(*parts)) == sorted(pairs_of(toy))
    train, valid, test = map(unordered, parts)
    assert not train & valid and not train & test and not valid & test
    assert not any(source == target for source, target in (*parts[1], *parts[2]))


def test_shares_are_those_asked_for(large):
    found = hold_out(large, 0.05, 0.1, seed=3)
    valid, test = (ends.shape[1] / large.num_edges for ends in (found.valid, found.test))
    assert valid == pytest.approx(0.05, abs=0.01) and test == pytest.approx(0.1, abs=0.015)


def test_the_seed_alone_says_which(large):
    one, again, other = (hold_out(large, 0.1, 0.1, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one.valid, again.valid)
    np.testing.assert_array_equal(one.dataset.indices, again.dataset.indices)
    assert unordered(listed(one.valid)) != unordered(listed(other.valid))


def test_all_else_stays(toy):
    rest = hold_out(toy, 0.2, 0.2, seed=1).dataset
    np.testing.assert_array_equal(rest.edge_features["pair"], pairs_of(rest))
    assert rest.eids is None and rest.num_nodes == toy.num_nodes
    for name in ("labels", "train", "valid", "test"):
        assert getattr(rest, name) is getattr(toy, name)
    assert rest.node_features is toy.node_features


def test_rings_go_round_the_edges_between_the_same_nodes(toy):
    pairs, (next_edge, longest) = pairs_of(toy), rings_of_edges(toy)
    lengths = []
    for place, pair in enumerate(pairs):
        ring = [place]
        while (following := int(next_edge[ring[-1]])) != place:
            ring.append(following)
        same = [at for at, other in enumerate(pairs) if set(other) == set(pair)]
        assert sorted(ring) == (same if pair[0] != pair[1] else [place])
        lengths.append(len(ring))
    assert min(lengths) == 1 and max(lengths) == longest > 2


def test_self_loops_are_not_learned(toy):
    pairs = pairs_of(toy)
    learned = edges_to_learn(toy).tolist()
    assert learned == [place for place, (source, target) in enumerate(pairs) if source != target]
    assert len(learned) < len(pairs)


@pytest.mark.parametrize(
    ("shares", "part"),
    [((1e-9, 0.5), "validation"), ((0.5, 1e-9), "test"), ((0.5, 0.4999999), "tr")],
)
def test_a_part_without_edges_is_an_error(toy, shares, part):
    with pytest.raises(InvalidInputError, match=f"no edges are left for {part}"):
        hold_out(toy, *shares, seed=0)


@pytest.mark.parametrize("few", ["validation", "test"])
def test_a_split_of_very_few_edges_is_an_error(large, few):
    counts = []
    for share in np.geomspace(1e-4, 4e-3, 20):
        shares = (share, 0.1) if few == "validation" else (0.1, share)
        try:
            found = hold_out(large, *shares, seed=0)
            count = (found.valid if few == "validation" else found.test).shape[1]
            assert count >= 10
        except InvalidInputError as error:
            told = str(error)
            assert f"edges are left for {few}, of 10000 with self-loops" in told
            assert "links.valid, links.test) that leave it at least 10" in told
            count = int(told.split("'toy': ")[1].split()[0].replace("no", "0"))
            assert count < 10
        counts.append(count)
    assert counts == sorted(counts) and 0 < counts[1] < 10 < counts[-1]


def test_self_loops_are_nothing_to_train_on(build_dataset):
    loops = build_dataset(np.arange(20), np.arange(20), 20)
    with pytest.raises(InvalidInputError, match="no edges are left for training"):
        hold_out(loops, 0.1, 0.1, seed=0)

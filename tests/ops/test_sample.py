"""Uniform neighbour sampling: bit for bit against the reference, and its distribution."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as with_fields
from itertools import combinations, product

import numpy as np
import pytest
import torch
from scipy import stats

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import SampleKey, sample_etype_neighbors, sample_neighbors
from tests.ops import reference
from tests.ops.views import LAYOUTS, Graph, power_law_graph

KEY = SampleKey(seed=7, epoch=1, batch=2, hop=3)
#: Probability that a statistical test fails although the sampler is right.
FALSE_ALARM = 1e-3

GRAPHS = {
    "power law": power_law_graph(200, 3000, seed=0),
    "random": power_law_graph(50, 120, seed=1),
    "no edges": Graph.of_lists([[]] * 5),
    "self-loop": Graph.of_lists([[0]]),
    "lone node": Graph.of_lists([[]]),
    "duplicate edges": Graph.of_lists([[1, 1, 1, 1, 2], [0] * 9, []]),
    "bipartite": Graph.of_lists([[9, 8, 7], [], [0, 9, 5, 5]], num_cols=10),
    "hub": Graph.of_lists([list(range(1, 5000))] + [[0]] * 4999),
    "own edge ids": Graph([0, 3, 3, 7], [0, 1, 2, 2, 1, 0, 0], 3, np.array([6, 0, 5, 1, 4, 2, 3])),
}


def batches(graph: Graph) -> list[torch.Tensor]:
    """No seed, one, and many with duplicates."""
    random = np.random.default_rng(3)
    many = random.integers(0, graph.num_rows, min(300, 3 * graph.num_rows))
    return [torch.empty(0, dtype=torch.int64), torch.tensor([0]), torch.from_numpy(many)]


def same(sampled: tuple[torch.Tensor, ...], expected: tuple) -> bool:
    return all(
        torch.as_tensor(a).tolist() == torch.as_tensor(b).tolist()
        for a, b in zip(sampled, expected, strict=True)
    )


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [0, 1, 2, 5, 49, 200, -1])
@pytest.mark.parametrize("name", GRAPHS)
def test_matches_reference(name, fanout, replace):
    graph = GRAPHS[name]
    for seeds in batches(graph):
        sampled = sample_neighbors(graph.view(), seeds, fanout, KEY, replace=replace)
        expected = reference.sample(graph, seeds.tolist(), fanout, KEY.fold(), replace)
        assert same(sampled, expected)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GRAPHS)
def test_layouts_and_id_types_give_the_same_sample(name, layout, shuffled, idtype):
    graph = GRAPHS[name]
    shuffle = np.random.default_rng(0) if shuffled else None
    view = graph.view(LAYOUTS[layout], idtype, shuffle)
    for seeds, fanout, replace in product(batches(graph), (3, -1), (False, True)):
        sampled = sample_neighbors(view, seeds.to(idtype), fanout, KEY, replace=replace)
        assert sampled.neighbors.dtype == sampled.eids.dtype == idtype
        assert same(sampled, sample_neighbors(graph.view(), seeds, fanout, KEY, replace=replace))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_threads(on_threads, number):
    graph = power_law_graph(5000, 50_000, seed=4)
    seeds = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    sampled = on_threads(number, lambda: sample_neighbors(graph.view(), seeds, 4, KEY))
    assert same(sampled, reference.sample(graph, seeds.tolist(), 4, KEY.fold()))


def test_children(in_children):
    graph = power_law_graph(5000, 50_000, seed=4)
    view, seeds = graph.view(), torch.arange(5000)
    expected = sample_neighbors(view, seeds, 4, KEY)
    for answer in in_children(lambda: sample_neighbors(view, seeds, 4, KEY)):
        assert same(answer, expected)


def test_a_sample_does_not_depend_on_the_batch():
    graph = GRAPHS["power law"]
    all_nodes = sample_neighbors(graph.view(), torch.arange(200), 5, KEY)
    for node in range(200):
        alone = sample_neighbors(graph.view(), torch.tensor([node]), 5, KEY)
        begin, end = all_nodes.indptr[node], all_nodes.indptr[node + 1]
        assert torch.equal(alone.eids, all_nodes.eids[begin:end])


def test_without_replacement_edges_are_distinct():
    graph = power_law_graph(300, 20_000, seed=5)
    sampled = sample_neighbors(graph.view(), torch.arange(300), 60, KEY)
    for begin, end in zip(sampled.indptr, sampled.indptr[1:], strict=False):
        assert len(set(sampled.eids[begin:end].tolist())) == end - begin


def regular(nodes: int, degree: int) -> Graph:
    return Graph(np.arange(nodes + 1) * degree, np.tile(np.arange(degree), nodes), nodes)


def picks(graph: Graph, fanout: int, key: SampleKey, replace: bool = False) -> np.ndarray:
    """One row of neighbors for each node of a graph of one degree."""
    seeds = torch.arange(graph.num_rows)
    sampled = sample_neighbors(graph.view(), seeds, fanout, key, replace=replace)
    return sampled.neighbors.numpy().reshape(graph.num_rows, fanout)


@pytest.mark.parametrize("seed", range(3))
def test_every_subset_is_equally_likely(seed):
    drawn = picks(regular(60_000, 8), 3, SampleKey(seed))
    seen = Counter(tuple(sorted(row)) for row in drawn.tolist())
    counts = [seen[subset] for subset in combinations(range(8), 3)]
    assert sum(counts) == 60_000
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


@pytest.mark.parametrize("seed", range(3))
def test_every_sequence_is_equally_likely_with_replacement(seed):
    drawn = picks(regular(60_000, 5), 3, SampleKey(seed), replace=True)
    seen = Counter(map(tuple, drawn.tolist()))
    counts = [seen[sequence] for sequence in product(range(5), repeat=3)]
    assert sum(counts) == 60_000
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_every_edge_is_equally_likely_where_picks_are_hashed():
    drawn = picks(regular(4000, 300), 100, SampleKey(0))
    counts = np.bincount(drawn.ravel(), minlength=300)
    # Inclusions are negatively correlated: the statistic is smaller by (1 - 100 / 300).
    statistic = ((counts - 4000 / 3) ** 2 / (4000 / 3)).sum() / (1 - 1 / 3)
    assert stats.chi2(299).sf(statistic) > FALSE_ALARM


@pytest.mark.parametrize("field", ["seed", "epoch", "batch", "hop", "etype"])
def test_samples_of_different_keys_are_independent(field):
    graph = regular(50_000, 5)
    first = picks(graph, 1, KEY)[:, 0]
    second = picks(graph, 1, with_fields(KEY, **{field: getattr(KEY, field) + 1}))[:, 0]
    table = np.histogram2d(first, second, bins=5)[0]
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM
    assert stats.chisquare(table.ravel()).pvalue > FALSE_ALARM


def test_neighboring_nodes_are_independent():
    drawn = picks(regular(50_000, 5), 1, KEY)[:, 0]
    table = np.histogram2d(drawn[:-1], drawn[1:], bins=5)[0]
    assert stats.chisquare(table.ravel()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("bad", [-1, 200, 2**31, 2**40])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_seed_out_of_range(bad, idtype):
    seeds = torch.arange(200).repeat(20)
    seeds[[2345, 3999]] = bad
    with pytest.raises(IdOutOfRangeError, match=f"id {bad} at place 2345"):
        sample_neighbors(GRAPHS["power law"].view(idtype=idtype), seeds, 5, KEY)


def test_bad_arguments():
    view = GRAPHS["power law"].view()
    for seeds in (torch.zeros(3), torch.zeros(1, 3, dtype=torch.int64), [0]):
        with pytest.raises(InvalidInputError, match="the ids "):
            sample_neighbors(view, seeds, 5, KEY)
    for fanout in (-2, 1.5, None, True, 2**63):
        with pytest.raises(InvalidInputError, match="fanout"):
            sample_neighbors(view, torch.arange(3), fanout, KEY)


def test_edge_types_are_sampled_independently():
    graph = regular(50, 9)
    views = {"follows": graph.view(), "likes": graph.view(), "knows": graph.view()}
    seeds = {"likes": torch.arange(50), "follows": torch.arange(50)}
    sampled = sample_etype_neighbors(views, seeds, {"follows": 3, "likes": 4}, KEY)
    assert list(sampled) == ["follows", "likes"]
    for number, (etype, fanout) in enumerate([("follows", 3), ("likes", 4)]):
        key = with_fields(KEY, etype=number)
        assert same(sampled[etype], sample_neighbors(graph.view(), seeds[etype], fanout, key))


def test_edge_types_must_be_known():
    views = {"follows": regular(5, 2).view()}
    with pytest.raises(InvalidInputError, match="'likes'"):
        sample_etype_neighbors(views, {"likes": torch.arange(5)}, 3, KEY)
    with pytest.raises(InvalidInputError, match="no fanout"):
        sample_etype_neighbors(views, {"follows": torch.arange(5)}, {}, KEY)


def test_registration():
    view = GRAPHS["power law"].view(LAYOUTS["four parts"])
    torch.library.opcheck(
        torch.ops.dgl_mgpu.sample_neighbors.default,
        (
            torch.arange(20),
            view.tiers,
            view.pointers,
            view.position,
            view.num_rows,
            view.idtype,
            3,
            False,
            KEY.fold(),
        ),
    )

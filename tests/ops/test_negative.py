"""Negative sampling: bit for bit against the reference, no edges among the samples, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import SampleKey, negative_destinations, negative_edges
from tests.ops import reference
from tests.ops.test_sample import FALSE_ALARM, GRAPHS, KEY
from tests.ops.views import LAYOUTS, Graph, power_law_graph

#: Of six nodes: all edges but self-loops; all; all but two pairs.
COMPLETE = Graph.of_lists([[n for n in range(6) if n != row] for row in range(6)])
FULL = Graph.of_lists([list(range(6))] * 6)
NEARLY_FULL = Graph.of_lists([[1, 2, 3, 4, 5], *[list(range(6))] * 4, [5, 4, 3, 1, 0]])
ALL_GRAPHS = {
    **GRAPHS,
    "complete": COMPLETE,
    "full": FULL,
    "nearly full": NEARLY_FULL,
    "long rows": Graph.of_lists(
        [np.random.default_rng(n).permutation(900)[: 200 * n + 99].tolist() for n in range(4)], 900
    ),
}
#: Graphs, each without and, where a node can be both ends, with self-loops excluded.
CASES = [
    (name, exclude)
    for name, graph in ALL_GRAPHS.items()
    for exclude in ([False, True] if graph.num_rows == graph.num_cols else [False])
]

NO_ROWS = Graph(np.array([0]), np.array([]), 4)


def edges_of(graph: Graph) -> set[tuple[int, int]]:
    return {(int(u), v) for v in range(graph.num_rows) for u in graph.neighbors(v)}


def expect_edges(
    graph: Graph, num: int, replace: bool, loops: bool, tries: int, key: int
) -> tuple[list[int], list[int]]:
    """The contract of ``negative_edges``; ``loops`` are allowed or not."""
    edges = edges_of(graph)
    taken: dict[int, tuple[int, int]] = {}
    for attempt in range(tries):
        for place in range(num):
            if place in taken:
                continue
            first, second = reference.block(place, 0, 2**29 + attempt, key)
            pair = (first * graph.num_cols >> 64, second * graph.num_rows >> 64)
            if pair in edges or (not loops and pair[0] == pair[1]):
                continue
            if replace or pair not in taken.values():
                taken[place] = pair
    pairs = [taken[place] for place in sorted(taken)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def expect_destinations(
    graph: Graph, sources: Sequence[int], k: int, avoid: bool, loops: bool, tries: int, key: int
) -> list[list[int]]:
    """The contract of ``negative_destinations``."""
    edges = edges_of(graph) if avoid else set()
    rows = []
    for place, source in enumerate(sources):
        mention = list(sources[:place]).count(source)
        row = []
        for column in range(k):
            chosen = -1
            for attempt in range(tries):
                draw, _ = reference.block(source, mention * k + column, 2**30 + attempt, key)
                candidate = draw * graph.num_rows >> 64
                if (source, candidate) not in edges and (loops or source != candidate):
                    chosen = candidate
                    break
            row.append(chosen)
        rows.append(row)
    return rows


def some_sources(graph: Graph, count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).integers(0, graph.num_cols, count))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(("name", "exclude"), CASES)
def test_edges_match_reference(name, replace, exclude):
    graph = ALL_GRAPHS[name]
    for num, tries in ((0, 3), (1, 1), (150, 4)):
        found = negative_edges(
            graph.view(), num, KEY, replace=replace, exclude_self_loops=exclude, max_tries=tries
        )
        expected = expect_edges(graph, num, replace, not exclude, tries, KEY.fold())
        assert (found.sources.tolist(), found.destinations.tolist()) == expected


@pytest.mark.parametrize("avoid", [False, True])
@pytest.mark.parametrize(("name", "exclude"), CASES)
def test_destinations_match_reference(name, avoid, exclude):
    graph = ALL_GRAPHS[name]
    for count, k, tries in ((0, 2, 3), (3, 0, 1), (1, 4, 1), (60, 3, 4)):
        sources = some_sources(graph, count)
        found = negative_destinations(
            graph.view(),
            sources,
            k,
            KEY,
            avoid_existing=avoid,
            exclude_self_loops=exclude,
            max_tries=tries,
        )
        assert found.shape == (count, k)
        assert found.tolist() == expect_destinations(
            graph, sources.tolist(), k, avoid, not exclude, tries, KEY.fold()
        )


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_id_types_give_the_same_pairs(layout, shuffled, idtype):
    graph = GRAPHS["power law"]
    view = graph.view(LAYOUTS[layout], idtype, np.random.default_rng(0) if shuffled else None)
    found, expected = (negative_edges(each, 500, KEY) for each in (view, graph.view()))
    for ends, expected_ends in zip(found, expected, strict=True):
        assert ends.dtype == idtype and torch.equal(ends.long(), expected_ends)
    sources = some_sources(graph, 100)
    found = negative_destinations(view, sources.to(idtype), 3, KEY)
    assert found.dtype == idtype
    assert torch.equal(found.long(), negative_destinations(graph.view(), sources, 3, KEY))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_threads(on_threads, number):
    graph = power_law_graph(300, 40_000, seed=4)
    view, sources = graph.view(), some_sources(graph, 2000)

    def draw():
        destinations = negative_destinations(view, sources, 2, KEY)
        return *negative_edges(view, 5000, KEY), destinations

    for found, expected in zip(on_threads(number, draw), on_threads(1, draw), strict=True):
        assert torch.equal(found, expected)


def test_children(in_children):
    view = power_law_graph(300, 40_000, seed=4).view()
    expected = negative_edges(view, 3000, KEY)
    for answer in in_children(lambda: tuple(negative_edges(view, 3000, KEY))):
        assert all(torch.equal(*ends) for ends in zip(answer, expected, strict=True))


@pytest.mark.parametrize("replace", [False, True])
def test_every_pair_that_is_no_edge_is_equally_likely(replace):
    graph = power_law_graph(12, 60, seed=2)
    edges, counts = edges_of(graph), np.zeros((12, 12), np.int64)
    for batch in range(400):
        ends = negative_edges(graph.view(), 20, SampleKey(1, batch=batch), replace=replace)
        np.add.at(counts, tuple(each.numpy() for each in ends), 1)
    free = np.array([[u != v and (u, v) not in edges for v in range(12)] for u in range(12)])
    assert counts[~free].sum() == 0
    drawn, share = counts[free], 20 / free.sum()
    assert drawn.sum() == 400 * 20
    # Distinct pairs of a batch are negatively correlated: the statistic is smaller by 1 - share.
    statistic = ((drawn - drawn.mean()) ** 2 / drawn.mean()).sum() / (1 if replace else 1 - share)
    assert stats.chi2(free.sum() - 1).sf(statistic) > FALSE_ALARM


def test_destinations_of_a_source_are_uniform_and_independent():
    graph = Graph.of_lists([[0, 1], [], [0, 0], [], [1], [], [2], []], num_cols=8)
    sources = torch.zeros(20_000, dtype=torch.int64)
    found = negative_destinations(graph.view(), sources, 2, KEY, max_tries=60).numpy()
    free = [1, 3, 4, 5, 6, 7]  # no edge from 0, and not 0
    table = np.zeros((8, 8), np.int64)
    np.add.at(table, (found[:, 0], found[:, 1]), 1)
    counts = table[np.ix_(free, free)]
    assert counts.sum() == 20_000
    assert stats.chisquare(counts.ravel()).pvalue > FALSE_ALARM
    following = np.histogram2d(found[:-1, 0], found[1:, 0], bins=np.arange(9))[0]
    assert stats.chisquare(following[np.ix_(free, free)].ravel()).pvalue > FALSE_ALARM


def test_without_replacement_pairs_are_distinct_and_scarce_ones_are_found():
    found = negative_edges(NEARLY_FULL.view(), 50, KEY, exclude_self_loops=False, max_tries=40)
    assert sorted(zip(*(ends.tolist() for ends in found), strict=True)) == [(0, 0), (2, 5)]


def test_a_complete_graph_has_no_negatives():
    for graph, exclude in ((COMPLETE, True), (FULL, False)):
        view = graph.view()
        sources, destinations = negative_edges(view, 30, KEY, exclude_self_loops=exclude)
        assert sources.tolist() == destinations.tolist() == []
        found = negative_destinations(view, torch.arange(6), 2, KEY, exclude_self_loops=exclude)
        assert found.tolist() == [[-1, -1]] * 6


def test_no_nodes():
    view = NO_ROWS.view()
    assert negative_edges(view, 5, KEY, exclude_self_loops=False).sources.tolist() == []
    found = negative_destinations(view, torch.tensor([3, 0]), 2, KEY, exclude_self_loops=False)
    assert found.tolist() == [[-1, -1]] * 2


def test_keys_name_samples_and_operators_draw_apart():
    view, nodes = Graph.of_lists([[]] * 100).view(), torch.arange(100)
    drawn = [negative_edges(view, 100, SampleKey(seed), replace=True) for seed in (1, 2)]
    destinations = negative_destinations(view, nodes, 1, SampleKey(1))[:, 0]
    samples = [*drawn[0], *drawn[1], destinations]
    for first, second in combinations(samples, 2):
        assert (first == second).sum() < 12  # of which one is expected


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_source_out_of_range(bad):
    sources = torch.tensor([9, bad, 0])  # there are more sources than destinations
    with pytest.raises(IdOutOfRangeError, match=f"id {bad} at place 1 is not among the 10 rows"):
        negative_destinations(GRAPHS["bipartite"].view(), sources, 2, KEY, exclude_self_loops=False)


def test_bad_arguments():
    view, sources = GRAPHS["power law"].view(), torch.arange(3)
    with pytest.raises(InvalidInputError, match="dtype"):
        negative_destinations(view, sources.float(), 2, KEY)
    with pytest.raises(InvalidInputError, match="k is -1"):
        negative_destinations(view, sources, -1, KEY)
    with pytest.raises(InvalidInputError, match=r"num is 1\.5"):
        negative_edges(view, 1.5, KEY)
    for bad in (0, 2**29 + 1, None):
        with pytest.raises(InvalidInputError, match="max_tries"):
            negative_edges(view, 3, KEY, max_tries=bad)
        with pytest.raises(InvalidInputError, match="max_tries"):
            negative_destinations(view, sources, 3, KEY, max_tries=bad)
    with pytest.raises(InvalidInputError, match="exclude_self_loops=False"):
        negative_edges(GRAPHS["bipartite"].view(), 3, KEY)
    with pytest.raises(InvalidInputError, match="exclude_self_loops=False"):
        negative_destinations(GRAPHS["bipartite"].view(), sources, 3, KEY)


def test_registration():
    view = GRAPHS["power law"].view(LAYOUTS["four parts"])
    graph = (
        view.tiers,
        view.pointers,
        view.position,
        view.num_rows,
        view.num_cols,
        view.idtype,
    )
    operators = torch.ops.dgl_mgpu
    torch.library.opcheck(
        operators.negative_edges.default, (*graph, 50, False, True, 5, KEY.fold())
    )
    sources = torch.arange(20)
    torch.library.opcheck(
        operators.negative_destinations.default,
        (sources, torch.zeros_like(sources), *graph, 3, True, True, 5, KEY.fold()),
    )

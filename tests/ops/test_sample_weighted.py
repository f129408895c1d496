"""Weighted and temporal neighbour sampling: bit for bit against the reference; distributions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as with_fields
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from dgl_mgpu.errors import InvalidInputError, InvalidWeightError
from dgl_mgpu.ops import (
    SampleKey,
    check_weights,
    sample_blocks,
    sample_etype_neighbors,
    sample_neighbors,
)
from dgl_mgpu.ops.sample_weighted import EdgeTimes
from tests.ops import reference
from tests.ops.test_sample import FALSE_ALARM, GRAPHS, KEY, batches, regular, same
from tests.ops.views import LAYOUTS, Graph, elsewhere, power_law_graph, row_view

DTYPES = [torch.float32, torch.float64, torch.bool, torch.uint8]
TIME_DTYPES = [torch.int32, torch.int64, torch.float32, torch.float64]


def random_weights(graph: Graph, dtype: torch.dtype) -> torch.Tensor:
    """Weights over many orders of magnitude, a third of them 0 but not a node's first."""
    random = np.random.default_rng(6)
    weights = 10 ** random.uniform(-12, 12, len(graph.indices))
    weights[random.random(len(weights)) < 1 / 3] = 0
    for node in range(graph.num_rows):
        weights[graph.edge_ids(node)[:1]] = 1.0
    return torch.from_numpy(weights != 0 if not dtype.is_floating_point else weights).to(dtype)


def random_times(graph: Graph, dtype: torch.dtype, seeds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Times of edges and of seeds, few enough for many to be equal."""
    random = torch.Generator().manual_seed(8)
    edges = torch.randint(-4, 5, (len(graph.indices),), generator=random)
    return edges.to(dtype), torch.randint(-5, 5, (seeds,), generator=random).to(dtype)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [0, 1, 3, 60, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRAPHS)
def test_matches_reference(name, dtype, fanout, replace):
    graph = GRAPHS[name]
    weights = random_weights(graph, dtype)
    for seeds in batches(graph):
        seeds = seeds[:40]
        sampled = sample_neighbors(
            graph.view(), seeds, fanout, KEY, replace=replace, weights=row_view(weights)
        )
        expected = reference.sample(
            graph, seeds.tolist(), fanout, KEY.fold(), replace, weights.numpy()
        )
        assert same(sampled, expected)
        assert (weights[sampled.eids.long()] > 0).all()


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_id_types_give_the_same_sample(layout, shuffled, idtype):
    graph = GRAPHS["power law"]
    weights = random_weights(graph, torch.float32)
    shuffle = np.random.default_rng(0) if shuffled else None
    view = graph.view(LAYOUTS[layout], idtype, shuffle)
    weight_view = row_view(weights, LAYOUTS[layout], shuffle)
    for seeds, fanout, replace in product(batches(graph), (3, -1), (False, True)):
        assert same(
            sample_neighbors(view, seeds, fanout, KEY, replace=replace, weights=weight_view),
            sample_neighbors(
                graph.view(), seeds, fanout, KEY, replace=replace, weights=row_view(weights)
            ),
        )


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("replace", [False, True])
def test_threads(on_threads, number, replace):
    graph = power_law_graph(3000, 30_000, seed=4)
    weights, seeds = random_weights(graph, torch.float64), torch.arange(3000)

    def sample():
        return sample_neighbors(
            graph.view(), seeds, 4, KEY, replace=replace, weights=row_view(weights)
        )

    assert same(on_threads(number, sample), on_threads(1, sample))


def draw(weights: list[float], fanout: int, replace: bool, seed: int, nodes: int) -> Counter:
    """How often each sequence of edges comes, over nodes that all have the same weights."""
    graph = regular(nodes, len(weights))
    sampled = sample_neighbors(
        graph.view(),
        torch.arange(nodes),
        fanout,
        SampleKey(seed),
        replace=replace,
        weights=row_view(torch.tensor(weights * nodes, dtype=torch.float64)),
    )
    return Counter(map(tuple, sampled.neighbors.reshape(nodes, fanout).tolist()))


@pytest.mark.parametrize("seed", range(3))
def test_distribution_with_replacement(seed):
    weights = [1.0, 2.0, 0.0, 5.0]
    seen = draw(weights, 2, True, seed, nodes=40_000)
    expected = {
        (a, b): weights[a] * weights[b] / 64 * 40_000
        for a, b in product(range(4), repeat=2)
        if weights[a] * weights[b]
    }
    assert set(seen) <= set(expected)
    counts = [seen[pair] for pair in expected]
    assert stats.chisquare(counts, list(expected.values())).pvalue > FALSE_ALARM


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fanout", [1, 2, 3])
def test_distribution_without_replacement(seed, fanout):
    """Order and inclusion as in drawing one after another, enumerated exactly."""
    weights = [0.5, 1.0, 3.0, 8.0]
    seen = draw(weights, fanout, False, seed, nodes=40_000)
    exact = reference.ordered_probabilities(weights, fanout)
    counts = [seen[order] for order in exact]
    assert sum(counts) == 40_000
    expected = np.array(list(exact.values())) * 40_000
    assert stats.chisquare(counts, expected).pvalue > FALSE_ALARM


def test_equal_weights_are_uniform():
    seen = draw([3.0] * 6, 2, False, seed=0, nodes=30_000)
    assert stats.chisquare([seen[pair] for pair in seen]).pvalue > FALSE_ALARM
    assert len(seen) == 30


def test_an_all_false_mask_gives_nothing():
    graph = GRAPHS["power law"]
    mask = row_view(torch.zeros(3000, dtype=torch.bool))
    for fanout, replace in product((3, -1), (False, True)):
        sampled = sample_neighbors(
            graph.view(), torch.arange(200), fanout, KEY, replace=replace, weights=mask
        )
        assert sampled.indptr.tolist() == [0] * 201
    check_weights(graph.view(), mask)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bad_weight(dtype, bad):
    graph = GRAPHS["power law"]
    weights = torch.ones(3000, dtype=dtype)
    node = 11
    edge = int(graph.edge_ids(node)[-1])
    weights[edge] = bad
    message = f"edge {edge} of node {node} has a weight that is NaN, infinite or negative"
    with pytest.raises(InvalidWeightError, match=message):
        sample_neighbors(graph.view(), torch.arange(200), 2, KEY, weights=row_view(weights))
    with pytest.raises(InvalidWeightError, match=message):
        check_weights(graph.view(LAYOUTS["three tiers"]), row_view(weights))
    others = torch.tensor([0, 1, 2, 3])  # a node that nobody asks for is not looked at
    sample_neighbors(graph.view(), others, 2, KEY, weights=row_view(weights))


def test_all_zero_at_a_node():
    graph = GRAPHS["power law"]
    weights = torch.ones(3000)
    weights[graph.edge_ids(5)] = 0
    with pytest.raises(InvalidWeightError, match="node 5 have weight 0"):
        check_weights(graph.view(), row_view(weights))
    with pytest.raises(InvalidWeightError, match="node 5 have weight 0"):
        sample_neighbors(graph.view(), torch.tensor([1, 5]), 2, KEY, weights=row_view(weights))


def test_check_accepts_good_weights_and_nodes_without_edges():
    for graph in GRAPHS.values():
        check_weights(graph.view(), row_view(random_weights(graph, torch.float32)))


@pytest.mark.parametrize(
    "weights", [torch.ones(2999), torch.ones(3000, 1), torch.ones(3000, dtype=torch.int64)]
)
def test_weights_that_do_not_fit(weights):
    view = GRAPHS["power law"].view()
    with pytest.raises(InvalidInputError, match="weight"):
        sample_neighbors(view, torch.arange(3), 2, KEY, weights=row_view(weights))
    with pytest.raises(InvalidInputError, match="weight"):
        check_weights(view, row_view(weights))


def test_weights_and_times_on_another_device():
    view, seeds = GRAPHS["power law"].view(), torch.arange(3)
    weights, times = (elsewhere(row_view(torch.ones(3000))) for _ in range(2))
    for sample in (
        lambda: sample_neighbors(view, seeds, 2, KEY, weights=weights),
        lambda: sample_neighbors(view, seeds, 2, KEY, times=EdgeTimes(times, torch.ones(3))),
        lambda: sample_blocks(view, seeds, [2, 2], KEY, weights=weights),
        lambda: check_weights(view, weights),
    ):
        with pytest.raises(InvalidInputError, match="are on 'meta', but the graph is on 'cpu'"):
            sample()


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [0, 1, 3, 60, -1])
@pytest.mark.parametrize("dtype", TIME_DTYPES)
def test_times_match_reference(dtype, fanout, replace):
    for name, number in product(GRAPHS, range(3)):
        graph = GRAPHS[name]
        seeds = batches(graph)[number][:40]
        edges, until = random_times(graph, dtype, len(seeds))
        weights = random_weights(graph, torch.bool)
        for mask in (None, weights):
            sampled = sample_neighbors(
                graph.view(),
                seeds,
                fanout,
                KEY,
                replace=replace,
                weights=None if mask is None else row_view(mask),
                times=EdgeTimes(row_view(edges), until),
            )
            expected = reference.sample(
                graph,
                seeds.tolist(),
                fanout,
                KEY.fold(),
                replace,
                None if mask is None else mask.numpy(),
                edges.numpy(),
                until.tolist(),
            )
            assert same(sampled, expected)
            degrees = sampled.indptr.diff()
            assert (edges[sampled.eids.long()] <= until.repeat_interleave(degrees)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_times_in_tiers_and_floating_weights(layout):
    graph = GRAPHS["power law"]
    seeds = batches(graph)[2]
    weights = random_weights(graph, torch.float64)
    edges, until = random_times(graph, torch.int32, len(seeds))
    # Where all edges in time have weight 0 there is an error to raise; let there be none.
    weights[weights == 0] = 0.5
    sampled = sample_neighbors(
        graph.view(),
        seeds,
        4,
        KEY,
        weights=row_view(weights),
        times=EdgeTimes(row_view(edges, LAYOUTS[layout], np.random.default_rng(0)), until.long()),
    )
    assert same(
        sampled,
        reference.sample(
            graph,
            seeds.tolist(),
            4,
            KEY.fold(),
            weights=weights.numpy(),
            times=edges.numpy(),
            until=until.tolist(),
        ),
    )


def test_a_node_at_two_times():
    graph = Graph.of_lists([[5, 6, 7, 8]], num_cols=9)
    times = EdgeTimes(row_view(torch.tensor([3, 1, 2, 9])), torch.tensor([1, 3, 0, 2]))
    sampled = sample_neighbors(graph.view(), torch.zeros(4, dtype=torch.int64), 5, KEY, times=times)
    assert sampled.indptr.tolist() == [0, 1, 4, 4, 6]
    assert sampled.neighbors.tolist() == [6, 5, 6, 7, 6, 7]


def test_times_are_compared_exactly():
    """float64 cannot tell these integers apart, nor float32 these floats."""
    graph = Graph.of_lists([[0, 0]])
    seeds, large = torch.tensor([0]), 2**62
    times = EdgeTimes(row_view(torch.tensor([large, large + 1])), torch.tensor([large]))
    assert sample_neighbors(graph.view(), seeds, 5, KEY, times=times).eids.tolist() == [0]
    limit = torch.tensor([1 - 1e-12], dtype=torch.float64)
    times = EdgeTimes(row_view(torch.tensor([0.5, 1.0])), limit)
    assert sample_neighbors(graph.view(), seeds, 5, KEY, times=times).eids.tolist() == [0]


def test_no_time_is_in_no_sample():
    graph = Graph.of_lists([[0, 0]])
    nan = float("nan")
    for edges, until, expected in (([1.0, nan], 2.0, [0]), ([1.0, 1.0], nan, [])):
        times = EdgeTimes(row_view(torch.tensor(edges)), torch.tensor([until]))
        sampled = sample_neighbors(graph.view(), torch.tensor([0]), -1, KEY, times=times)
        assert sampled.eids.tolist() == expected


@pytest.mark.parametrize("seed", range(3))
def test_edges_in_time_are_equally_likely(seed):
    nodes = 30_000
    graph = regular(nodes, 6)
    times = EdgeTimes(row_view(torch.tensor([0, 9, 0, 0, 9, 0] * nodes)), torch.full((nodes,), 5))
    sampled = sample_neighbors(graph.view(), torch.arange(nodes), 2, SampleKey(seed), times=times)
    seen = Counter(map(tuple, sampled.neighbors.reshape(nodes, 2).tolist()))
    assert set(seen) == {(a, b) for a, b in product((0, 2, 3, 5), repeat=2) if a != b}
    assert stats.chisquare(list(seen.values())).pvalue > FALSE_ALARM


def test_weights_of_late_edges_do_not_count():
    graph = Graph.of_lists([[0, 0, 0]])
    weights = row_view(torch.tensor([float("nan"), 1e300, 2.0], dtype=torch.float64))
    seed, edges = torch.tensor([0]), row_view(torch.tensor([7, 8, 6]))

    def sample(time: int) -> list[int]:
        times = EdgeTimes(edges, torch.tensor([time]))
        return sample_neighbors(
            graph.view(), seed, 2, KEY, weights=weights, times=times
        ).eids.tolist()

    assert sample(5) == []
    assert sample(6) == [2]
    with pytest.raises(InvalidWeightError, match="edge 0 of node 0"):
        sample(7)


def test_all_weights_in_time_zero():
    graph = Graph.of_lists([[0, 0]])
    weights = row_view(torch.tensor([0.0, 1.0]))
    edges = row_view(torch.tensor([1, 2]))
    with pytest.raises(InvalidWeightError, match="all edges of node 0"):
        times = EdgeTimes(edges, torch.tensor([1]))
        sample_neighbors(graph.view(), torch.tensor([0]), 2, KEY, weights=weights, times=times)


def test_times_by_edge_type():
    graph = regular(20, 9)
    times = EdgeTimes(row_view(torch.arange(180)), torch.full((20,), 90))
    seeds = {"likes": torch.arange(20), "knows": torch.arange(20)}
    views = {"likes": graph.view(), "knows": graph.view()}
    sampled = sample_etype_neighbors(views, seeds, 3, KEY, times={"knows": times})
    for number, (etype, its_times) in enumerate([("likes", None), ("knows", times)]):
        key = with_fields(KEY, etype=number)
        expected = sample_neighbors(graph.view(), seeds[etype], 3, key, times=its_times)
        assert same(sampled[etype], expected)
    with pytest.raises(InvalidInputError, match="times names the unknown type 'hates'"):
        sample_etype_neighbors(views, seeds, 3, KEY, times={"hates": times})


@pytest.mark.parametrize(
    ("edges", "until"),
    [
        (torch.arange(2999), torch.arange(3)),
        (torch.ones(3000, 1), torch.ones(3)),
        (torch.ones(3000, dtype=torch.bool), torch.arange(3)),
        (torch.arange(3000), torch.ones(3)),
        (torch.ones(3000), torch.arange(3)),
        (torch.arange(3000), torch.arange(2)),
        (torch.arange(3000), torch.zeros(3, 1, dtype=torch.int64)),
        (torch.arange(3000), torch.zeros(3, dtype=torch.int64, device="meta")),
    ],
)
def test_times_that_do_not_fit(edges, until):
    times = EdgeTimes(row_view(edges), until)
    with pytest.raises(InvalidInputError, match="time"):
        sample_neighbors(GRAPHS["power law"].view(), torch.arange(3), 2, KEY, times=times)


def test_children(in_children):
    graph = GRAPHS["power law"]
    view, weights = graph.view(), row_view(random_weights(graph, torch.float32))
    seeds = torch.arange(200).repeat(10)
    expected = sample_neighbors(view, seeds, 2, KEY, weights=weights)
    for answer in in_children(lambda: sample_neighbors(view, seeds, 2, KEY, weights=weights)):
        assert same(answer, expected)


def test_registration():
    graph = GRAPHS["power law"]
    view, weights = graph.view(), row_view(random_weights(graph, torch.float32))
    placed = (view.tiers, view.pointers, view.position, view.num_rows, view.idtype)
    weighed = ([weights.tiers, weights.pointers, weights.position], weights.dtype)
    operators = torch.ops.dgl_mgpu
    torch.library.opcheck(
        operators.sample_neighbors_weighted.default,
        (torch.arange(20), *placed, *weighed, [], None, None, 3, True, KEY.fold()),
    )
    edges, until = random_times(graph, torch.int64, 20)
    times = row_view(edges)
    timed = ([times.tiers, times.pointers, times.position], times.dtype, until)
    torch.library.opcheck(
        operators.sample_neighbors_weighted.default,
        (torch.arange(20), *placed, [], None, *timed, 3, False, KEY.fold()),
    )
    # It has no output, so that there is nothing to trace.
    torch.library.opcheck(
        operators.check_weights.default, (*placed, *weighed), test_utils="test_schema"
    )

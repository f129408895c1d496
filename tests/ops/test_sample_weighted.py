"""Weighted neighbour sampling: bit for bit against the reference, and its distribution."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from dgl_mgpu.errors import InvalidInputError, InvalidWeightError
from dgl_mgpu.ops import SampleKey, check_weights, sample_neighbors
from tests.ops import reference
from tests.ops.test_sample import FALSE_ALARM, GRAPHS, KEY, batches, regular, same
from tests.ops.views import LAYOUTS, Graph, power_law_graph, row_view

DTYPES = [torch.float32, torch.float64, torch.bool, torch.uint8]


def random_weights(graph: Graph, dtype: torch.dtype) -> torch.Tensor:
    """Weights over many orders of magnitude, a third of them 0 but not a node's first."""
    random = np.random.default_rng(6)
    weights = 10 ** random.uniform(-12, 12, len(graph.indices))
    weights[random.random(len(weights)) < 1 / 3] = 0
    for node in range(graph.num_rows):
        weights[graph.edge_ids(node)[:1]] = 1.0
    return torch.from_numpy(weights != 0 if not dtype.is_floating_point else weights).to(dtype)


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
    weighed = (weights.tiers, weights.pointers, weights.position, weights.dtype)
    operators = torch.ops.dgl_mgpu
    torch.library.opcheck(
        operators.sample_neighbors_weighted.default,
        (torch.arange(20), *placed, *weighed, 3, True, KEY.fold()),
    )
    # It has no output, so that there is nothing to trace.
    torch.library.opcheck(
        operators.check_weights.default, (*placed, *weighed), test_utils="test_schema"
    )

"""Random walks and PinSAGE's neighbors as CUDA kernels: bit for bit the CPU's results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.ops import SampleKey, pinsage_neighbors, random_walk
from dgl_mgpu.ops.walk import (
    _pinsage_neighbors_cuda,
    _random_walk_cuda,
    occurrences,
    tiered_path,
)
from tests.kernels.cuda_views import on_device
from tests.ops import reference
from tests.ops.test_sample import GRAPHS, regular
from tests.ops.test_walk import TO_ITEMS, TO_USERS
from tests.ops.views import LAYOUTS, Graph

KEY = SampleKey(seed=3, epoch=1, batch=4, hop=0)
SQUARE = sorted(set(GRAPHS) - {"bipartite"})


def walk(views, starts, stops):
    return _random_walk_cuda(
        starts, occurrences(starts), *tiered_path(views, stops), KEY.fold()
    ).cpu()


def walk_with_edges(views, starts, stops):
    edges = torch.empty(len(starts), len(stops), dtype=torch.int64, device=starts.device)
    traces = _random_walk_cuda(
        starts, occurrences(starts), *tiered_path(views, stops), KEY.fold(), edges
    )
    return [traces.cpu(), edges.cpu()]


def visited(views, seeds, traversals, stop, walks, neighbors):
    steps = range(traversals * len(views))
    stops = [stop if step > 0 and step % len(views) == 0 else 0.0 for step in steps]
    chosen = _pinsage_neighbors_cuda(
        seeds, *tiered_path(views, stops), walks, neighbors, KEY.fold()
    )
    return [part.cpu() for part in chosen]


def some_nodes(graph: Graph, count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(2).integers(0, graph.num_rows, count))


def same(found, expected):
    return all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def expect_visited(views, seeds, traversals, stop, walks, neighbors):
    return pinsage_neighbors(
        views,
        seeds,
        num_traversals=traversals,
        termination_prob=stop,
        num_random_walks=walks,
        num_neighbors=neighbors,
        key=KEY,
    )


@pytest.mark.parametrize("name", SQUARE)
def test_graphs(where, name):
    graph = GRAPHS[name]
    view = on_device(graph.view(), where)
    for count in (0, 1, 300):
        starts = some_nodes(graph, count)
        for stops in ([0.2] * 5, [1.0], []):
            expected = random_walk(graph.view(), starts, len(stops), KEY, restart_prob=stops)
            assert torch.equal(walk([view], starts.to(where), stops), expected)
        found = visited([view], starts.to(where), 3, 0.2, 4, 5)
        assert same(found, expect_visited(graph.view(), starts, 3, 0.2, 4, 5))


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_id_types(where, layout, shuffled, idtype):
    graph = GRAPHS["power law"]
    shuffle = np.random.default_rng(0) if shuffled else None
    view = on_device(graph.view(LAYOUTS[layout], idtype, shuffle), where, host_segments=True)
    starts = some_nodes(graph, 100)
    expected = random_walk(graph.view(), starts, 6, KEY, restart_prob=0.1)
    assert torch.equal(walk([view], starts.to(idtype).to(where), [0.1] * 6), expected)
    found = visited([view], starts.to(idtype).to(where), 3, 0.1, 4, 5)
    assert same(found, expect_visited(graph.view(idtype=idtype), starts, 3, 0.1, 4, 5))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_edges_of_walks(where, layout, named):
    graph = GRAPHS["power law"]
    if named:
        eids = np.random.default_rng(5).permutation(len(graph.indices))
        graph = Graph(graph.indptr, graph.indices, eids=eids)
    view, starts = graph.view(LAYOUTS[layout]), some_nodes(graph, 100)
    edges = torch.empty(100, 6, dtype=torch.int64)
    expected = [random_walk(view, starts, 6, KEY, restart_prob=0.1, edges=edges), edges]
    assert same(walk_with_edges([on_device(view, where)], starts.to(where), [0.1] * 6), expected)


def test_metapath_of_views_with_positions_of_different_width(where):
    graphs = [TO_ITEMS, TO_USERS]
    shuffled = TO_ITEMS.view(LAYOUTS["three tiers"], shuffle=np.random.default_rng(1))
    wide = TO_USERS.view(LAYOUTS["four parts"], shuffle=np.random.default_rng(2))
    wide = replace(wide, position=wide.position.long())
    starts, stops = torch.arange(5).repeat(9), [0.0, 0.0, 0.5, 0.0, 0.25]
    for second in (wide, TO_USERS.view()):
        views = [on_device(view, where) for view in (shuffled, second)]
        expected = random_walk(
            [graph.view() for graph in graphs], starts, 5, KEY, restart_prob=stops
        )
        assert torch.equal(walk(views, starts.to(where), stops), expected)
        found = visited(views, starts.to(where), 3, 0.3, 4, 3)
        assert same(found, expect_visited([g.view() for g in graphs], starts, 3, 0.3, 4, 3))


def test_a_walk_ends_exactly_below_its_probability(where):
    view, starts = on_device(regular(4, 4).view(), where), torch.tensor([0], device=where)
    end = reference.block(0, 0, 2**31, KEY.fold())[1] >> 11
    assert walk([view], starts, [end / 2**53])[0, 1] >= 0
    assert walk([view], starts, [(end + 1) / 2**53])[0, 1] == -1


@pytest.mark.parametrize(("walks", "neighbors"), [(1, 0), (1, 1), (50, 7), (50, 1000)])
def test_numbers_of_walks_and_neighbors(where, walks, neighbors):
    graph, view = GRAPHS["power law"], on_device(GRAPHS["power law"].view(), where)
    seeds = some_nodes(graph, 9)
    found = visited([view], seeds.to(where), 4, 0.1, walks, neighbors)
    assert same(found, expect_visited(graph.view(), seeds, 4, 0.1, walks, neighbors))


def test_thousands_of_visits_to_few_nodes(where):
    graph = Graph.of_lists([[0, 1, 2, 2], [0, 1], []])
    seeds = torch.tensor([0, 2, 1])
    found = visited([on_device(graph.view(), where)], seeds.to(where), 2, 0.0, 600, 5)
    assert same(found, expect_visited(graph.view(), seeds, 2, 0.0, 600, 5))


@pytest.mark.parametrize("bad", [-1, 200, 2**40])
def test_start_out_of_range(where, bad):
    view = on_device(GRAPHS["power law"].view(), where)
    starts = torch.tensor([0, 199, bad, 500, 3], device=where)
    for call in (
        lambda: walk([view], starts, [0.0]),
        lambda: visited([view], starts, 1, 0.0, 3, 2),
    ):
        with pytest.raises(
            IdOutOfRangeError, match=f"id {bad} at place 2 is not among the 200 rows"
        ):
            call()

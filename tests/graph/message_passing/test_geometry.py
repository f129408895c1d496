"""Neighbours, samples and matchings of points against DGL's C++."""

from __future__ import annotations

import warnings

import dgl
import dgl.geometry
import pytest
import torch
from dgl.geometry.capi import _neighbor_matching

from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.message_passing import geometry

SEGMENTS = {
    "one set": [60],
    "equal sets": [20, 20, 20],
    "sets of different sizes": [7, 40, 5, 8],
    "small sets": [5] * 12,
}


def ours(function):
    with tensor_backed_graphs():
        return function()


def neighbors(found: torch.Tensor, k: int) -> torch.Tensor:
    """For every query, what was found for it, by number: DGL's order says nothing."""
    queries, points = found.view(2, -1, k)
    assert (queries == queries[:, :1]).all()
    assert torch.equal(queries[:, 0], torch.arange(len(queries), dtype=found.dtype))
    return points.sort(1).values


@pytest.fixture
def few_distances(monkeypatch):
    """Sets are large and have to be taken in several steps."""
    monkeypatch.setattr(geometry, "_MAX_DISTANCES", 300)


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("algorithm", ["bruteforce", "kd-tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", ["at once", "in steps"])
def test_knn_finds_what_dgl_finds(segments, algorithm, dtype, steps, request):
    if steps == "in steps":
        request.getfixturevalue("few_distances")
    torch.manual_seed(0)
    x = torch.randn(60, 3, dtype=dtype)
    found = dgl.transforms.functional.knn(5, x, segments, algorithm=algorithm)
    here = ours(lambda: dgl.transforms.functional.knn(5, x, segments, algorithm=algorithm))
    assert here.dtype == found.dtype
    assert torch.equal(neighbors(here, 5), neighbors(found, 5))


@pytest.mark.parametrize("dist", ["euclidean", "cosine"])
@pytest.mark.parametrize("steps", ["at once", "in steps"])
def test_knn_of_other_points_finds_what_dgl_finds(dist, steps, request):
    if steps == "in steps":
        request.getfixturevalue("few_distances")
    torch.manual_seed(0)
    x, y = torch.randn(50, 4), torch.randn(33, 4)
    arguments = (3, x, [30, 4, 16], y, [1, 20, 12])
    found = dgl.transforms.functional.knn(*arguments, dist=dist)
    here = ours(lambda: dgl.transforms.functional.knn(*arguments, dist=dist))
    assert torch.equal(neighbors(here, 3), neighbors(found, 3))


@pytest.mark.parametrize("algorithm", ["bruteforce", "bruteforce-sharemem", "kd-tree"])
def test_neighbours_come_by_distance_and_ties_are_as_near(algorithm):
    x = torch.cartesian_prod(*[torch.arange(6.0)] * 2)
    found = ours(lambda: dgl.transforms.functional.knn(9, x, [36], algorithm=algorithm))
    distances = (x[found[0]] - x[found[1]]).square().sum(1).view(36, 9)
    assert torch.equal(distances, torch.cdist(x, x).square().round().sort(1).values[:, :9])
    assert all(len(set(row)) == 9 for row in found[1].view(36, 9).tolist())


def test_queries_of_no_points_are_left_out():
    x = torch.randn(6, 2)
    out = torch.full((2, 4), -1)
    bounds = torch.tensor([0, 3, 6]), torch.tensor([0, 0, 2])
    geometry.knn(x, bounds[0], x[:2], bounds[1], 2, out, "bruteforce")
    nearest = torch.cdist(x[:2], x[3:]).argsort(1)[:, :2] + 3
    assert torch.equal(out.view(2, 2, 2)[1], nearest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_distances_of_16_bit_points_are_those_of_float32(dtype):
    torch.manual_seed(0)
    x = torch.randn(40, 3).to(dtype)
    found = ours(lambda: dgl.transforms.functional.knn(4, x, [40]))
    expected = dgl.transforms.functional.knn(4, x.float(), [40])
    assert torch.equal(neighbors(found, 4), neighbors(expected, 4))


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_nn_descent_finds_the_true_neighbours(segments):
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    found = ours(lambda: dgl.transforms.functional.knn(4, x, segments, algorithm="nn-descent"))
    exact = dgl.transforms.functional.knn(4, x, segments, algorithm="bruteforce")
    assert torch.equal(neighbors(found, 4), neighbors(exact, 4))


@pytest.mark.parametrize("algorithm", ["bruteforce", "kd-tree", "bruteforce-blas"])
def test_knn_graphs_are_those_of_dgl(algorithm):
    torch.manual_seed(0)
    x = torch.randn(3, 20, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = dgl.knn_graph(x, 4, algorithm=algorithm)
        found = ours(lambda: dgl.knn_graph(x, 4, algorithm=algorithm))
    assert set(zip(*map(torch.Tensor.tolist, found.edges()), strict=True)) == set(
        zip(*map(torch.Tensor.tolist, expected.edges()), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("batch", "count", "samples"), [(1, 1, 1), (3, 50, 50), (2, 30, 7)])
@pytest.mark.parametrize("tied", [False, True])
def test_farthest_points_are_those_of_dgl(batch, count, samples, dtype, tied):
    torch.manual_seed(0)
    points = torch.randn(batch, count, 3, dtype=dtype)
    if tied:
        points = points.round()
    expected = dgl.geometry.farthest_point_sampler(points, samples, start_idx=count // 2)
    found = ours(lambda: dgl.geometry.farthest_point_sampler(points, samples, start_idx=count // 2))
    assert torch.equal(found, expected)


def matching(graph, weights=None):
    return _neighbor_matching(graph._graph, graph.num_nodes(), weights, relabel_idx=False)


def is_maximal_matching(graph: dgl.DGLGraph, labels: torch.Tensor) -> bool:
    """Whether labels are of edges that share no node, and none is left between two nodes."""
    edges = set(zip(*map(torch.Tensor.tolist, graph.edges()), strict=True))
    groups: dict[int, list[int]] = {}
    for node, label in enumerate(labels.tolist()):
        groups.setdefault(label, []).append(node)
    matched = all(
        label == min(nodes)
        and len(nodes) <= 2
        and (len(nodes) == 1 or (nodes[0], nodes[1]) in edges)
        for label, nodes in groups.items()
    )
    alone = {nodes[0] for nodes in groups.values() if len(nodes) == 1}
    return matched and not any(u in alone and v in alone and u != v for u, v in edges)


def random_graph(num_nodes: int, num_edges: int, idtype=torch.int64) -> dgl.DGLGraph:
    graph = dgl.rand_graph(num_nodes, num_edges, idtype=idtype)
    return dgl.to_bidirected(dgl.remove_self_loop(graph))  # as DGL's neighbor_matching does


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (5, 0), (2, 1), (300, 200), (300, 4000)])
@pytest.mark.parametrize("weighted", [False, True])
def test_matchings_are_maximal_with_ours_as_with_dgls(nodes, edges, idtype, weighted):
    dgl.seed(0)
    graph = random_graph(nodes, edges, idtype)
    weights = torch.rand(graph.num_edges()) if weighted else None
    assert is_maximal_matching(graph, matching(graph, weights))
    found = ours(lambda: matching(dgl.graph(graph.edges(), num_nodes=nodes), weights))
    assert found.dtype == idtype
    assert is_maximal_matching(graph, found)


def test_a_matching_takes_heavy_edges():
    """A path whose every second edge is heavy: all of these, whoever proposes."""
    left, right = torch.arange(19), torch.arange(1, 20)
    weight = torch.where(left % 2 == 1, 10.0, 1.0)
    graph = ours(lambda: dgl.graph((torch.cat([left, right]), torch.cat([right, left]))))
    heavy = []
    for seed in range(20):
        dgl.seed(seed)
        labels = ours(lambda: matching(graph, torch.cat([weight, weight])))
        heavy.append(sum(labels[u] == labels[u + 1] for u in range(1, 18, 2)))
    # By chance it would be half of the nine.
    assert sum(heavy) / 20 > 6


def test_matchings_repeat_with_dgls_seed():
    graph = random_graph(200, 1000)
    tensors = ours(lambda: dgl.graph(graph.edges()))
    found = []
    for seed in (1, 1, 2):
        dgl.seed(seed)
        found.append(ours(lambda: matching(tensors)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_self_loops_match_nobody():
    graph = ours(lambda: dgl.graph(([0, 1, 0, 1], [0, 1, 1, 0])))
    assert ours(lambda: matching(graph)).tolist() == [0, 0]
    loops = ours(lambda: dgl.graph(([0, 1], [0, 1])))
    assert ours(lambda: matching(loops)).tolist() == [0, 1]

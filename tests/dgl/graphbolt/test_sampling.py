"""Samples of GraphBolt's graphs, against what is read off their tensors."""

from __future__ import annotations

from collections import Counter

import dgl.graphbolt as gb
import pytest
import torch

from dgl_mgpu.dgl.graphbolt import graph as fused_graph
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, InvalidWeightError
from tests.dgl.graphbolt.graphs import EDGES, ETYPES, NODES, random_graph


def picks_of(graph, sampled, nodes):
    """The edges that were sampled for each node, which lead from where the sample says."""
    csc, eids = sampled.sampled_csc, sampled.original_edge_ids - 1000
    assert torch.equal(csc.indices.long(), graph.indices[eids].long())
    assert csc.indptr.dtype == graph.csc_indptr.dtype
    parts = eids.tensor_split(csc.indptr[1:-1].long())
    assert len(parts) == len(nodes)
    picks = [part.tolist() for part in parts]
    for node, part in zip(nodes.tolist(), picks, strict=True):
        first, last = graph.csc_indptr[node : node + 2].tolist()
        assert all(first <= edge < last for edge in part)
    return picks


def degrees_of(graph, nodes):
    return graph.csc_indptr.diff()[nodes.long()].tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("fanout", [0, 1, 5, 64, -1])
@pytest.mark.parametrize("by_layer", [False, True])
def test_without_replacement_edges_are_distinct_and_as_many_as_asked_for(dtype, fanout, by_layer):
    graph, nodes = random_graph(dtype), torch.arange(NODES, dtype=dtype)
    sample = graph.sample_layer_neighbors if by_layer else graph.sample_neighbors
    picks = picks_of(graph, sample(nodes, torch.tensor([fanout])), nodes)
    for part, degree in zip(picks, degrees_of(graph, nodes), strict=True):
        assert len(set(part)) == len(part) == (degree if fanout < 0 else min(fanout, degree))


def test_all_in_edges_are_those_of_the_graph():
    graph, nodes = random_graph(), torch.tensor([5, 0, 17])
    picks = picks_of(graph, graph.in_subgraph(nodes), nodes)
    bounds = graph.csc_indptr.tolist()
    assert picks == [[*range(bounds[node], bounds[node + 1])] for node in nodes.tolist()]


def test_draws_with_replacement_are_those_of_torch_node_by_node():
    graph, nodes = random_graph(), torch.randperm(NODES)
    torch.manual_seed(5)
    sampled = graph.sample_neighbors(nodes, torch.tensor([7]), replace=True)
    torch.manual_seed(5)
    expected = [
        torch.randint(first, last, (7,)).tolist() if first < last else []
        for first, last in (graph.csc_indptr[node : node + 2].tolist() for node in nodes.tolist())
    ]
    assert picks_of(graph, sampled, nodes) == expected


@pytest.mark.parametrize("replace", [False, True])
def test_weighted_edges_are_drawn_in_proportion(replace):
    weights = torch.rand(EDGES, generator=torch.Generator().manual_seed(1)) + 0.1
    weights[::7] = 0
    graph, node = random_graph(weight=weights), torch.tensor([20])
    gb.seed(3)
    counts: Counter[int] = Counter()
    for _ in range(3000):
        sampled = graph.sample_neighbors(node, torch.tensor([1]), replace, "weight")
        counts.update(picks_of(graph, sampled, node)[0])
    first, last = graph.csc_indptr[20:22].tolist()
    shares = weights[first:last] / weights[first:last].sum()
    found = torch.tensor([counts[edge] for edge in range(first, last)]) / 3000
    # Four standard deviations of a share.
    assert ((found - shares).abs() <= 4 * (shares / 3000).sqrt()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_edges_without_weight_are_never_picked(dtype, by_layer, replace):
    weights = (torch.arange(EDGES) % 3 == 0).to(dtype)
    graph, nodes = random_graph(weight=weights), torch.arange(NODES)
    bounds = graph.csc_indptr.tolist()
    weights[bounds[9] : bounds[10]] = 0
    sample = graph.sample_layer_neighbors if by_layer else graph.sample_neighbors
    picks = picks_of(graph, sample(nodes, torch.tensor([4]), replace, "weight"), nodes)
    assert picks[9] == []
    for node, part in enumerate(picks):
        positive = int((weights[bounds[node] : bounds[node + 1]] > 0).sum())
        assert (weights[part] > 0).all()
        assert len(part) == ((4 if positive else 0) if replace else min(4, positive))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_a_wrong_weight_is_an_error(wrong):
    # All others of the node's are zero: it is no node without weights.
    weights = torch.zeros(EDGES)
    weights[50] = wrong
    with pytest.raises(InvalidWeightError):
        random_graph(weight=weights).sample_neighbors(
            torch.arange(NODES), torch.tensor([2]), probs_name="weight"
        )


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("how", ["neighbors", "layer_neighbors", "by time"])
def test_each_edge_type_has_its_own_fanout(replace, how):
    times = torch.zeros(EDGES)
    graph = random_graph(with_types=True, time=times)
    nodes = {"a": torch.tensor([3, 0, 11]), "b": torch.tensor([0, 19, 5])}
    fanouts = torch.tensor([2, -1, 3])
    if how == "by time":
        until = {ntype: torch.ones(3) for ntype in nodes}
        options = {"edge_timestamp_attr_name": "time"}
        sampled = graph.temporal_sample_neighbors(nodes, until, fanouts, replace, **options)
    else:
        sampled = getattr(graph, f"sample_{how}")(nodes, fanouts, replace)
    for etype, number in ETYPES.items():
        source, _, target = etype.split(":")
        offsets = {"a": 0, "b": 40}
        csc, eids = sampled.sampled_csc[etype], sampled.original_edge_ids[etype] - 1000
        assert (graph.type_per_edge[eids] == number).all()
        assert torch.equal(csc.indices + offsets[source], graph.indices[eids])
        for node, part in zip(nodes[target], eids.tensor_split(csc.indptr[1:-1]), strict=True):
            first, last = graph.csc_indptr[node + offsets[target] :][:2].tolist()
            mine = first + (graph.type_per_edge[first:last] == number).nonzero()[:, 0]
            fanout = int(fanouts[number])
            expected = len(mine) if fanout < 0 else min(fanout, len(mine))
            if replace and fanout >= 0 and len(mine):
                expected = fanout
            assert len(part) == expected
            assert set(part.tolist()) <= set(mine.tolist())
            if not replace:
                assert len(set(part.tolist())) == len(part)


def test_an_edge_of_another_type_than_its_nodes_is_an_error():
    graph = random_graph(with_types=True)
    graph.type_per_edge = torch.zeros_like(graph.type_per_edge)
    with pytest.raises(InvalidInputError, match="another type than its edge type"):
        graph.sample_neighbors({"b": torch.tensor([3])}, torch.tensor([1, 1, 1]))


def test_edges_that_are_not_in_the_order_of_types_are_an_error():
    graph = random_graph(with_types=True)
    first, last = graph.csc_indptr[10:12].tolist()
    graph.type_per_edge[first:last] = graph.type_per_edge[first:last].flip(0)
    with pytest.raises(InvalidInputError, match="not in the order of their types"):
        graph.sample_neighbors({"a": torch.tensor([3])}, torch.tensor([1, 1, 1]))


def test_nodes_that_share_neighbors_choose_the_same_ones():
    indices = torch.arange(40).repeat(10)
    graph = gb.fused_csc_sampling_graph(torch.arange(11) * 40, indices)
    nodes = torch.arange(10)
    for replace in (False, True):
        sampled = graph.sample_layer_neighbors(nodes, torch.tensor([6]), replace).sampled_csc
        assert torch.equal(sampled.indices, sampled.indices[:6].repeat(10))
        assert len(sampled.indices.unique()) > 2
    assert len(graph.sample_neighbors(nodes, torch.tensor([6])).sampled_csc.indices.unique()) > 6


@pytest.mark.parametrize("of_nodes", [False, True])
@pytest.mark.parametrize("of_edges", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_only_what_is_strictly_earlier_is_sampled(of_nodes, of_edges, dtype):
    generator = torch.Generator().manual_seed(4)
    edge_times = torch.randint(5, (EDGES,), generator=generator).to(dtype)
    node_times = torch.randint(5, (NODES,), generator=generator).to(dtype)
    graph = random_graph(time=edge_times)
    graph.node_attributes = {"time": node_times}
    nodes, until = torch.arange(NODES), torch.randint(6, (NODES,), generator=generator).to(dtype)
    options = {}
    if of_nodes:
        options["node_timestamp_attr_name"] = "time"
    if of_edges:
        options["edge_timestamp_attr_name"] = "time"
    sampled = graph.temporal_sample_neighbors(nodes, until, torch.tensor([-1]), **options)
    picks = picks_of(graph, sampled, nodes)
    for node, part in enumerate(picks):
        first, last = graph.csc_indptr[node : node + 2].tolist()
        expected = [
            edge
            for edge in range(first, last)
            if (not of_edges or edge_times[edge] < until[node])
            and (not of_nodes or node_times[graph.indices[edge]] < until[node])
        ]
        assert part == expected
    few = graph.temporal_sample_neighbors(nodes, until, torch.tensor([2]), **options)
    for part, whole in zip(picks_of(graph, few, nodes), picks, strict=True):
        assert len(set(part)) == len(part) == min(2, len(whole)) and set(part) <= set(whole)


def test_the_same_seed_gives_the_same_samples():
    graph, nodes, fanouts = random_graph(), torch.arange(NODES), torch.tensor([3])

    def samples():
        gb.seed(11)
        return [
            sample(nodes, fanouts).original_edge_ids
            for sample in (graph.sample_neighbors, graph.sample_layer_neighbors)
            for _ in range(2)
        ]

    first, second = samples(), samples()
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("node", [-1, NODES])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", [[2], [2, 2, 2]])
def test_a_node_that_is_not_there_is_an_error(node, replace, fanouts):
    graph = random_graph(with_types=len(fanouts) > 1)
    with pytest.raises(IdOutOfRangeError, match=str(node)):
        graph.sample_neighbors(torch.tensor([3, node]), torch.tensor(fanouts), replace)


def test_on_a_cpu_nodes_are_to_be_given():
    with pytest.raises(InvalidInputError, match="nodes is None"):
        random_graph().sample_neighbors(None, torch.tensor([2]))


@pytest.mark.parametrize("replace", [False, True])
def test_picks_of_all_types_together_are_in_the_order_of_types(replace):
    graph = random_graph(with_types=True)._c_csc_graph
    nodes = torch.arange(NODES)
    sampled = graph.sample_neighbors(nodes, [5], replace, False, True, None)
    for part in sampled.type_per_edge.tensor_split(sampled.indptr[1:-1]):
        assert part.tolist() == sorted(part.tolist())


@pytest.mark.parametrize("by_layer", [False, True])
def test_an_edge_type_without_a_fanout_is_an_error(by_layer):
    graph = random_graph(with_types=True)._c_csc_graph
    with pytest.raises(InvalidInputError, match="2 fanouts, but ids of edge types up to 2"):
        graph.sample_neighbors(torch.tensor([3]), [1, 1], False, by_layer, True, None)


def test_fanouts_by_type_need_types():
    graph = gb.fused_csc_sampling_graph(
        torch.tensor([0, 2, 2]), torch.tensor([0, 1]), edge_type_to_id={"a:b:c": 0, "a:d:c": 1}
    )._c_csc_graph
    assert len(graph.sample_neighbors(torch.tensor([0]), [-1], False, False, False, None).indices)
    with pytest.raises(InvalidInputError, match="does not say which types"):
        graph.sample_neighbors(torch.tensor([0]), [1, 1], False, False, False, None)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"edge_attributes": {"w": torch.ones(3)}}, "'w' of edge_attributes has 3 rows"),
        ({"node_attributes": {"w": torch.ones(3)}}, "'w' of node_attributes has 3 rows"),
        ({"type_per_edge": torch.zeros(5)}, "2 edges, and 5 types"),
    ],
)
def test_parts_that_do_not_fit_are_an_error(parts, message):
    with pytest.raises(InvalidInputError, match=message):
        gb.fused_csc_sampling_graph(torch.tensor([0, 2]), torch.tensor([0, 0]), **parts)


def test_times_must_be_as_many_as_nodes_and_names_be_there():
    graph = random_graph(time=torch.zeros(EDGES))
    nodes, fanouts = torch.tensor([3, 4]), torch.tensor([2])
    with pytest.raises(InvalidInputError, match="2 nodes, and timestamps of shape"):
        graph.temporal_sample_neighbors(nodes, torch.ones(3), fanouts)
    with pytest.raises(InvalidInputError, match="read 'when' of a graph's edge_attributes"):
        graph.temporal_sample_neighbors(
            nodes, torch.ones(2), fanouts, edge_timestamp_attr_name="when"
        )


@pytest.mark.parametrize("fanouts", [[2], [2, 2, 2]])
def test_what_is_made_of_a_graph_is_made_once(fanouts, monkeypatch):
    made = []
    monkeypatch.setattr(fused_graph, "compressed_view", _noted(fused_graph.compressed_view, made))
    monkeypatch.setattr(fused_graph, "EdgesByType", _noted(fused_graph.EdgesByType, made))
    graph = random_graph(with_types=True)
    nodes = {"a": torch.arange(9), "b": torch.arange(5)}
    for _ in range(4):
        graph.sample_neighbors(nodes, torch.tensor(fanouts))
    assert len(made) == len(fanouts[1:2]) + 1
    graph.node_type_offset = graph.node_type_offset.clone()
    graph.sample_neighbors(nodes, torch.tensor(fanouts))
    assert len(made) == 2 * (len(fanouts[1:2]) + 1)


def _noted(function, calls):
    def noted(*arguments):
        calls.append(function)
        return function(*arguments)

    return noted


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_changes_in_place_are_seen(dtype):
    indptr, weights = torch.tensor([0, 3, 3], dtype=dtype), torch.tensor([1, 0, 0]).half()
    graph = gb.fused_csc_sampling_graph(
        indptr, torch.tensor([0, 1, 0], dtype=dtype), edge_attributes={"w": weights}
    )
    node = torch.tensor([0], dtype=dtype)

    def picked():
        return graph._c_csc_graph.sample_neighbors(node, [1], False, False, True, "w")

    assert picked().original_edge_ids.tolist() == [0]
    weights.copy_(torch.tensor([0, 0, 1]))
    assert picked().original_edge_ids.tolist() == [2]
    indptr.copy_(torch.tensor([0, 1, 3]))
    assert graph.in_subgraph(node).sampled_csc.indptr.tolist() == [0, 1]


@pytest.mark.parametrize("seed", [None, 7])
def test_workers_draw_other_numbers_in_each_epoch(seed):
    # Eight nodes of 500 in-edges, from nodes without any.
    indptr = torch.cat([torch.arange(9) * 500, torch.full((4000,), 4000)])
    graph = gb.fused_csc_sampling_graph(indptr, torch.arange(4000) + 8)
    pipe = gb.ItemSampler(gb.ItemSet(torch.arange(8), names="seed_nodes"), 1)
    pipe = pipe.sample_neighbor(graph, [torch.tensor([3])])
    loader = gb.DataLoader(
        pipe.fetch_feature(gb.BasicFeatureStore({})), num_workers=2, persistent_workers=False
    )

    def epochs():
        torch.manual_seed(0)
        if seed is not None:
            gb.seed(seed)
        return [
            [
                (batch.sampled_subgraphs[0].original_row_node_ids[1:] - 8).remainder(500).tolist()
                for batch in loader
            ]
            for _ in range(2)
        ]

    first, second = epochs()
    assert len(first) == len(second) == 8 and first != second
    # Those of the two workers, which have every other one, too.
    assert all(one != other for one, other in zip(first[::2], first[1::2], strict=True))
    if seed is not None:
        assert epochs() == [first, second]

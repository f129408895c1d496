"""All layers of a PinSAGE mini-batch on CUDA: bit for bit the CPU's results, with one wait."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.ops import (
    SampleKey,
    library,
    pinsage_blocks,
    pinsage_blocks_async,
    walk_blocks,
    workspace,
)
from dgl_mgpu.ops.walk import check_traversals
from dgl_mgpu.ops.walk_blocks import _blocks, layer_by_layer
from tests.kernels.cuda_views import on_device
from tests.kernels.test_etype_blocks import Waits, same
from tests.kernels.test_sample import memory_held, refuse_memory
from tests.ops.test_sample import GRAPHS, batches
from tests.ops.test_walk import TO_ITEMS, TO_USERS
from tests.ops.views import LAYOUTS, Graph, power_law_graph

KEY = SampleKey(seed=3, epoch=1, batch=4)
WALKS = {
    "num_traversals": 3,
    "termination_prob": 0.1,
    "num_random_walks": 4,
    "num_neighbors": 5,
}


def expected(views, seeds, layers, key=KEY, **walks):
    """The oracle: the operator's CPU version, also where its GPU's is emulated."""
    walks = {**WALKS, **walks}
    path = check_traversals(views, "", **walks)
    chosen = walks["num_random_walks"], walks["num_neighbors"]
    seeds = seeds.to(path.idtype)
    return _blocks(*layer_by_layer(seeds, *path, *chosen, key.fold_hops(layers)))


@pytest.fixture(autouse=True)
def on_gpu(where, monkeypatch):
    """Operators on tensors of ``where`` take the way of a GPU, and count the waits."""
    start = walk_blocks.pinsage_hops_async
    monkeypatch.setitem(library._direct, ("pinsage_hops_async", where.type), start)
    waits = Waits(walk_blocks.gpu.driver)
    monkeypatch.setattr(walk_blocks.gpu, "driver", waits)
    return waits


@pytest.fixture
def no_way_back(monkeypatch):
    """Nothing is sampled layer by layer."""
    monkeypatch.setattr(walk_blocks, "layer_by_layer", None)


def found(views, seeds, layers, **walks):
    return pinsage_blocks(views, seeds, layers, KEY, **{**WALKS, **walks})


@pytest.mark.parametrize("layers", [1, 3])
def test_graphs(where, on_gpu, no_way_back, layers):
    squares = [graph for graph in GRAPHS.values() if graph.num_rows == graph.num_cols]
    for number, graph in enumerate(squares):
        view = graph.view(idtype=(torch.int32, torch.int64)[number % 2])
        there = on_device(view, where)
        for seeds in batches(graph):
            on_gpu.count = 0
            blocks = found(there, seeds[:40].to(where), layers)
            assert on_gpu.count == 1
            assert same(blocks, expected(view, seeds[:40], layers))


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_id_types(where, no_way_back, layout, idtype):
    graph = power_law_graph(100, 300, seed=5)
    seeds = torch.arange(0, 100, 9)
    view = graph.view(LAYOUTS[layout], idtype, np.random.default_rng(0))
    blocks = found(on_device(view, where, host_segments=True), seeds.to(where), 2)
    assert same(blocks, expected(graph.view(idtype=idtype), seeds, 2))


def test_metapath(where, no_way_back):
    views, seeds = [TO_ITEMS.view(), TO_USERS.view(LAYOUTS["four parts"])], torch.tensor([4, 1])
    blocks = found([on_device(view, where) for view in views], seeds.to(where), 3)
    assert same(blocks, expected(views, seeds, 3))


@pytest.mark.parametrize(
    ("walks", "neighbors", "stop"), [(1, 0, 0.0), (1, 1, 0.5), (30, 4, 0.1), (30, 1000, 0.0)]
)
def test_numbers_of_walks_and_neighbors(where, no_way_back, walks, neighbors, stop):
    options = {"num_random_walks": walks, "num_neighbors": neighbors, "termination_prob": stop}
    view, seeds = GRAPHS["power law"].view(), torch.tensor([5, 0, 199])
    blocks = found(on_device(view, where), seeds.to(where), 2, **options)
    assert same(blocks, expected(view, seeds, 2, **options))


def test_walks_that_visit_few_nodes_again_and_again(where, no_way_back):
    view = Graph.of_lists([[0, 1, 2, 2], [0, 1], [], [3], [2]]).view()
    seeds = torch.tensor([4, 2, 0])
    blocks = found(on_device(view, where), seeds.to(where), 3, num_random_walks=60)
    assert same(blocks, expected(view, seeds, 3, num_random_walks=60))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_samples_start_before_others_are_finished(where, no_way_back, order):
    view = power_law_graph(3000, 30000, seed=7).view(idtype=torch.int32)
    there = on_device(view, where)
    # The working memory of the last one does not suffice for the others.
    seeds = [torch.arange(first, 3000, step) for first, step in ((0, 20), (20, 30), (50, 500))]
    keys = [SampleKey(3, 1, batch) for batch in range(3)]
    workspace.release()
    pinsage_blocks_async(there, seeds[2].to(where), 2, KEY, **WALKS).result()
    futures = [
        pinsage_blocks_async(there, each.to(where), 2, key, **WALKS)
        for each, key in zip(seeds, keys, strict=True)
    ]
    given_up = pinsage_blocks_async(there, seeds[0].to(where), 2, KEY, **WALKS)
    workspace.workspace(where).release()
    del given_up
    for number in order:
        blocks = futures[number].result()
        assert same(blocks, expected(view, seeds[number], 2, keys[number]))


@pytest.mark.parametrize("bad", [-1, 200, 2**32])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_a_seed_that_is_no_node_is_told_of_where_the_sample_is_finished(where, idtype, bad):
    view = GRAPHS["power law"].view(idtype=idtype)
    there = on_device(view, where)
    seeds = torch.tensor([5, bad, 3, -7], device=where)
    wrong = pinsage_blocks_async(there, seeds, 3, KEY, **WALKS)
    right = pinsage_blocks_async(there, torch.tensor([5, 3], device=where), 3, KEY, **WALKS)
    with pytest.raises(IdOutOfRangeError, match=r"at place 1 is not among the 200 rows"):
        wrong.result()
    assert same(right.result(), expected(view, torch.tensor([5, 3]), 3))


@pytest.mark.parametrize("lacking", ["a bound", "memory"])
def test_without_room_for_the_largest_sample(where, monkeypatch, lacking):
    view, seeds = Graph.of_lists([[0, 1, 2]] * 3000).view(), torch.arange(200)
    blocks = expected(view, seeds, 2)
    workspace.release()
    refused = [lacking]
    if lacking == "memory":
        refused = refuse_memory(monkeypatch, 100 << 10)
    else:
        monkeypatch.setattr(walk_blocks, "_MAX_STEPS", 200 * 6 * 16)
    ways = []
    monkeypatch.setattr(
        walk_blocks,
        "layer_by_layer",
        lambda *rest: ways.append(1) or layer_by_layer(*rest),
    )
    assert same(found(on_device(view, where), seeds.to(where), 2), blocks)
    assert refused and ways


def test_a_small_sample_does_not_hold_room_for_a_large_one(where, monkeypatch):
    monkeypatch.setattr(workspace, "_LARGE_BUFFER", 1 << 14)
    view, seeds = Graph.of_lists([[0]] * 3000).view(), torch.arange(20)
    blocks = found(on_device(view, where), seeds.to(where), 3, num_neighbors=12)
    assert same(blocks, expected(view, seeds, 3, num_neighbors=12))
    assert memory_held([tensor for block in blocks for tensor in block[:4]]) < 1 << 14

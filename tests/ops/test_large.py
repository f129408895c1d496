"""Graphs of as many edges as int32 numbers and of more, against plain Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import SampleKey, random_walk, sample_blocks, sample_neighbors
from dgl_mgpu.store.memory import TopologySource
from tests.ops import reference
from tests.ops.large import NODES, TAIL, LargeGraph, Weights, on_file, sources_of, weights_of

KEY = SampleKey(seed=3, epoch=1, batch=4, hop=0)
#: The last edge is the last that int32 numbers; with int64, most edges are beyond that.
HUBS = {torch.int32: 2**31 - TAIL, torch.int64: 2**33 + 1}
SEEDS = [0, 5, 1, 40, 2, 0]
IDTYPES = [torch.int32, torch.int64]


def expected_blocks(graph: LargeGraph, seeds, fanouts):
    """For each hop from the seeds on: indptr, numbers of the sources, edge ids; and the nodes."""
    nodes, hops = list(seeds), []
    for hop, fanout in enumerate(fanouts):
        key = SampleKey(KEY.seed, KEY.epoch, KEY.batch, hop).fold()
        indptr, neighbors, eids = reference.sample(graph, nodes, fanout, key)
        nodes, sources = reference.append_unique(nodes, neighbors)
        hops.append((indptr, sources, eids))
    return hops, nodes


def expected_walks(graph: LargeGraph, starts, length: int) -> list[list[int]]:
    walks = [starts[:place].count(start) for place, start in enumerate(starts)]
    return [
        reference.walk([graph], start, number, [0.0] * length, KEY.fold())
        for start, number in zip(starts, walks, strict=True)
    ]


def as_lists(tensors) -> list[list[int]]:
    return [tensor.tolist() for tensor in tensors]


def view_on_file(tmp_path, graph: LargeGraph, idtype: torch.dtype):
    indices = on_file(tmp_path / "indices", graph, idtype, sources_of)
    return graph.view(torch.from_numpy(graph.indptr), indices)


@pytest.mark.parametrize("idtype", IDTYPES)
@pytest.mark.parametrize(("fanout", "replace"), [(3, False), (60, False), (30, True)])
def test_one_hop(tmp_path, idtype, fanout, replace):
    graph = LargeGraph(HUBS[idtype])
    expected = reference.sample(graph, SEEDS, fanout, KEY.fold(), replace)
    assert min(expected[2]) < HUBS[idtype] <= max(expected[2])
    view = view_on_file(tmp_path, graph, idtype)
    for dtype in IDTYPES:
        seeds = torch.tensor(SEEDS, dtype=dtype)
        found = sample_neighbors(view, seeds, fanout, KEY, replace=replace)
        assert as_lists(found) == list(expected)


@pytest.mark.parametrize("idtype", IDTYPES)
def test_all_edges(tmp_path, idtype):
    graph, seeds = LargeGraph(HUBS[idtype]), list(range(NODES - 1, 0, -1))
    expected = reference.sample(graph, seeds, -1, KEY.fold())
    view = view_on_file(tmp_path, graph, idtype)
    assert as_lists(sample_neighbors(view, torch.tensor(seeds), -1, KEY)) == list(expected)


@pytest.mark.parametrize("idtype", IDTYPES)
def test_all_hops(tmp_path, idtype):
    graph, seeds = LargeGraph(HUBS[idtype]), [0, 39, 4]
    hops, nodes = expected_blocks(graph, seeds, [5, 4, 3])
    view = view_on_file(tmp_path, graph, idtype)
    blocks = sample_blocks(view, torch.tensor(seeds, dtype=idtype), [3, 4, 5], KEY)
    found = [(block.indptr, block.src, block.eids) for block in reversed(blocks)]
    assert [tuple(as_lists(hop)) for hop in found] == hops
    assert blocks[0].src_nodes.tolist() == nodes


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [4, -1])
def test_weighted(tmp_path, fanout, replace):
    graph, seeds = LargeGraph(HUBS[torch.int64]), [40, 3, 1, 17]
    expected = reference.sample(graph, seeds, fanout, KEY.fold(), replace, Weights(graph))
    view = view_on_file(tmp_path, graph, torch.int64)
    weights = graph.weights_view(on_file(tmp_path / "w", graph, torch.float32, weights_of))
    found = sample_neighbors(
        view, torch.tensor(seeds), fanout, KEY, replace=replace, weights=weights
    )
    assert as_lists(found) == list(expected)


@pytest.mark.parametrize("idtype", IDTYPES)
def test_walks(tmp_path, idtype):
    graph = LargeGraph(HUBS[idtype])
    expected = expected_walks(graph, SEEDS, 8)
    view = view_on_file(tmp_path, graph, idtype)
    assert random_walk(view, torch.tensor(SEEDS, dtype=idtype), 8, KEY).tolist() == expected


def test_edges_that_their_ids_cannot_number_are_refused():
    most = 2**31
    for edges, idtype in ((most + 1, torch.int32), (most, torch.int64)):
        indices = np.broadcast_to(np.int32(0), edges)
        if idtype == torch.int32:
            with pytest.raises(InvalidInputError, match=r"2,147,483,649 edges.*int64"):
                TopologySource(np.array([0, edges]), indices, None, 1, idtype)

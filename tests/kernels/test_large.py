"""Kernels on graphs of as many edges as int32 numbers and of more, against plain Python's integers.

Under the emulator the graph is a file with holes; on a GPU all of its edges are in memory.
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.kernels import test_sample, test_sample_weighted, test_walk
from tests.ops import reference, test_large
from tests.ops.large import LargeGraph, Weights, filled, on_file, sources_of, weights_of
from tests.ops.test_large import (
    IDTYPES,
    SEEDS,
    as_lists,
    expected_blocks,
    expected_walks,
)

assert test_sample.KEY == test_walk.KEY == test_large.KEY


def graph_for(where, idtype: torch.dtype) -> LargeGraph:
    # On a GPU, of int64 the smallest that needs them: 17 GB.
    large = where.type == "cpu" or idtype == torch.int32
    return LargeGraph(test_large.HUBS[idtype] if large else 2**31 + 1)


@pytest.fixture
def values(where, tmp_path):
    """Makes an array of one value for each edge of a graph."""
    if where.type == "cpu":
        return lambda *given: on_file(tmp_path / f"{given[-1].__name__}", *given)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    if free < 30 << 30:
        pytest.skip(f"needs 30 GiB of GPU memory, {free >> 30} are free")
    return functools.partial(filled, device=where)


@pytest.fixture(autouse=True)
def back_to_the_driver(where):
    yield
    if where.type == "cuda":
        torch.cuda.empty_cache()


def view_of(where, graph: LargeGraph, values, idtype: torch.dtype):
    indptr = torch.from_numpy(graph.indptr).to(where)
    return graph.view(indptr, values(graph, idtype, sources_of))


@pytest.mark.parametrize("idtype", IDTYPES)
def test_one_hop(where, values, idtype):
    graph = graph_for(where, idtype)
    cases = [(SEEDS, 3, False), (SEEDS, 60, False), (SEEDS, 30, True), ([40, 1, 7], -1, False)]
    expected = [
        reference.sample(graph, seeds, fanout, test_large.KEY.fold(), replace)
        for seeds, fanout, replace in cases
    ]
    view = view_of(where, graph, values, idtype)
    for (seeds, fanout, replace), sampled in zip(cases, expected, strict=True):
        found = test_sample.sample(view, torch.tensor(seeds, device=where), fanout, replace)
        assert as_lists(found) == list(sampled)


@pytest.mark.parametrize("idtype", IDTYPES)
def test_all_hops(where, values, idtype):
    graph, seeds = graph_for(where, idtype), [0, 39, 4]
    hops, nodes = expected_blocks(graph, seeds, [5, 4, 3])
    view = view_of(where, graph, values, idtype)
    some = torch.tensor(seeds, dtype=idtype, device=where)
    found_nodes, *found = test_sample.hops(view, some, [5, 4, 3])
    assert found_nodes.tolist() == nodes
    assert [tuple(as_lists(hop)) for hop in zip(*found, strict=True)] == hops


@pytest.mark.parametrize("fanout", [4, -1])
def test_weighted(where, values, fanout):
    graph = graph_for(where, torch.int64)
    seeds, key = [40, 3, 1, 17], test_sample_weighted.KEY.fold()
    expected = reference.sample(graph, seeds, fanout, key, False, Weights(graph))
    view = view_of(where, graph, values, torch.int64)
    weights = graph.weights_view(values(graph, torch.float32, weights_of))
    found = test_sample_weighted.sample(where, view, torch.tensor(seeds), fanout, weights=weights)
    assert as_lists(found) == list(expected)


@pytest.mark.parametrize("idtype", IDTYPES)
def test_walks(where, values, idtype):
    graph = graph_for(where, idtype)
    expected = expected_walks(graph, SEEDS, 8)
    view = view_of(where, graph, values, idtype)
    starts = torch.tensor(SEEDS, dtype=idtype, device=where)
    assert test_walk.walk([view], starts, [0.0] * 8).tolist() == expected

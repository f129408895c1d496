"""Negative sampling as CUDA kernels: bit for bit the CPU's results."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.ops import SampleKey, negative, negative_destinations, negative_edges
from dgl_mgpu.ops.walk import occurrences
from tests.kernels.cuda_views import on_device
from tests.ops.test_negative import (
    ALL_GRAPHS,
    CASES,
    COMPLETE,
    NEARLY_FULL,
    NO_ROWS,
    some_sources,
)
from tests.ops.test_sample import GRAPHS
from tests.ops.views import LAYOUTS

KEY = SampleKey(seed=3, epoch=1, batch=4, hop=0)


def graph_of(view):
    return (
        view.tiers, view.pointers, view.position, view.num_rows, view.num_cols, view.idtype
    )  # fmt: skip


def edges(view, num, replace=False, exclude=False, tries=4):
    ends = negative._negative_edges_cuda(*graph_of(view), num, replace, exclude, tries, KEY.fold())
    return [each.cpu() for each in ends]


def destinations(view, sources, k, avoid=True, exclude=False, tries=4):
    numbers = occurrences(sources)
    return negative._negative_destinations_cuda(
        sources, numbers, *graph_of(view), k, avoid, exclude, tries, KEY.fold()
    ).cpu()


def same(found, expected):
    return all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(("name", "exclude"), CASES)
def test_graphs(where, name, exclude):
    graph = ALL_GRAPHS[name]
    here, there = graph.view(), on_device(graph.view(), where)
    for flag in (False, True):
        for num in (0, 1, 150):
            expected = negative_edges(
                here, num, KEY, replace=flag, exclude_self_loops=exclude, max_tries=4
            )
            assert same(edges(there, num, flag, exclude), expected)
        for count, k in ((0, 2), (3, 0), (40, 3)):
            sources = some_sources(graph, count)
            expected = negative_destinations(
                here, sources, k, KEY, avoid_existing=flag, exclude_self_loops=exclude, max_tries=4
            )
            found = destinations(there, sources.to(where), k, flag, exclude)
            assert same([found], [expected])


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_id_types(where, layout, shuffled, idtype):
    graph = GRAPHS["power law"]
    view = graph.view(LAYOUTS[layout], idtype, np.random.default_rng(0) if shuffled else None)
    there = on_device(view, where, host_segments=True)
    expected = negative_edges(view, 200, KEY, exclude_self_loops=False)
    assert same(edges(there, 200, tries=10), expected)
    sources = some_sources(graph, 30)
    for dtype in (torch.int32, torch.int64):
        expected = negative_destinations(view, sources, 3, KEY, exclude_self_loops=False)
        found = destinations(there, sources.to(dtype).to(where), 3, tries=10)
        assert same([found], [expected])


def test_ends_are_memory_of_their_own(where):
    """As torch.compile takes results of an operator to be, which reads 16 bytes at a time."""
    view = on_device(GRAPHS["power law"].view(), where)
    ends = negative._negative_edges_cuda(*graph_of(view), 7, True, False, 4, KEY.fold())
    assert [each.data_ptr() % 16 for each in ends] == [0, 0]
    assert len({each.untyped_storage().data_ptr() for each in ends}) == 2


@pytest.mark.parametrize("num", [400, 3000])
def test_many_equal_candidates(where, num):
    graph = GRAPHS["random"]  # 2,500 pairs
    expected = negative_edges(graph.view(), num, KEY, exclude_self_loops=False, max_tries=6)
    assert same(edges(on_device(graph.view(), where), num, tries=6), expected)


def test_scarce_pairs_are_found_once(where):
    found = edges(on_device(NEARLY_FULL.view(), where), 50, tries=40)
    assert sorted(zip(*(ends.tolist() for ends in found), strict=True)) == [(0, 0), (2, 5)]


def test_nothing_to_find(where):
    for graph, exclude, tries in ((COMPLETE, True, 5), (NO_ROWS, False, 0)):
        view = on_device(graph.view(), where)
        assert same(edges(view, 20, False, exclude, tries), [torch.empty(0, dtype=torch.int64)] * 2)
        sources = torch.arange(3, device=where)
        assert destinations(view, sources, 2, True, exclude, tries).tolist() == [[-1, -1]] * 3


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_source_out_of_range(where, bad):
    view = on_device(GRAPHS["bipartite"].view(), where)
    sources = torch.tensor([9, bad, 0, 77], device=where)
    with pytest.raises(IdOutOfRangeError, match=f"id {bad} at place 1 is not among the 10 rows"):
        destinations(view, sources, 2)

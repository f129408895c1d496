"""What is seen of calls of C functions: profiles, log lines, warnings of round trips."""

from __future__ import annotations

import os
import subprocess
import sys

import dgl
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.dgl.capi import record
from dgl_mgpu.dgl.capi.table import Implementation
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.index import TensorIndex


@pytest.fixture
def graph():
    with tensor_backed_graphs():
        yield dgl.graph((torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 0])))


def test_a_profile_counts_calls_and_says_where_they_ran(graph):
    ids = torch.tensor([0, 1])
    with dgl_mgpu.profile_calls() as profile:
        for _ in range(3):
            dgl.in_subgraph(graph, ids)
    seen = profile.functions["subgraph._CAPI_DGLInSubgraph"]
    assert (seen.calls, seen.place) == (3, Implementation.TORCH)
    assert seen.seconds > 0
    assert "subgraph._CAPI_DGLInSubgraph" in str(profile)
    assert not record.recording


def test_methods_and_operators_are_counted_too(graph):
    graph.ndata["h"] = torch.ones(4, 2)
    with dgl_mgpu.profile_calls() as profile:
        graph.update_all(dgl.function.copy_u("h", "m"), dgl.function.max("m", "h"))
        dgl.ops.edge_softmax(graph, torch.ones(4, 1))
        graph.in_edges(torch.tensor([1]))
    for name, place in (
        ("sparse._CAPI_DGLKernelSpMM", Implementation.NATIVE),
        ("sparse._CAPI_DGLKernelEdge_softmax_forward", Implementation.NATIVE),
        ("heterograph_index._CAPI_DGLHeteroInEdges_2", Implementation.TORCH),
    ):
        assert (profile.functions[name].calls, profile.functions[name].place) == (1, place)
    before = dict(profile.functions)
    graph.in_edges(torch.tensor([1]))
    assert profile.functions == before


def test_profiles_nest(graph):
    ids = torch.tensor([0, 1])
    with dgl_mgpu.profile_calls() as outer:
        dgl.in_subgraph(graph, ids)
        with dgl_mgpu.profile_calls() as inner:
            dgl.in_subgraph(graph, ids)
        dgl.in_subgraph(graph, ids)
    name = "subgraph._CAPI_DGLInSubgraph"
    assert (outer.functions[name].calls, inner.functions[name].calls) == (3, 1)


def test_a_round_trip_is_right_counted_and_warned_of_once(graph, caplog, monkeypatch):
    monkeypatch.setattr(record, "_warned", set())
    order = torch.tensor([2, 0, 3, 1])
    expected = dgl.partition.reorder_nodes(graph.to("cpu"), order)
    with dgl_mgpu.profile_calls() as profile, caplog.at_level("WARNING", "dgl_mgpu.calls"):
        for _ in range(2):
            found = dgl.partition.reorder_nodes(graph, order)
    assert isinstance(found._graph, TensorIndex)
    pairs = [set(zip(*(end.tolist() for end in g.edges()), strict=True)) for g in (expected, found)]
    assert pairs[0] == pairs[1]
    name = "partition._CAPI_DGLReorderGraph_Hetero"
    assert (profile.functions[name].calls, profile.functions[name].place) == (2, Implementation.CPU)
    assert [name in line.getMessage() for line in caplog.records] == [True]


def test_what_is_not_made_for_gpus_says_so(graph):
    from dgl import heterograph_index

    with pytest.raises(dgl_mgpu.errors.UnavailableError, match=r"g\.cpu\(\)"):
        heterograph_index._CAPI_DGLHeteroSubgraphGetGraph(graph._graph)


def test_calls_are_logged_when_asked_for():
    script = """
import dgl_mgpu, dgl, torch
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
with tensor_backed_graphs():
    dgl.graph((torch.tensor([0]), torch.tensor([1]))).out_edges(torch.tensor([0]))
"""
    for value, logged in (("1", True), ("0", False)):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "DGL_MGPU_LOG": value},
            capture_output=True,
            text=True,
            check=True,
        )
        for name in ("CreateUnitGraphFromCOO", "OutEdges_2"):
            assert (f"_CAPI_DGLHetero{name}: torch" in done.stderr) == logged

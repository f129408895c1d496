"""Edges of a store by their ids, read by a GPU's kernels."""

from __future__ import annotations

import pytest
import torch

import dgl_mgpu
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.ops.gather import _gather_rows_cuda
from dgl_mgpu.ops.negative import _negative_edges_cuda
from dgl_mgpu.ops.sample import _sample_neighbors_cuda
from tests.store.test_edges import assert_finds_all, sparse_graph

OPERATORS = {
    "gather_rows": _gather_rows_cuda,
    "negative_edges": _negative_edges_cuda,
    "sample_neighbors": _sample_neighbors_cuda,
}


@pytest.fixture
def by_kernels(emulated, monkeypatch):
    """Operators on CPU tensors launch kernels."""
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: None)
    with torch.library._scoped_library("dgl_mgpu", "IMPL") as library:
        for name, operator in OPERATORS.items():
            library.impl(name, operator, "CPU", allow_override=True)
        yield emulated


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("graph_ratio", [0.0, 0.4])
def test_kernels_find_edges(idtype, in_order, graph_ratio, by_kernels):
    g = sparse_graph(idtype, in_order)
    graph = dgl_mgpu.GlobalStore.from_dgl(
        g, edges=not in_order, graph_ratio=graph_ratio, feature_ratio=graph_ratio
    ).graph
    assert_finds_all(graph, g)
    u, v = torch.randint(0, 500, (2, 200)).to(idtype)
    assert torch.equal(graph.has_edges_between(u, v), g.has_edges_between(u, v))
    assert graph.has_edges_between(*g.find_edges(3)).all()
    sources, targets = graph.global_uniform_negative_sampling(300)
    assert sources.dtype == idtype and len(sources) == 300
    assert not g.has_edges_between(sources, targets).any()
    assert {"gather.cu", "negative.cu", "sample.cu"} <= {
        kernel.source for kernel in by_kernels.launched
    }

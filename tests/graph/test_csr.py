"""Sums and products of weighted adjacency matrices, and their gradients."""

from __future__ import annotations

import dgl
import pytest
import torch
from dgl import backend as F

from dgl_mgpu.graph.errors import InvalidCallError
from tests.graph.scenarios import Scenarios, Where, graphs_at, run_on_kind

scenarios = Scenarios()


def _dense(g, weights):
    """Where edges are and what they weigh; in which order they are is nobody's business."""
    row, col = g.edges(order="eid")
    shape = g.num_nodes(g.srctypes[0]), g.num_nodes(g.dsttypes[0])
    total = weights.new_zeros(shape).index_put((row.long(), col.long()), weights, accumulate=True)
    return total, g.num_edges(), [shape, g.canonical_etypes]


def _weigh(g, dtype):
    g.edata["w"] = torch.cos(g.edata["n"].to(dtype) * 1.7).requires_grad_()
    return g.edata["w"]


def _gradients(total, *weights):
    total.square().sum().backward()
    return [weight.grad for weight in weights]


@scenarios.on("homogeneous", "simple")
def product(where, g):
    found = []
    for dtype in (torch.float32, torch.float64):
        first, second = _weigh(g, dtype), _weigh(other := dgl.reverse(g, copy_edata=True), dtype)
        total, *rest = _dense(c := dgl.adj_product_graph(g, other, "w"), c.edata["w"])
        found += [total, rest, _gradients(total, first, second)]
    return found


@scenarios.on("bipartite")
def product_of_bipartite(where, g):
    back = dgl.heterograph(
        {("b", "from", "a"): g.edges()[::-1]}, {t: g.num_nodes(t) for t in ("a", "b")}
    )
    back.edata["n"] = g.edata["n"] + 3
    first, second = _weigh(g, torch.float64), _weigh(back, torch.float64)
    found = []
    for a, b in ((g, back), (back, g)):
        total, *rest = _dense(c := dgl.adj_product_graph(a, b, "w"), c.edata["w"])
        found += [total, rest]
        total.square().sum().backward()
    return [found, first.grad, second.grad]


@scenarios.on("homogeneous", "simple", "bipartite")
def total(where, g):
    half = dgl.edge_subgraph(g, g.edata["n"] % 2 == 0, relabel_nodes=False)
    first, second = _weigh(g, torch.float32), _weigh(half, torch.float32)
    summed, *rest = _dense(c := dgl.adj_sum_graph([g, half, g], "w"), c.edata["w"])
    return [summed, rest, _gradients(summed, first, second)]


@scenarios.on("simple", "bipartite")
def mask(where, g):
    weights = _weigh(g, torch.float64)
    other = dgl.edge_subgraph(g, g.edata["n"] % 3 > 0, relabel_nodes=False)
    return [
        F.csrmask(g._graph, weights, other._graph),
        F.csrmask(other._graph, other.edata["w"], g._graph),
    ]


@scenarios.parametrize
def test_same_as_dgl(run, kind, place, idtype):
    run_on_kind(run, kind, place, idtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_edges_there_is_nothing_to_multiply_or_add(dtype):
    with graphs_at("tensors"):
        empty, g = (Where(torch.int64).graph(kind) for kind in ("edgeless", "edgeless"))
        for graph in (empty, g):
            graph.edata["w"] = torch.ones(0, dtype=dtype)
        for c in (dgl.adj_product_graph(empty, g, "w"), dgl.adj_sum_graph([empty, g], "w")):
            assert (c.num_nodes(), c.num_edges(), c.edata["w"].dtype) == (4, 0, dtype)


def test_graphs_that_do_not_fit_are_refused():
    with graphs_at("tensors"):
        first, second = (Where(torch.int64).graph(kind) for kind in ("simple", "homogeneous"))
        for g in (first, second):
            g.edata["w"] = torch.ones(g.num_edges())
        with pytest.raises(InvalidCallError, match="8 destination nodes"):
            dgl.adj_product_graph(first, second, "w")
        with pytest.raises(InvalidCallError, match="shapes"):
            dgl.adj_sum_graph([first, second], "w")
        with pytest.raises(InvalidCallError, match="floating-point"):
            dgl.adj_product_graph(first, first, "n")
        narrow = first.int()
        with pytest.raises(InvalidCallError, match=r"torch\.int32"):
            dgl.adj_product_graph(first, narrow, "w")

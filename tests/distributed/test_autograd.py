"""Ways of autograd on a partitioned graph, against DGL's C++ on the whole graph."""

from __future__ import annotations

from functools import partial

import dgl
import dgl.function as fn
import pytest
import torch
from dgl import nn
from torch.utils.checkpoint import checkpoint

from dgl_mgpu.distributed.graph import PartitionedGraph
from tests.distributed.both import Both, random_rows, same
from tests.distributed.graphs import homogeneous
from tests.ranks import on_gpus_too

pytestmark = on_gpus_too


def _without_gradients(exchange: str) -> None:
    both = Both(dgl.add_self_loop(homogeneous()), exchange=exchange)
    torch.manual_seed(4)  # all ranks have the same parameters
    model = nn.GATConv(5, 4, 2).double().eval()
    weights = random_rows(both.g.num_edges()).requires_grad_()
    with torch.no_grad():
        expected = model(both.g, both.g.ndata["x"], edge_weight=weights)
        model.to(both.pg.device)
        found = model(both.pg, both.pg.ndata["x"], edge_weight=both.own_edges(weights))
    assert not found.requires_grad
    same(found, both.own_nodes(expected))


def test_without_gradients(ranks):
    for exchange in ranks.exchanges:
        ranks.run(_without_gradients, exchange)


def _recomputed(exchange: str, reentrant: bool) -> None:
    both = Both(dgl.add_self_loop(homogeneous()), exchange=exchange)
    torch.manual_seed(4)
    model = torch.nn.ModuleList([nn.GATConv(5, 4, 2), nn.GraphConv(8, 3)]).double()

    def layers(graph, rows, weights, keep):
        hidden = model[0](graph, rows, edge_weight=weights).flatten(1)
        return keep(model[1], graph, hidden.relu())

    def run(graph, given):
        if graph is both.g:
            return layers(graph, given["x"], given["w"], lambda f, *inputs: f(*inputs))
        again = lambda f, *inputs: checkpoint(f, *inputs, use_reentrant=reentrant)  # noqa: E731
        return again(layers, graph, given["x"], given["w"], again)

    nodes, edges = {"x": random_rows(both.g.num_nodes(), 5)}, {"w": random_rows(both.g.num_edges())}
    if reentrant:  # which autograd.grad refuses
        whole = nodes["x"].clone().requires_grad_()
        run(both.g, {"x": whole, "w": edges["w"]}).sum().backward()
        given = both.own_nodes(nodes["x"]).requires_grad_()
        weights = both.own_edges(edges["w"]).requires_grad_()
        model.to(both.pg.device)
        run(both.pg, {"x": given, "w": weights}).sum().backward()
        same(given.grad, both.own_nodes(whole.grad))
    else:
        both.compare(run, nodes, edges, model=model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(ranks, reentrant):
    for exchange in ranks.exchanges:
        ranks.run(_recomputed, exchange, reentrant)


def _second_derivatives(exchange: str) -> None:
    both = Both(homogeneous("skewed"), exchange=exchange)
    model = nn.GraphConv(5, 3, allow_zero_in_degree=True).double()

    def run(graph, rows):
        out = model(graph, rows["x"], edge_weight=graph.edata["w"]) ** 3
        (first,) = torch.autograd.grad(out.sum(), rows["x"], create_graph=True)
        return first

    torch.manual_seed(4)
    model.reset_parameters()
    both.compare(run, {"x": random_rows(both.g.num_nodes(), 5)}, model=model)


def test_second_derivatives(ranks):
    for exchange in ranks.exchanges:
        ranks.run(_second_derivatives, exchange)


#: Messages, and what they are reduced by: the last ones not on a reversed graph.
_FUNCTIONS = [
    ("copy_u", "sum"), ("u_mul_e", "sum"), ("u_div_v", "sum"), ("v_sub_e", "sum"),
    ("u_mul_e", "mean"), ("u_mul_v", "max"), ("u_div_e", "min"),
]  # fmt: skip


def _second_derivatives_of_all(exchange: str, of_edges: bool) -> None:
    both = Both(homogeneous("skewed"), exchange=exchange)

    def first(out, rows):
        given = rows["w"] if of_edges else rows["x"]
        return torch.autograd.grad((out**3).sum(), given, create_graph=True)[0]

    def passed(graph, rows, message, reducer):
        graph.ndata["h"], graph.edata["h"] = rows["x"], rows["w"]
        fields = ["h"] * (1 if message == "copy_u" else 2)
        graph.update_all(getattr(fn, message)(*fields, "m"), getattr(fn, reducer)("m", "o"))
        return first(graph.ndata["o"], rows)

    def attended(graph, rows, norm_by):
        if isinstance(graph, PartitionedGraph):
            shares = dgl.ops.edge_softmax(graph, rows["w"], norm_by=norm_by)
        else:  # DGL's C++ has no second derivative of it
            along, raised = dgl.reverse(graph) if norm_by == "src" else graph, rows["w"].exp()
            shares = raised / dgl.ops.copy_v(along, dgl.ops.copy_e_sum(along, raised))
        return first(dgl.ops.u_mul_e_sum(graph, rows["x"], shares), rows)

    x, w = random_rows(both.g.num_nodes(), 3), random_rows(both.g.num_edges(), 3)
    nodes, edges = {"x": x.sign() * (x.abs() + 0.5)}, {"w": w.sign() * (w.abs() + 0.5)}
    runs = [partial(passed, message=message, reducer=by) for message, by in _FUNCTIONS]
    runs = [run for run in runs if not of_edges or "e" in run.keywords["message"].split("_")]
    runs += [partial(attended, norm_by=norm_by) for norm_by in ("dst", "src")]
    for run in runs:
        for turn in (False, True):
            if not turn or run.keywords.get("reducer") not in ("max", "min"):
                what = (*run.keywords.values(), turn)
                both.compare(run, nodes, edges, of_edges=of_edges, turn=turn, what=what)


@pytest.mark.parametrize("of_edges", [False, True])
def test_second_derivatives_of_all_functions(ranks, of_edges):
    for exchange in ranks.exchanges:
        ranks.run(_second_derivatives_of_all, exchange, of_edges)


def _changed_in_place(exchange: str) -> None:
    both = Both(homogeneous(), exchange=exchange)

    def run(graph, given):
        graph.ndata["h"] = given["x"]
        graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
        return graph.ndata["o"].mul_(2).tanh_()

    for turn in (False, True):
        nodes = {"x": random_rows(both.g.num_nodes(), 3)}
        both.compare(run, nodes, turn=turn, what=turn)


def test_sums_may_be_changed_in_place(ranks):
    for exchange in ranks.exchanges:
        ranks.run(_changed_in_place, exchange)

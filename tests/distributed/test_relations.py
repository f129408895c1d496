"""Message passing over several relations, against DGL's C++ on the whole graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import dgl
import dgl.function as fn
import pytest
import torch
from dgl import nn

import dgl_mgpu
from tests.distributed.both import same
from tests.distributed.graphs import heterogeneous
from tests.ranks import on_gpus_too

pytestmark = on_gpus_too


class _BothHeterographs:
    def __init__(self, g: dgl.DGLGraph, exchange: str) -> None:
        self.g = g
        self.pg = dgl_mgpu.partition_graph(g, exchange=exchange)

    def compare(self, run: Callable[..., dict[str, torch.Tensor]], what: str) -> None:
        """Compare the rows of nodes that ``run`` returns, and their gradients."""
        results = []
        for graph in (self.g, self.pg):
            given = {t: graph.nodes[t].data["x"].clone().requires_grad_() for t in graph.ntypes}
            with graph.local_scope():
                out = run(graph, given)
            total = sum(
                (
                    rows * graph.nodes[ntype].data["x"].mean(1).view(-1, *[1] * (rows.dim() - 1))
                ).sum()
                for ntype, rows in out.items()
            )
            found = torch.autograd.grad(total, list(given.values()), allow_unused=True)
            results.append((out, dict(zip(given, found, strict=True))))
        for expected, found in zip(*results, strict=True):
            assert expected.keys() == found.keys()
            for ntype in expected:
                if expected[ntype] is not None:
                    same(self.pg.gather(found[ntype], ntype), expected[ntype].detach(), what)


def _with_rows(graph, given):
    for ntype, rows in given.items():
        graph.nodes[ntype].data["h"] = rows


def _received(graph):
    return {ntype: graph.nodes[ntype].data["out"] for ntype in ("user", "item", "tag")}


def _all_relations(exchange: str) -> None:
    both = _BothHeterographs(heterogeneous(num_marks=15), exchange)
    for reducer in ("sum", "max", "min"):

        def run(graph, given, reducer=reducer):
            _with_rows(graph, given)
            graph.update_all(fn.copy_u("h", "m"), getattr(fn, reducer)("m", "out"))
            return _received(graph)

        both.compare(run, reducer)


def test_all_relations_at_once(ranks):
    for exchange in ranks.exchanges:
        ranks.run(_all_relations, exchange)


def _softmax_over_relations(exchange: str, num_marks: int, lift: float) -> None:
    both = _BothHeterographs(heterogeneous(num_marks), exchange)

    def run(graph, given, norm_by):
        _with_rows(graph, given)
        graph.apply_edges(fn.u_dot_v("h", "h", "score"))
        scores = {
            etype: graph.edges[etype].data["score"] + lift for etype in graph.canonical_etypes
        }
        for etype, shares in dgl.ops.edge_softmax(graph, scores, norm_by=norm_by).items():
            graph.edges[etype].data["share"] = shares
        graph.update_all(fn.u_mul_e("h", "share", "m"), fn.sum("m", "out"))
        return _received(graph)

    for norm_by in ("dst", "src"):
        both.compare(partial(run, norm_by=norm_by), norm_by)


@pytest.mark.parametrize(("num_marks", "lift"), [(15, 0.0), (1, -1e4)])
def test_softmax_over_several_relations(ranks, num_marks, lift):
    """Also far from 0, where ranks have no edges of one relation."""
    for exchange in ranks.exchanges:
        ranks.run(_softmax_over_relations, exchange, num_marks, lift)


def _softmax_beside_no_edges() -> None:
    g = heterogeneous(num_marks=0)
    pg = dgl_mgpu.partition_graph(g)
    scores = {etype: pg.edges[etype].data["w"] - 1e4 for etype in pg.canonical_etypes}
    found = dgl.ops.edge_softmax(pg, scores)
    for etype in pg.canonical_etypes:
        if etype[2] == "user":  # the only relation with edges to users is normalised by itself
            same(found[etype], dgl.ops.edge_softmax(pg[etype], scores[etype]), etype)


def test_softmax_beside_a_relation_without_edges(ranks):
    """Which DGL's C++ refuses."""
    ranks.run(_softmax_beside_no_edges)


def _highest_of_no_edges(exchange: str) -> None:
    """The highest over a relation without edges is 0, as of the whole graph."""
    none = torch.zeros(0, dtype=torch.int64)
    some = torch.tensor([0, 1]), torch.tensor([1, 2])
    g = dgl.heterograph({("a", "t", "a"): some, ("b", "s", "a"): (none, none)}, {"a": 7, "b": 5})
    for ntype in g.ntypes:
        g.nodes[ntype].data["h"] = torch.ones(g.num_nodes(ntype), 2)
    pg = dgl_mgpu.partition_graph(g, exchange=exchange)
    for reduce in ("max", "min"):
        passes = (fn.copy_u("h", "m"), getattr(fn, reduce)("m", "out"))
        for each in (g, pg):
            each.multi_update_all({"t": passes, "s": passes}, "sum")
        own = pg.nodes["a"].data[dgl.NID].cpu()
        same(pg.nodes["a"].data["out"], g.nodes["a"].data["out"][own])


def test_the_highest_of_no_edges_at_all_is_0(ranks):
    for exchange in ranks.exchanges:
        ranks.run(_highest_of_no_edges, exchange)


def _each_relation(exchange: str) -> None:
    both = _BothHeterographs(heterogeneous(), exchange)
    g, pg = both.g, both.pg
    for cross in ("sum", "mean", "max", "min", "stack"):

        def several(graph, given, cross=cross):
            _with_rows(graph, given)
            functions = {
                "follows": (fn.copy_u("h", "m"), fn.sum("m", "out")),
                "buys": (fn.u_mul_e("h", "w", "m"), fn.mean("m", "out")),
                "sees": (fn.copy_u("h", "m"), fn.max("m", "out")),
                "has": (lambda edges: {"m": edges.src["h"] * 2}, fn.sum("m", "out")),
                "marks": (fn.copy_u("h", "m"), fn.sum("m", "out")),
            }
            graph.multi_update_all(functions, cross)
            return _received(graph)

        both.compare(several, cross)

    def one(graph, given):
        _with_rows(graph, given)
        graph["buys"].update_all(fn.copy_u("h", "m"), fn.max("m", "out"))
        graph.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "out"), etype="follows")
        return {ntype: graph.nodes[ntype].data["out"] for ntype in ("user", "item")}

    both.compare(one, "one relation")

    def scored(graph, given):
        _with_rows(graph, given)
        graph.apply_edges(fn.u_dot_v("h", "h", "s"), etype="sees")
        graph.edges["sees"].data["a"] = dgl.ops.edge_softmax(
            graph["sees"], graph.edges["sees"].data["s"]
        )
        graph.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "out"), etype="sees")
        return {"item": graph.nodes["item"].data["out"]}

    both.compare(scored, "attention")

    def module(graph, given):
        torch.manual_seed(1)
        convs = {
            etype: nn.SAGEConv(5, 4, "mean")
            if etype != "has"
            else nn.GATConv(5, 4, 1, allow_zero_in_degree=True)
            for etype in graph.etypes
        }
        model = nn.HeteroGraphConv(convs, aggregate="sum").double().to(graph.device)
        found = model(graph, given)
        return {t: rows.reshape(len(rows), -1) for t, rows in found.items()}

    both.compare(module, "HeteroGraphConv")
    for etype in g.canonical_etypes:
        own_dst = pg.nodes[etype[2]].data[dgl.NID].cpu()
        own_src = pg.nodes[etype[0]].data[dgl.NID].cpu()
        same(pg.in_degrees(etype=etype), g.in_degrees(own_dst, etype=etype))
        same(pg.out_degrees(etype=etype), g.out_degrees(own_src, etype=etype))


def test_several_relations(ranks):
    for exchange in ranks.exchanges:
        ranks.run(_each_relation, exchange)

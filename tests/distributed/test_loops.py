"""Loops added to a part and taken from it, against DGL's C++ on the whole graph."""

from __future__ import annotations

import dgl
import dgl.function as fn
import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.errors import UnsupportedByPartitionError
from tests.distributed.both import Both, random_rows, same, uneven
from tests.distributed.graphs import heterogeneous, homogeneous
from tests.ranks import on_gpus_too

pytestmark = on_gpus_too

#: Graphs by their names, and the ranks of their nodes.
_GRAPHS = {
    "some loops": lambda: (_with_some_loops(homogeneous("skewed")), "random"),
    "several loops at each node": lambda: (dgl.add_self_loop(uneven("no nodes")[0]), "metis"),
    "a rank without nodes": lambda: uneven("no nodes"),
    "a rank without edges": lambda: uneven("no edges"),
    "no edges": lambda: (homogeneous("no edges"), "order"),
    "int32": lambda: (_with_some_loops(homogeneous()).int(), "random"),
}


def _with_some_loops(g: dgl.DGLGraph) -> dgl.DGLGraph:
    nodes = torch.tensor([1, 1, 4, 7])
    g = dgl.add_edges(
        g, nodes, nodes, {"w": torch.full((4, *g.edata["w"].shape[1:]), 2.0).double()}
    )
    g.edata["kind"] = torch.arange(g.num_edges()) % 5
    return g


class _Changed(Both):
    """A graph and its parts, both changed in the same way."""

    def __init__(self, name: str, exchange: str, change) -> None:
        super().__init__(*_GRAPHS[name](), exchange=exchange)
        self.g, self.pg = change(self.g), change(self.pg)
        self.edges = self.pg.edata[dgl.EID].long().cpu()


_CHANGES = {
    "added": dgl.add_self_loop,
    "taken": dgl.remove_self_loop,
    "taken and added": lambda g: dgl.remove_self_loop(g).add_self_loop(),
    "added twice, then taken": lambda g: dgl.remove_self_loop(g.add_self_loop().add_self_loop()),
    "added to the reversed": lambda g: dgl.reverse(
        dgl.add_self_loop(dgl.reverse(g, copy_edata=True), fill_data=3), copy_edata=True
    ),
    "with features by name": lambda g: dgl.add_self_loop(g, ["w"], fill_data=0.5),
}


def _same_graph(both: Both) -> None:
    g, pg = both.g, both.pg
    assert isinstance(pg, PartitionedGraph) and pg.idtype == g.idtype
    assert set(pg.edata) == {*g.edata, dgl.EID} and set(pg.ndata) == {*g.ndata, dgl.NID}
    ends = sorted(g.in_edges(both.nodes.to(g.idtype), form="eid").tolist())
    assert sorted(both.edges.tolist()) == ends
    for key, rows in g.ndata.items():
        assert torch.equal(pg.ndata[key].cpu(), rows[both.nodes]), key
    for key, rows in g.edata.items():
        assert torch.equal(pg.edata[key].cpu(), rows[both.edges]), key
    own = both.nodes.to(g.idtype)
    assert torch.equal(pg.in_degrees().cpu(), g.in_degrees(own))
    assert torch.equal(pg.out_degrees().cpu(), g.out_degrees(own))
    assert pg.edata[dgl.EID].dtype == g.idtype


def _loops(name: str, change: str, exchange: str) -> None:
    both = _Changed(name, exchange, _CHANGES[change])
    _same_graph(both)

    def run(graph, rows, by):
        graph.ndata["h"], graph.edata["e"] = rows["x"], rows["w"]
        graph.update_all(fn.u_mul_e("h", "e", "m"), by("m", "o"))
        return graph.ndata["o"] + dgl.ops.copy_u_sum(graph, rows["x"])

    nodes = {"x": random_rows(both.g.num_nodes(), 3)}
    edges = {"w": random_rows(both.g.num_edges(), 3)}
    for turn, reducer in ((False, fn.max), (False, fn.mean), (True, fn.sum)):
        if both.g.num_edges():  # DGL's C++ has no gradients of none
            what = (turn, reducer)
            both.compare(lambda g, r: run(g, r, reducer), nodes, edges, turn=turn, what=what)  # noqa: B023


@pytest.mark.parametrize("name", _GRAPHS)
@pytest.mark.parametrize("change", _CHANGES)
def test_loops_are_those_of_the_whole_graph(ranks, name, change):
    exchanges = ranks.exchanges if name == "some loops" else ranks.exchanges[:1]
    for exchange in exchanges:
        ranks.run(_loops, name, change, exchange)


def _features_of_loops() -> None:
    for fill in (2, "mean", "max"):
        both = Both(homogeneous())
        both.g.edata["w"] = random_rows(both.g.num_edges(), 2)
        both.pg.edata["w"] = both.own_edges(both.g.edata["w"]).requires_grad_()
        g, pg = (dgl.add_self_loop(each, fill_data=fill) for each in (both.g, both.pg))
        same(pg.edata["w"], g.edata["w"][pg.edata[dgl.EID].cpu()], fill)
        assert pg.edata["w"].requires_grad


def test_loops_have_the_features_that_are_asked_for(ranks):
    ranks.run(_features_of_loops)


def _of_one_relation() -> None:
    g = heterogeneous()
    pg = dgl_mgpu.partition_graph(g)
    for change in (dgl.add_self_loop, dgl.remove_self_loop):
        ours, whole = change(pg, etype="follows"), change(g, etype="follows")
        for etype in g.canonical_etypes:
            for each in (ours, whole):
                each.update_all(fn.u_mul_e("x", "w", "m"), fn.sum("m", etype[1]), etype=etype)
            out = ours.gather(ours.nodes[etype[2]].data[etype[1]], etype[2])
            same(out, whole.nodes[etype[2]].data[etype[1]], etype)
        with pytest.raises(dgl.DGLError, match="unidirectional bipartite"):
            change(pg, etype="buys")


def test_loops_of_one_relation(ranks):
    ranks.run(_of_one_relation)


def _made_once() -> None:
    pg = dgl_mgpu.partition_graph(homogeneous())
    for of in (pg.local_var, lambda: dgl.reverse(pg)):
        first, again = (dgl.add_self_loop(of()) for _ in range(2))
        assert first._graph is again._graph
    node = torch.zeros(1, dtype=pg.idtype, device=pg.device)
    with pytest.raises(UnsupportedByPartitionError):
        dgl.add_edges(pg, node, node)


def test_a_model_that_adds_loops_in_every_pass_has_them_made_once(ranks):
    ranks.run(_made_once)


def _other_edges() -> None:
    g, by = uneven("no nodes")
    pg = dgl_mgpu.partition_graph(g, by=by)
    own = pg.nodes()  # of some rank none, whose edges could be anything
    with pytest.raises(UnsupportedByPartitionError):
        dgl.add_edges(pg, own, own.roll(1))
    total = torch.ones(())
    dist.all_reduce(total)  # nobody is left waiting
    assert int(total) == dist.get_world_size()


def test_other_edges_than_loops_are_refused_on_ranks_without_nodes_too(ranks):
    ranks.run(_other_edges)

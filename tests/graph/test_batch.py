"""Graphs put together, taken apart and read out."""

from __future__ import annotations

import dgl
import pytest
import torch
from dgl import heterograph_index

from dgl_mgpu.graph.errors import InvalidCallError
from tests.graph.scenarios import (
    GRAPHS,
    Scenarios,
    Where,
    graphs_at,
    run_on_kind,
    with_features,
)

scenarios = Scenarios()


@scenarios.on(*GRAPHS)
def batch(where, g):
    return [dgl.batch([g]), dgl.batch([g, g, g]), dgl.batch([dgl.batch([g, g]), g])]


@scenarios.on("homogeneous", "simple", "edgeless")
def batch_of_one_format(where, g):
    return [
        dgl.batch([g.formats(name)] * 2).adj_external(name == "csc", g.device, how)
        for name, how in (("coo", "coo"), ("csr", "csr"), ("csc", "csr"))
    ]


@scenarios.on("homogeneous")
def batch_of_unlike_graphs(where, g):
    graphs = [where.graph(kind) for kind in ("edgeless", "homogeneous", "nodeless", "simple")]
    return [dgl.batch(graphs), dgl.batch(graphs, ndata=["n"], edata=None)]


@scenarios.on("homogeneous", "bipartite", "heterogeneous")
def unbatch(where, g):
    together = dgl.batch([g, g, g])
    return [dgl.unbatch(together), dgl.unbatch(dgl.batch([g]))]


@scenarios.on("homogeneous")
def unbatch_by_sizes(where, g):
    other = where.graph("simple")
    together = dgl.batch([g, other, g])
    sizes = g.num_nodes(), other.num_nodes(), g.num_nodes()
    edges = g.num_edges(), other.num_edges(), g.num_edges()
    return dgl.unbatch(together, where.tensor(sizes), where.tensor(edges))


@scenarios.on("homogeneous", "bipartite", "heterogeneous", "edgeless")
def slice_batch(where, g):
    together = dgl.batch([g, g, g])
    return [dgl.slice_batch(together, place, store_ids=True) for place in range(3)]


@scenarios.on("bipartite", "simple")
def disjoint_partition(where, g):
    together = dgl.batch([g, g])
    parts = heterograph_index.disjoint_partition(
        together._graph,
        [[g.num_nodes(t)] * 2 for t in g.ntypes],
        [[g.num_edges(e)] * 2 for e in g.canonical_etypes],
    )
    return [dgl.DGLGraph(part, g.ntypes, g.etypes) for part in parts]


@scenarios.on("heterogeneous", "simple")
def joint_union(where, g):
    index = heterograph_index.joint_union(g._graph.metagraph, [g._graph, g._graph])
    return dgl.DGLGraph(index, g.ntypes, g.etypes)


@scenarios.on("homogeneous", "heterogeneous")
def merge(where, g):
    return dgl.merge([g, g])


def _rank(data):
    """Features of which no two are equal in a graph: of equal ones each device has its first."""
    data["rank"] = (data["n"][:, None] * data["n"].new_tensor([7, 11])).remainder(41).float()


@scenarios.on("homogeneous")
def readout(where, g):
    g = dgl.batch([g, where.graph("edgeless"), where.graph("simple")])
    g.ndata["weight"] = torch.cos(g.ndata["n"].float())[:, None]
    g.edata["weight"] = torch.cos(g.edata["n"].float())[:, None]
    _rank(g.ndata)
    _rank(g.edata)
    return [
        *(
            function(g, "x", weight)
            for weight in (None, "weight")
            for function in (dgl.sum_nodes, dgl.mean_nodes, dgl.sum_edges, dgl.mean_edges)
        ),
        dgl.max_nodes(g, "x"),
        dgl.softmax_nodes(g, "x"),
        dgl.softmax_edges(g, "x"),
        dgl.broadcast_nodes(g, where.tensor([[1.0], [2.0], [3.0]])),
        dgl.broadcast_edges(g, where.tensor([[1.0], [2.0], [3.0]])),
        dgl.topk_nodes(g, "rank", 2, sortby=0),
        dgl.topk_edges(g, "rank", 2, descending=False)[0],
    ]


@scenarios.on("heterogeneous")
def readout_of_types(where, g):
    g = dgl.batch([g, g])
    _rank(g.nodes["user"].data)
    return [
        dgl.readout_nodes(g, "x", ntype="user", op="max"),
        dgl.readout_edges(g, "x", etype="likes", op="min"),
        dgl.softmax_nodes(g, "x", ntype="item"),
        dgl.topk_nodes(g, "rank", 3, ntype="user", sortby=1),
    ]


@scenarios.on("heterogeneous", "bipartite", "homogeneous")
def to_homogeneous_and_back(where, g):
    flat, nodes, edges = dgl.to_homogeneous(g, ndata=["x"], edata=["n"], return_count=True)
    back = dgl.to_heterogeneous(flat, g.ntypes, g.etypes)
    return [flat, nodes, edges, back, dgl.to_homogeneous(g, store_type=False)]


@scenarios.on("heterogeneous")
def to_heterogeneous_with_metagraph(where, g):
    flat = dgl.to_homogeneous(g)
    return dgl.to_heterogeneous(flat, g.ntypes, g.etypes, metagraph=g.metagraph())


@scenarios.on("heterogeneous")
def slices_of_types(where, g):
    everything = slice(None)
    return [
        g["follows"],
        g["user", "likes", "item"],
        g["user", everything, "item"],
        g["user", everything, everything],
        g[everything, everything, "user"],
        g[everything],
    ]


@scenarios.on("heterogeneous")
def flattened_relations(where, g):
    flat = g._graph.flatten_relations([g.get_etype_id(e) for e in ("rates", "likes", "buys")])
    sets = [flat.induced_srctype_set, flat.induced_dsttype_set, flat.induced_etype_set]
    return [
        flat.graph.edges(0, "eid"),
        *(array.asnumpy() for array in sets),
        flat.induced_srctype,
        flat.induced_srcid,
        flat.induced_dsttype,
        flat.induced_dstid,
        flat.induced_etype,
        flat.induced_eid,
    ]


@scenarios.parametrize
def test_same_as_dgl(run, kind, place, idtype):
    run_on_kind(run, kind, place, idtype)


def test_unlike_graphs_are_not_put_together():
    with graphs_at("tensors"):
        narrow, wide = (with_features(Where(t).graph("simple")) for t in (torch.int32, torch.int64))
        with pytest.raises(InvalidCallError, match=r"int32 on cpu and .*int64 on cpu"):
            dgl.batch([narrow, wide])
        with pytest.raises(InvalidCallError, match="numbers of nodes"):
            graphs = [wide._graph, Where(torch.int64).graph("homogeneous")._graph]
            heterograph_index.joint_union(wide._graph.metagraph, graphs)


def test_one_index_has_no_edges_of_another():
    """Slices are views; what they are made into must not change the batch."""
    with graphs_at("tensors"):
        g = Where(torch.int64).graph("simple")
        together = dgl.batch([g, g])
        before = together.edges()[0].clone()
        part = dgl.slice_batch(together, 1)
        part.edges()[0].add_(1)
        assert torch.equal(together.edges()[0], before)

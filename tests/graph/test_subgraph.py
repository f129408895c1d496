"""Parts of graphs."""

from __future__ import annotations

import dgl
import pytest
import torch

from dgl_mgpu.graph.errors import UnknownIdError
from tests.graph.scenarios import (
    HOMOGENEOUS,
    WITH_EDGES,
    Scenarios,
    Where,
    graphs_at,
    run_on_kind,
)

scenarios = Scenarios()


@scenarios.on(*WITH_EDGES)
def node_subgraph(where, g):
    nodes = where.ids(5, 0, 2, 7)
    mask = where.tensor(torch.arange(g.num_nodes()) % 2 == 0)
    return [
        dgl.node_subgraph(g, nodes),
        g.subgraph([3, 1]),
        g.subgraph(mask),
        g.subgraph(where.ids()),
        dgl.node_subgraph(g, nodes, relabel_nodes=False),
        dgl.node_subgraph(g, nodes, store_ids=False),
        *(_as_a_set(g.formats(name).subgraph(nodes)) for name in ("coo", "csc")),
    ]


def _as_a_set(part):
    """Edges as they were in the whole: how they are ordered follows the format."""
    order = part.edata[dgl.EID].long().argsort()
    return [end[order] for end in part.edges()], part.edata[dgl.EID][order]


@scenarios.on("edgeless", "nodeless")
def node_subgraph_without_edges(where, g):
    return [g.subgraph(where.ids(*range(g.num_nodes()))), g.subgraph(where.ids())]


@scenarios.on("bipartite")
def node_subgraph_of_bipartite(where, g):
    return [g.subgraph({"a": where.ids(4, 0), "b": where.ids(0, 3, 8)}), g.subgraph({"b": [1]})]


@scenarios.on("heterogeneous")
def node_subgraph_of_types(where, g):
    nodes = {"user": where.ids(4, 0, 8, 1), "item": where.ids(0, 3)}
    return [g.subgraph(nodes), dgl.node_subgraph(g, nodes, relabel_nodes=False)]


@scenarios.on(*WITH_EDGES)
def edge_subgraph(where, g):
    edges = where.ids(8, 2, 0, 7)
    return [
        dgl.edge_subgraph(g, edges),
        dgl.edge_subgraph(g, where.tensor(torch.arange(g.num_edges()) % 3 == 0)),
        dgl.edge_subgraph(g, edges, relabel_nodes=False),
        dgl.edge_subgraph(g, where.ids()),
        dgl.edge_subgraph(g, where.ids(*range(g.num_edges()))),
    ]


@scenarios.on("heterogeneous")
def edge_subgraph_of_types(where, g):
    edges = {"likes": where.ids(3, 9, 1), "rates": where.ids(0, 4)}
    return [g.edge_subgraph(edges), g.edge_subgraph(edges, relabel_nodes=False)]


@scenarios.on(*WITH_EDGES)
def in_and_out_subgraph(where, g):
    nodes = where.ids(3, 0, 6)
    return [
        extract(g, nodes, relabel_nodes=relabel)
        for extract in (dgl.in_subgraph, dgl.out_subgraph)
        for relabel in (False, True)
    ] + [_as_a_set(dgl.in_subgraph(g.formats("coo"), nodes))]


@scenarios.on("heterogeneous")
def in_and_out_subgraph_of_types(where, g):
    return [
        extract(g, nodes, relabel_nodes=relabel)
        for extract in (dgl.in_subgraph, dgl.out_subgraph)
        for relabel in (False, True)
        for nodes in ({"user": where.ids(3, 0)}, {"item": where.ids(1), "user": where.ids(7)})
    ]


@scenarios.on("edgeless")
def in_subgraph_without_edges(where, g):
    return [dgl.in_subgraph(g, [1, 2]), dgl.in_subgraph(g, [1, 2], relabel_nodes=True)]


@scenarios.on(*WITH_EDGES, "edgeless")
def khop_subgraph(where, g):
    return [
        extract(g, where.ids(2, 0), k, relabel_nodes=relabel)
        for extract in (dgl.khop_in_subgraph, dgl.khop_out_subgraph)
        for k in (0, 1, 2)
        for relabel in (True, False)
    ] + [dgl.khop_in_subgraph(g, 1, k=1)]


@scenarios.on("heterogeneous")
def khop_subgraph_of_types(where, g):
    nodes = {"item": where.ids(1, 3)}
    return [
        dgl.khop_in_subgraph(g, dict(nodes), k=2),
        dgl.khop_out_subgraph(g, dict(nodes), k=2),
    ]


@scenarios.on("heterogeneous")
def subgraph_of_types(where, g):
    return [
        g.node_type_subgraph(["user"]),
        g.node_type_subgraph(["user", "item"]),
        g.edge_type_subgraph(["follows", "rates"]),
        g.edge_type_subgraph([("user", "likes", "item")]),
    ]


@scenarios.on(*WITH_EDGES)
def filter_nodes_and_edges(where, g):
    return [
        g.filter_nodes(lambda nodes: nodes.data["n"] > 3),
        g.filter_nodes(lambda nodes: nodes.data["n"] > 3, nodes=where.ids(1, 5, 6)),
        g.filter_edges(lambda edges: edges.src["n"] > edges.dst["n"]),
        g.filter_edges(lambda edges: edges.data["n"] > 3, edges=where.ids(1, 5, 6)),
    ]


@scenarios.on("heterogeneous")
def filter_of_types(where, g):
    return [
        g.filter_nodes(lambda nodes: nodes.data["n"] > 3, ntype="user"),
        g.filter_edges(lambda edges: edges.src["n"] > edges.dst["n"], etype="likes"),
    ]


@scenarios.on(*HOMOGENEOUS)
def compact_graphs(where, g):
    more = dgl.graph((where.ids(0), where.ids(0)), num_nodes=g.num_nodes()) if len(g.nodes()) else g
    return [
        dgl.compact_graphs(g),
        dgl.compact_graphs([g, more]),
        dgl.compact_graphs(g, always_preserve=where.ids(*range(g.num_nodes()))[1:3]),
    ]


@scenarios.on("heterogeneous", "bipartite")
def compact_graphs_of_types(where, g):
    ntype = g.ntypes[-1]
    return [dgl.compact_graphs(g), dgl.compact_graphs([g, g], {ntype: where.ids(2, 0)})]


@scenarios.parametrize
def test_same_as_dgl(run, kind, place, idtype):
    run_on_kind(run, kind, place, idtype)


@pytest.mark.parametrize("bad", [-1, 11])
def test_nodes_and_edges_that_do_not_exist_are_refused(bad):
    with graphs_at("tensors"):
        g = Where(torch.int64).graph("homogeneous")
        for extract in (g.subgraph, g.in_subgraph, g.out_subgraph):
            with pytest.raises(UnknownIdError, match=f"{bad}"):
                extract([0, bad, 3])
        with pytest.raises(UnknownIdError, match="3 to 40"):
            g.edge_subgraph([3, 40])


def test_a_node_that_is_given_twice_has_its_edges_twice():
    """DGL's C++ then numbers destinations by nodes, not by places: into others than asked for."""
    with graphs_at("tensors"):
        g = dgl.graph(([0, 1, 2], [1, 2, 0]))
        part = g.subgraph([1, 1, 2])
        assert part.edges()[0].tolist() == [0, 1]
        assert part.edges()[1].tolist() == [2, 2]
        assert part.edata[dgl.EID].tolist() == [1, 1]

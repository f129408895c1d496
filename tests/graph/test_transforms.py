"""Graphs made from graphs."""

from __future__ import annotations

import dgl
import torch

from tests.graph.scenarios import GRAPHS, HOMOGENEOUS, WITH_EDGES, Scenarios, run_on_kind

scenarios = Scenarios()


@scenarios.on(*GRAPHS)
def to_simple(where, g):
    return [
        dgl.to_simple(g),
        dgl.to_simple(g, return_counts=None, writeback_mapping=True),
        g.to_simple(return_counts="copies", copy_ndata=False),
        dgl.to_simple_graph(g),
    ]


@scenarios.on("homogeneous", "heterogeneous", "bipartite")
def to_simple_with_edge_features(where, g):
    for etype in g.canonical_etypes:
        g.edges[etype].data.pop("n")
    return [dgl.to_simple(g, copy_edata=True, aggregator=how) for how in ("sum", "mean")]


@scenarios.on("simple")
def to_simple_keeps_a_feature(where, g):
    return dgl.to_simple(g, copy_edata=True)


@scenarios.on(*HOMOGENEOUS)
def line_graph(where, g):
    return [
        dgl.line_graph(g),
        dgl.line_graph(g, backtracking=False),
        g.line_graph(shared=True),
    ]


@scenarios.on(*HOMOGENEOUS)
def to_bidirected(where, g):
    return [
        dgl.to_bidirected(g, copy_ndata=True),
        dgl.add_reverse_edges(g, copy_edata=True),
        dgl.add_reverse_edges(g, exclude_self=False),
    ]


@scenarios.on("heterogeneous")
def add_reverse_edges_of_types(where, g):
    return dgl.add_reverse_edges(g, copy_edata=True, ignore_bipartite=True)


@scenarios.on(*GRAPHS)
def reverse(where, g):
    turned = dgl.reverse(g, copy_edata=True)
    return [
        turned,
        turned.reverse(copy_ndata=True),
        turned.in_degrees(etype=g.canonical_etypes[0][::-1]),
    ]


@scenarios.on(*GRAPHS)
def add_edges_and_nodes(where, g):
    etype = g.canonical_etypes[0]
    ntype = g.ntypes[0]
    more = dgl.add_nodes(g, 3, {"n": where.tensor([7, 8, 9])}, ntype=ntype)
    return [
        more,
        dgl.add_edges(
            more,
            where.ids(0, 1),
            where.ids(0, 0) if g.num_nodes(etype[2]) else where.ids(0, 1),
            etype=etype,
        ),
        dgl.add_edges(more, [0, 1], [0, 2], {"n": where.tensor([5, 6])}, etype=etype),
    ]


@scenarios.on("homogeneous", "simple", "bipartite", "heterogeneous")
def remove_edges_and_nodes(where, g):
    etype = g.canonical_etypes[0]
    ntype = g.ntypes[0]
    return [
        dgl.remove_edges(g, where.ids(0, 3, 4), etype=etype, store_ids=True),
        dgl.remove_edges(g, [1], etype=etype),
        dgl.remove_nodes(g, where.ids(0, 3), ntype=ntype, store_ids=True),
        dgl.remove_nodes(g, 1, ntype=ntype),
    ]


@scenarios.on("heterogeneous", "bipartite")
def grow_in_place(where, g):
    etype, ntype = g.canonical_etypes[0], g.ntypes[0]
    g.add_nodes(2, ntype=ntype)
    g.add_edges([0], [1], etype=etype)
    g.remove_edges([2], etype=etype)
    g.remove_nodes([0], ntype=ntype)
    return g


@scenarios.on(*HOMOGENEOUS)
def self_loops(where, g):
    return [
        dgl.add_self_loop(g, fill_data=2.0),
        dgl.add_self_loop(g, ["x"], fill_data="sum"),
        dgl.remove_self_loop(g),
        dgl.remove_self_loop(g.add_self_loop()),
    ]


@scenarios.on("heterogeneous")
def self_loops_of_a_type(where, g):
    return [dgl.add_self_loop(g, etype="follows"), dgl.remove_self_loop(g, etype="follows")]


@scenarios.on(*WITH_EDGES)
def powers(where, g):
    return [
        *(dgl.khop_adj(g, k) for k in (1, 2, 3)),
        *(_sorted_edges(dgl.khop_graph(g, k)) for k in (1, 2)),
    ]


@scenarios.on("heterogeneous")
def metapath_reachable_graph(where, g):
    return [
        _sorted_edges(dgl.metapath_reachable_graph(g, path))
        for path in (["follows", "likes"], ["rates", "follows"], ["buys", "rates", "buys"])
    ]


def _sorted_edges(g):
    """SciPy decides on the order of the edges it gives."""
    return sorted(zip(*(end.tolist() for end in g.edges()), strict=True)), g.num_nodes(g.ntypes[-1])


@scenarios.on("simple")
def spectra(where, g):
    g = dgl.to_bidirected(g)
    return [round(float(value), 3) for value in dgl.laplacian_lambda_max(g)]


@scenarios.on("simple", "homogeneous")
def positional_encodings(where, g):
    vectors, values = dgl.lap_pe(g, 3, padding=True, return_eigval=True)
    return [
        dgl.random_walk_pe(g, 4),
        values,
        vectors.shape,
        dgl.svd_pe(g, 3, padding=True, random_flip=False).shape,
        dgl.shortest_dist(g, return_paths=False),
        dgl.shortest_dist(g, root=2),
        dgl.double_radius_node_labeling(g, 1, 4),
        dgl.norm_by_dst(g),
    ]


@scenarios.on(*WITH_EDGES)
def sort_by_tag(where, g):
    tag = where.tensor([2, 0, 1, 0, 2, 1, 3, 3, 0, 1, 2][: g.num_nodes()]).to(where.idtype)
    edge_tag = (g.edata["n"] % 3).to(where.idtype)
    found = []
    for sort, transpose in ((dgl.sort_csr_by_tag, False), (dgl.sort_csc_by_tag, True)):
        for tags, kind in ((tag, "node"), (edge_tag, "edge")):
            done = sort(g, tags, tag_type=kind)
            found += [done, done._graph.adjacency_matrix_tensors(0, transpose, "csr")]
    return found


@scenarios.on("bipartite")
def sort_bipartite_by_tag(where, g):
    tags = (g.edata["n"] % 4).to(where.idtype)
    return [
        dgl.sort_csr_by_tag(g, tags, tag_type="edge").srcdata["_TAG_OFFSET"],
        dgl.sort_csc_by_tag(g, tags, tag_type="edge").dstdata["_TAG_OFFSET"],
    ]


@scenarios.on("simple")
def reorder_graph(where, g):
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    edges = where.tensor(list(range(g.num_edges()))[::-1])
    return [
        dgl.reorder_graph(g, "rcmk"),
        dgl.reorder_graph(g, "rcmk", "dst"),
        dgl.reorder_graph(g, "custom", permute_config={"nodes_perm": order}),
        dgl.reorder_graph(g, "custom", "custom", True, {"nodes_perm": order, "edges_perm": edges}),
    ]


@scenarios.on("simple")
def reorder_by_partition(where, g):
    return sorted(
        dgl.reorder_graph(g.long(), "metis", permute_config={"k": 2}).ndata[dgl.NID].tolist()
    )


@scenarios.on(*GRAPHS)
def dtypes_of_features(where, g):
    return [dgl.transforms.to_half(g), dgl.transforms.to_double(g), g.int(), g.long()]


@scenarios.on("homogeneous", "heterogeneous", "nodeless")
def whether_sorted(where, g):
    status = []
    for etype in g.canonical_etypes:
        for order in ("eid", "srcdst"):
            row, col = g.edges(etype=etype, order=order)
            if len(row):
                status.append(dgl.utils.is_sorted_srcdst(row, col))
    return status


@scenarios.parametrize
def test_same_as_dgl(run, kind, place, idtype):
    run_on_kind(run, kind, place, idtype)


def test_parallel_edges_of_a_kind_keep_one_of_their_features():
    """Which one's is arbitrary."""
    from tests.graph.scenarios import Where, graphs_at

    with graphs_at("tensors"):
        g = Where(torch.int64).graph("homogeneous")
        simple, number = dgl.to_simple(g, copy_edata=True, writeback_mapping=True)
        assert torch.equal(number[simple.edata["n"]], torch.arange(simple.num_edges()))

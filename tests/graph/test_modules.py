"""The transforms of ``dgl.transforms`` that are modules."""

from __future__ import annotations

import dgl
import torch
from dgl import transforms

from tests.graph.scenarios import WITH_EDGES, Scenarios, run_on_kind

scenarios = Scenarios()


def _weigh(g):
    g.edata["w"] = torch.cos(g.edata["n"].float()).abs() + 0.1
    return g


@scenarios.on(*WITH_EDGES)
def structure(where, g):
    return [
        module(g)
        for module in (
            transforms.AddSelfLoop(),
            transforms.RemoveSelfLoop(),
            transforms.AddReverse(copy_edata=True),
            transforms.ToSimple(),
            transforms.LineGraph(),
            transforms.Compose([transforms.AddSelfLoop(), transforms.ToSimple()]),
            transforms.RowFeatNormalizer(node_feat_names=["x"], edge_feat_names=["x"]),
        )
    ]


@scenarios.on(*WITH_EDGES)
def khop_graph(where, g):
    far = transforms.KHopGraph(2)(g)
    return sorted(zip(*(end.tolist() for end in far.edges()), strict=True))


@scenarios.on("heterogeneous")
def types(where, g):
    return [
        transforms.AddSelfLoop(new_etypes=True)(g),
        transforms.AddReverse()(g),
        transforms.ToSimple()(g),
        transforms.RemoveSelfLoop()(g),
    ]


@scenarios.on("heterogeneous")
def metapaths(where, g):
    found = transforms.AddMetaPaths(
        {"taste": [("user", "likes", "item"), ("item", "rates", "user")]}
    )(g)
    return sorted(zip(*(end.tolist() for end in found.edges(etype="taste")), strict=True))


@scenarios.on("simple")
def weighted(where, g):
    g = _weigh(g)
    found = [transforms.GCNNorm()(g).edata["w"]]
    for module in (
        transforms.PPR(eweight_name="w"),
        transforms.HeatKernel(eweight_name="w"),
        transforms.GDC([0.3, 0.2, 0.1], eweight_name="w"),
    ):
        row, col = (spread := module(g)).edges()
        order = (row.long() * g.num_nodes() + col).argsort()
        found.append([row[order], col[order], spread.edata["w"][order]])
    return found


@scenarios.on("simple")
def diffusion(where, g):
    g = _weigh(dgl.add_self_loop(g))
    g.ndata["feat"] = g.ndata["x"]
    found = []
    for how in ("raw", "rw", "gcn", "ppr"):
        done = transforms.SIGNDiffusion(2, in_feat_name="feat", diffuse_op=how)(g)
        found.append([done.ndata["out_feat_1"], done.ndata["out_feat_2"]])
    return found


@scenarios.on("simple")
def positions(where, g):
    return [
        transforms.RandomWalkPE(3)(g).ndata["PE"].cpu(),
        transforms.LapPE(2)(g).ndata["PE"].shape,
        transforms.SVDPE(2)(g).ndata["svd_pe"].shape,
    ]


@scenarios.on("simple", "heterogeneous")
def chance(where, g):
    """What is left to chance draws other numbers on a GPU: sizes alone."""
    found = []
    for module in (
        transforms.FeatMask(node_feat_names=["x"]),
        transforms.NodeShuffle(),
        transforms.AddEdge(0.5),
        transforms.DropNode(0.0),
        transforms.DropEdge(1.0),
    ):
        done = module(g)
        found.append([done.num_nodes(), done.num_edges(), done.nodes[g.ntypes[0]].data["x"].shape])
    return found


@scenarios.on("heterogeneous")
def levi(where, g):
    return transforms.ToLevi()(g.edge_type_subgraph(["follows"]))


@scenarios.parametrize
def test_same_as_dgl(run, kind, place, idtype):
    run_on_kind(run, kind, place, idtype)

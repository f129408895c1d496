"""Surroundings of nodes, and explanations, of a partitioned graph against DGL's."""

from __future__ import annotations

import dgl
import dgl.function as fn
import pytest
import torch
import torch.distributed as dist
from dgl.nn import GNNExplainer, HeteroGNNExplainer

import dgl_mgpu
from tests.distributed.both import Both, same, uneven
from tests.distributed.graphs import heterogeneous, homogeneous
from tests.ranks import on_gpus_too

pytestmark = on_gpus_too


def _by_ids(g: dgl.DGLGraph, etype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Edges of a subgraph by their ids in the whole graph, and their two ends."""
    source, destination = (end.long() for end in g.edges(etype=etype, order="eid"))
    ids = g.edges[etype].data[dgl.EID].long().cpu()
    order = ids.argsort()
    src, dst = g.to_canonical_etype(etype)[::2]
    return (
        ids[order],
        g.nodes[src].data[dgl.NID][source].long().cpu()[order],
        g.nodes[dst].data[dgl.NID][destination].long().cpu()[order],
    )


def _surroundings(name: str) -> None:
    if name == "heterogeneous":
        g, by = heterogeneous(9), "random"
        wanted = [{"user": torch.tensor([3, 3, 1]), "tag": torch.tensor([0])}, {"item": 2}]
    else:
        g, by = uneven(name) if name else (homogeneous("skewed").int(), "metis")
        wanted = [0, torch.tensor([5, 2], dtype=g.idtype), [7]]
    pg = dgl_mgpu.partition_graph(g, by=by)
    for nodes in wanted:
        for k in (0, 1, 2):
            copied = dict(nodes) if isinstance(nodes, dict) else nodes  # DGL changes it
            expected, of_expected = dgl.khop_in_subgraph(g, copied, k)
            found, of_found = dgl.khop_in_subgraph(pg, nodes, k)
            assert type(found) is dgl.DGLGraph and found.idtype == g.idtype
            for ntype in g.ntypes:
                ids = expected.nodes[ntype].data[dgl.NID]
                assert torch.equal(found.nodes[ntype].data[dgl.NID].cpu(), ids)
                same(found.nodes[ntype].data["x"], g.nodes[ntype].data["x"][ids.long()])
            if not isinstance(nodes, dict):
                of_found, of_expected = {"": of_found}, {"": of_expected}
            for ntype, ids in of_expected.items():
                assert torch.equal(of_found[ntype].cpu(), ids)
            for etype in g.canonical_etypes:
                edges = _by_ids(found, etype)
                for one, another in zip(edges, _by_ids(expected, etype), strict=True):
                    assert torch.equal(one, another)
                kept = found.edges[etype].data
                same(kept["w"], g.edges[etype].data["w"][kept[dgl.EID].long().cpu()])


@pytest.mark.parametrize("name", ["", "no nodes", "no edges", "heterogeneous"])
def test_surroundings_are_a_graph_of_every_rank(ranks, name):
    ranks.run(_surroundings, name)


def _bad_nodes() -> None:
    pg = dgl_mgpu.partition_graph(homogeneous())
    for nodes in (-1, [0, 23]):
        with pytest.raises(dgl.DGLError, match="in the whole graph"):
            dgl.khop_in_subgraph(pg, nodes, 1)
    with pytest.raises(dgl.DGLError, match="several types"):
        dgl.khop_in_subgraph(dgl_mgpu.partition_graph(heterogeneous()), 0, 1)


def test_nodes_that_are_not_there_are_refused(ranks):
    ranks.run(_bad_nodes)


class _Model(torch.nn.Module):
    """A classifier of nodes, or of the graph."""

    def __init__(self, of_graph: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 3)
        self.of_graph = of_graph

    def forward(self, graph, feat, eweight=None, scale=None, of_edges=None):
        with graph.local_scope():
            graph.ndata["h"] = self.linear(feat) if scale is None else self.linear(feat) * scale
            weights = graph.edata["h"] = torch.ones_like(graph.edata["w"])
            if eweight is not None:
                weights = eweight.unsqueeze(1).to(weights.dtype)
            graph.edata["h"] = weights if of_edges is None else weights * of_edges
            graph.update_all(fn.u_mul_e("h", "h", "m"), fn.mean("m", "h"))
            return dgl.mean_nodes(graph, "h") if self.of_graph else graph.ndata["h"]


class _HeteroModel(torch.nn.Module):
    """The same of several types."""

    def __init__(self, of_graph: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 3)
        self.of_graph = of_graph

    def forward(self, graph, feat, eweight=None):
        with graph.local_scope():
            total = {ntype: 0 for ntype in graph.ntypes}
            for etype in graph.canonical_etypes:
                relation = graph[etype]
                rows = self.linear(feat[etype[0]])
                of_edges = torch.ones_like(graph.edges[etype].data["w"])
                if eweight is not None:
                    of_edges = eweight[etype].unsqueeze(1).to(of_edges.dtype)
                operands = rows, of_edges
                total[etype[2]] = total[etype[2]] + dgl.ops.u_mul_e_sum(relation, *operands)
            if not self.of_graph:
                return total
            for ntype in graph.ntypes:
                graph.nodes[ntype].data["h"] = total[ntype]
            return sum(dgl.mean_nodes(graph, "h", ntype=ntype) for ntype in graph.ntypes)


_OPTIONS = {"num_epochs": 30, "lr": 0.05, "log": False}


def _with_masks(explainer, masks):
    """The explainer, which begins with these masks."""
    explainer._init_masks = lambda *arguments: masks
    return explainer


def _of_all(of_part: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """The rows of all ranks, by their ids in the whole graph."""
    whole = torch.zeros(count, dtype=of_part.dtype)
    whole[ids.long().cpu()] = of_part.detach().cpu()
    dist.all_reduce(whole)
    return whole


def _graphs_explanation(of_last: str) -> None:
    both = Both(*uneven(of_last)) if of_last else Both(homogeneous("skewed"))
    torch.manual_seed(2)
    model = _Model(True).double()
    ids = both.pg.edata[dgl.EID]
    size = both.g.num_edges()
    explainer = GNNExplainer(model, 1, **_OPTIONS)
    torch.manual_seed(5 + dist.get_rank())  # as it may be in a script
    x = both.g.ndata["x"]
    found = explainer.explain_graph(both.pg, both.own_nodes(x))
    # DGL's begins with what ours began with, which one epoch less than one shows.
    begin = GNNExplainer(model, 1, **{**_OPTIONS, "num_epochs": 0})
    torch.manual_seed(5 + dist.get_rank())
    features, edges = begin.explain_graph(both.pg, both.own_nodes(x))
    every = _of_all(edges, ids, size)
    assert 0 < every.logit().std() < 1
    masks = (
        torch.nn.Parameter(features.cpu().logit().unsqueeze(0)),
        torch.nn.Parameter(every.logit()),
    )
    expected = _with_masks(GNNExplainer(model, 1, **_OPTIONS), masks).explain_graph(both.g, x)
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(_of_all(found[1], ids, size), expected[1], rtol=1e-4, atol=1e-5)
    assert (expected[0] - features.cpu()).abs().max() > 0.05  # it has learned something


@pytest.mark.parametrize("of_last", ["", "no nodes", "no edges"])
def test_a_graphs_explanation_is_that_of_the_whole_graph(ranks, of_last):
    ranks.run(_graphs_explanation, of_last)


def _nodes_explanation(of_last: str) -> None:
    both = Both(*uneven(of_last)) if of_last else Both(homogeneous("skewed"))
    torch.manual_seed(2)
    model = _Model(False).double()
    x = both.g.ndata["x"]
    scale, of_edges = x[:, :1].abs(), both.g.edata["w"]
    for node in (1, torch.tensor(4)):
        torch.manual_seed(5 + dist.get_rank())
        center, around, *masks = GNNExplainer(model, 2, **_OPTIONS).explain_node(
            node, both.pg, both.own_nodes(x),
            scale=both.own_nodes(scale), of_edges=both.own_edges(of_edges),
        )  # fmt: skip
        expected, whole = dgl.khop_in_subgraph(both.g, node, 2)[::-1]
        assert torch.equal(center.cpu(), expected)
        assert torch.equal(around.ndata[dgl.NID].cpu(), whole.ndata[dgl.NID])
        # The same draws, of the first rank's seed, on the edges in the same order.
        by_rank: list = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, [mask.cpu() for mask in masks])
        for others in by_rank:
            for mine, other in zip(masks, others, strict=True):
                assert torch.equal(mine.cpu(), other)
        assert masks[0].shape == (5,) and masks[1].shape == (whole.num_edges(),)
        explained = GNNExplainer(model.cpu(), 2, **{**_OPTIONS, "num_epochs": 300})
        torch.manual_seed(0)
        one, another = (
            explained.explain_node(node, graph, rows, scale=s, of_edges=e)
            for graph, rows, s, e in (
                (both.g, x, scale, of_edges),
                (both.pg, both.own_nodes(x), both.own_nodes(scale), both.own_edges(of_edges)),
            )
        )
        # What is learned long enough depends little on where it began.
        torch.testing.assert_close(another[2].cpu(), one[2], rtol=0.2, atol=0.1)


@pytest.mark.parametrize("of_last", ["", "no nodes"])
def test_a_nodes_explanation_is_the_same_on_every_rank(ranks, of_last):
    ranks.run(_nodes_explanation, of_last)


def _of_types() -> None:
    g = heterogeneous(9)
    pg = dgl_mgpu.partition_graph(g)
    torch.manual_seed(2)
    whole = {ntype: g.nodes[ntype].data["x"] for ntype in g.ntypes}
    own = {ntype: pg.nodes[ntype].data["x"] for ntype in g.ntypes}
    model = _HeteroModel(True).double()
    torch.manual_seed(5 + dist.get_rank())
    features, edges = HeteroGNNExplainer(model, 1, **_OPTIONS).explain_graph(pg, own)
    torch.manual_seed(5 + dist.get_rank())
    begin = HeteroGNNExplainer(model, 1, **{**_OPTIONS, "num_epochs": 0}).explain_graph(pg, own)
    masks = (
        {k: torch.nn.Parameter(mask.cpu().logit().unsqueeze(0)) for k, mask in begin[0].items()},
        {
            etype: torch.nn.Parameter(
                _of_all(mask, pg.edges[etype].data[dgl.EID], g.num_edges(etype)).logit()
            )
            for etype, mask in begin[1].items()
        },
    )
    explainer = _with_masks(HeteroGNNExplainer(model, 1, **_OPTIONS), masks)
    expected = explainer.explain_graph(g, whole)
    for ntype, mask in features.items():
        torch.testing.assert_close(mask.cpu(), expected[0][ntype], rtol=1e-4, atol=1e-5)
    for etype, mask in edges.items():
        every = _of_all(mask, pg.edges[etype].data[dgl.EID], g.num_edges(etype))
        torch.testing.assert_close(every, expected[1][etype], rtol=1e-4, atol=1e-5)
    of_nodes = HeteroGNNExplainer(_HeteroModel(False).double(), 1, **_OPTIONS)
    center, around, *_ = of_nodes.explain_node("user", 4, pg, own)
    expected_center, surroundings = dgl.khop_in_subgraph(g, {"user": 4}, 1)[::-1]
    assert torch.equal(center.cpu(), expected_center["user"])
    for etype in g.canonical_etypes:
        for one, another in zip(_by_ids(around, etype), _by_ids(surroundings, etype), strict=True):
            assert torch.equal(one, another)


def test_explanations_of_several_types(ranks):
    ranks.run(_of_types)

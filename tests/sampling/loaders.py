"""Graphs and checks for tests of DGL's DataLoader, on whatever device."""

from __future__ import annotations

import dgl
import torch
from dgl.dataloading import DataLoader, NeighborSampler

#: What samplers prefetch of a `node_graph`.
FEATURES = {
    "prefetch_node_feats": ["feat"],
    "prefetch_labels": ["label"],
    "prefetch_edge_feats": ["weight"],
}


def node_graph(device, idtype=torch.int64, num_nodes=300, num_edges=3000):
    draw = torch.Generator().manual_seed(8)
    ends = (num_nodes * torch.rand(2, num_edges, generator=draw) ** 2).to(idtype).to(device)
    g = dgl.graph((ends[0], ends[1]), num_nodes=num_nodes)
    g.ndata["feat"] = torch.rand(num_nodes, 5, generator=draw).to(device)
    g.ndata["label"] = torch.arange(num_nodes, device=device) % 7
    g.edata["weight"] = (torch.rand(num_edges, generator=draw) + 0.1).to(device)
    return g


def load(g, ids, sampler, **options):
    return DataLoader(
        g, ids, sampler, **{"device": "cpu", "use_uva": True, "batch_size": 32} | options
    )


def typed_graph(device):
    draw = torch.Generator().manual_seed(9)

    def pairs(sources, targets, count):
        return tuple(
            torch.randint(0, nodes, (count,), generator=draw).to(device)
            for nodes in (sources, targets)
        )

    g = dgl.heterograph(
        {
            ("user", "follows", "user"): pairs(60, 60, 300),
            ("user", "buys", "item"): pairs(60, 40, 200),
            ("item", "bought-by", "user"): pairs(40, 60, 200),
        },
        {"user": 60, "item": 40},
    )
    for etype in g.canonical_etypes:
        g.edges[etype].data["weight"] = torch.rand(g.num_edges(etype), generator=draw).to(device)
    for ntype in g.ntypes:
        g.nodes[ntype].data["feat"] = torch.rand(g.num_nodes(ntype), 3, generator=draw).to(device)
        g.nodes[ntype].data["label"] = torch.arange(g.num_nodes(ntype), device=device)
    return g


def link_graph(device):
    """A graph and the reverse of each of its edges."""
    draw = torch.Generator().manual_seed(10)
    src, dst = torch.randint(0, 120, (2, 500), generator=draw).to(device)
    g = dgl.graph((torch.cat([src, dst]), torch.cat([dst, src])), num_nodes=120)
    edges = torch.arange(500, device=device)
    return g, torch.cat([edges + 500, edges])


def by_type(ids, types):
    return ids if isinstance(ids, dict) else {types[0]: ids}


def assert_epoch_is_right(
    g, ids, *, device=None, prob=None, replace=False, on=None, batch_size=32, **options
):
    """Every seed comes once, and blocks and what was fetched for them are the graph's.

    Parameters
    ----------
    on : type, optional
        Of the blocks' graph indexes.
    """
    names = ["feat"], ["label"], ["weight"]
    if len(g.ntypes) > 1:
        names = (
            {ntype: ["feat"] for ntype in g.ntypes},
            {ntype: ["label"] for ntype in g.ntypes},
            {etype: ["weight"] for etype in g.canonical_etypes},
        )
    sampler = NeighborSampler(
        [3, 4],
        prob=prob,
        replace=replace,
        prefetch_node_feats=names[0],
        prefetch_labels=names[1],
        prefetch_edge_feats=names[2],
    )
    loader = DataLoader(
        g, ids, sampler, device=device, batch_size=batch_size, shuffle=True, **options
    )
    seen = {ntype: [] for ntype in g.ntypes}
    where = torch.device(device or g.device)
    for inputs, outputs, blocks in loader:
        for ntype, nodes in by_type(outputs, g.ntypes).items():
            assert nodes.device.type == where.type
            seen[ntype] += nodes.tolist()
            assert torch.equal(blocks[-1].dstnodes[ntype].data[dgl.NID], nodes)
        for ntype, nodes in by_type(inputs, g.ntypes).items():
            assert torch.equal(blocks[0].srcnodes[ntype].data[dgl.NID], nodes)
        for block in blocks:
            assert block.device.type == where.type
            assert on is None or isinstance(block._graph, on)
        assert_blocks_are_right(g, blocks, fetched=True)
    given = by_type(ids, g.ntypes)
    expected = {
        ntype: sorted(given[ntype].tolist()) if ntype in given else [] for ntype in g.ntypes
    }
    if options.get("drop_last"):
        assert len(seen[g.ntypes[0]]) == len(expected[g.ntypes[0]]) // batch_size * batch_size
        assert set(seen[g.ntypes[0]]) <= set(expected[g.ntypes[0]])
    else:
        assert {ntype: sorted(nodes) for ntype, nodes in seen.items()} == expected


def assert_blocks_are_right(g, blocks, *, fetched=False):
    """Edges are those of their ids, and fetched features those of their nodes and edges."""

    def rows(table, ids):
        return table[ids.long().to(table.device)].to(ids.device)

    for block in blocks:
        for etype in g.canonical_etypes:
            src, dst = block.edges(etype=etype)
            eids = block.edges[etype].data[dgl.EID]
            true_src, true_dst = (end.to(eids.device) for end in g.edges(etype=etype))
            found_src = block.srcnodes[etype[0]].data[dgl.NID][src.long()]
            assert torch.equal(found_src, true_src[eids.long()])
            found_dst = block.dstnodes[etype[2]].data[dgl.NID][dst.long()]
            assert torch.equal(found_dst, true_dst[eids.long()])
            if fetched:
                weights = block.edges[etype].data["weight"]
                assert weights.device == eids.device
                assert torch.equal(weights, rows(g.edges[etype].data["weight"], eids))
    if fetched:
        for ntype in g.ntypes:
            for nodes, name in (
                (blocks[0].srcnodes[ntype], "feat"),
                (blocks[-1].dstnodes[ntype], "label"),
            ):
                ids = nodes.data[dgl.NID]
                assert nodes.data[name].device == ids.device
                assert torch.equal(nodes.data[name], rows(g.nodes[ntype].data[name], ids))


def assert_pairs_are_right(g, reverse, sampler, exclude, has_negatives, *, sampled=None, **options):
    """Pairs are edges of the graph, and none that is to be left out is in the blocks.

    Parameters
    ----------
    sampled : StoreGraph, optional
        What is sampled in place of the graph.
    """
    edges = torch.arange(0, 500, 3, device=g.device if options.get("device") is None else "cpu")
    loader = DataLoader(sampled or g, edges.to(g.device), sampler, batch_size=50, **options)
    count = 0
    src, dst = g.edges()
    for inputs, positive, *more, blocks in loader:
        eids = positive.edata[dgl.EID]
        nodes = positive.ndata[dgl.NID]
        pair_src, pair_dst = positive.edges()
        at = eids.to(src.device)
        assert torch.equal(nodes[pair_src], src[at].to(nodes.device))
        assert torch.equal(nodes[pair_dst], dst[at].to(nodes.device))
        assert len(more) == has_negatives
        for negative in more:
            assert torch.equal(negative.ndata[dgl.NID], nodes)
            assert negative.num_edges() > 0
        assert torch.equal(blocks[-1].dstdata[dgl.NID], nodes)
        assert torch.equal(blocks[0].srcdata[dgl.NID], inputs)
        assert_blocks_are_right(g, blocks)
        left_out = set()
        if exclude:
            left_out |= set(eids.tolist())
        if exclude == "reverse_id":
            left_out |= set(reverse[at].tolist())
        for block in blocks:
            assert left_out.isdisjoint(block.edata[dgl.EID].tolist())
        count += len(eids)
    assert count == len(edges)

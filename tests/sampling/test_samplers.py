"""DGL's samplers and its DataLoader on graphs of tensors."""

from __future__ import annotations

import dgl
import pytest
import torch
from dgl.dataloading import (
    ClusterGCNSampler,
    DataLoader,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    SAINTSampler,
    ShaDowKHopSampler,
    as_edge_prediction_sampler,
)
from dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform

from tests.sampling.graphs import multigraph, shop
from tests.sampling.loaders import link_graph


def check_subgraph(g, part):
    """Its edges are the graph's between the nodes that it names."""
    src, dst = part.edges(order="eid")
    nodes = part.ndata[dgl.NID]
    ends = g.find_edges(part.edata[dgl.EID])
    assert torch.equal(nodes[src.long()], ends[0]) and torch.equal(nodes[dst.long()], ends[1])


def check_blocks(g, inputs, outputs, blocks):
    """Each layer's nodes are the next one's, and edges are the graph's."""
    by_type = inputs if isinstance(inputs, dict) else {g.ntypes[0]: inputs}
    for ntype, nodes in by_type.items():
        assert torch.equal(blocks[0].srcnodes[ntype].data[dgl.NID], nodes)
    by_type = outputs if isinstance(outputs, dict) else {g.ntypes[0]: outputs}
    for ntype, nodes in by_type.items():
        assert torch.equal(blocks[-1].dstnodes[ntype].data[dgl.NID], nodes)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        assert block.device == g.device and block.idtype == g.idtype
        for etype in g.canonical_etypes:
            src, dst = (ends.long() for ends in block.edges(etype=etype, order="eid"))
            eids = block.edges[etype].data[dgl.EID]
            ends = g.find_edges(eids, etype=etype)
            assert torch.equal(block.srcnodes[etype[0]].data[dgl.NID][src], ends[0])
            assert torch.equal(block.dstnodes[etype[2]].data[dgl.NID][dst], ends[1])
        if following is not None:
            for ntype in g.ntypes:
                ids = (block.dstnodes[ntype].data, following.srcnodes[ntype].data)
                assert torch.equal(*(data[dgl.NID] for data in ids))


SAMPLERS = {
    "neighbors": lambda: NeighborSampler([2, 3]),
    "weighted": lambda: NeighborSampler([2, 3], prob="w"),
    "replace": lambda: NeighborSampler([2, 3], replace=True),
    "all neighbors": lambda: MultiLayerFullNeighborSampler(2),
    "labor": lambda: LaborSampler([2, 3]),
    "labor with importance": lambda: LaborSampler([2, 3], importance_sampling=-1),
    "labor with weights": lambda: LaborSampler([2, 3], prob="w", batch_dependency=4),
}


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", SAMPLERS)
def test_blocks_of_a_loader(device, name, idtype):
    g = multigraph(device, idtype)
    g.edata["w"] = g.edata["w"] + 0.01
    seeds = torch.arange(0, 90, 2, dtype=idtype, device=device)
    loader = DataLoader(g, seeds, SAMPLERS[name](), batch_size=20, device=device)
    for number, (inputs, outputs, blocks) in enumerate(loader):
        assert torch.equal(outputs, seeds[20 * number : 20 * (number + 1)])
        check_blocks(g, inputs, outputs, blocks)
        if name not in ("all neighbors",) and not name.startswith("labor"):
            assert int(blocks[-1].in_degrees().max()) <= 3


@pytest.mark.parametrize("name", SAMPLERS)
def test_blocks_of_several_types(device, name):
    g = shop(device)
    for etype in g.canonical_etypes:
        g.edges[etype].data["w"] = g.edges[etype].data["w"] + 0.01
    seeds = {
        "user": torch.arange(0, 40, 2, device=device),
        "item": torch.arange(0, 25, 2, device=device),
    }
    loader = DataLoader(g, seeds, SAMPLERS[name](), batch_size=12, shuffle=True, device=device)
    for inputs, outputs, blocks in loader:
        check_blocks(g, inputs, outputs, blocks)


@pytest.mark.parametrize("sampler", ["neighbors", "all neighbors", "labor"])
@pytest.mark.parametrize("negative", [None, PerSourceUniform(2), GlobalUniform(2)])
@pytest.mark.parametrize("exclude", [None, "self", "reverse_id"])
def test_edges_to_predict_are_not_in_their_blocks(device, exclude, negative, sampler):
    src, dst = multigraph(torch.device("cpu")).edges()
    g = dgl.graph(
        (torch.cat([src, dst]).to(device), torch.cat([dst, src]).to(device)), num_nodes=90
    )
    reverse = torch.arange(1000, device=device).roll(500)
    options = {"reverse_eids": reverse} if exclude == "reverse_id" else {}
    edges = as_edge_prediction_sampler(
        SAMPLERS[sampler](), exclude=exclude, negative_sampler=negative, **options
    )
    seeds = torch.arange(0, 500, 5, device=device)
    for batch in DataLoader(g, seeds, edges, batch_size=40, device=device):
        inputs, pairs, blocks = batch[0], batch[1], batch[-1]
        assert torch.equal(pairs.srcdata[dgl.NID], blocks[-1].dstdata[dgl.NID])
        check_blocks(g, inputs, pairs.ndata[dgl.NID], blocks)
        predicted = pairs.edata[dgl.EID]
        found = torch.cat([block.edata[dgl.EID] for block in blocks])
        if exclude is not None:
            assert not bool(torch.isin(found, predicted).any())
        if exclude == "reverse_id":
            assert not bool(torch.isin(found, reverse[predicted]).any())
        if negative is not None:
            assert batch[2].num_edges() == 2 * len(predicted)


def test_subgraphs_around_nodes(device):
    g = multigraph(device)
    loader = DataLoader(
        g, torch.arange(90, device=device), ShaDowKHopSampler([3, 2]), batch_size=30, device=device
    )
    for inputs, outputs, part in loader:
        assert part.device == device
        assert torch.equal(part.ndata[dgl.NID], inputs)
        assert torch.equal(inputs[: len(outputs)], outputs)
        check_subgraph(g, part)


@pytest.mark.parametrize("mode", ["node", "edge", "walk"])
def test_saint(device, mode):
    if mode == "walk" and device.type == "cuda":
        pytest.skip("DGL draws where walks begin on the CPU, and refuses it for a graph on a GPU")
    g = multigraph(device)
    g = dgl.add_self_loop(g)
    budget = {"node": 30, "edge": 40, "walk": (10, 3)}[mode]
    loader = DataLoader(
        g, torch.arange(3, device=device), SAINTSampler(mode, budget), batch_size=1, device=device
    )
    for part in loader:
        assert part.device == device and part.num_nodes() > 0
        check_subgraph(g, part)


def test_clusters(device, tmp_path):
    if device.type == "cuda":
        pytest.skip("DGL keeps clusters on the CPU, and refuses them for a graph on a GPU")
    g = multigraph(torch.device("cpu"))
    from dgl_mgpu.graph.dispatch import tensor_backed_graphs

    with tensor_backed_graphs(False):
        cpp = dgl.to_bidirected(multigraph(torch.device("cpu")))
        sampler = ClusterGCNSampler(cpp, 5, cache_path=str(tmp_path / "parts.pkl"))
    g = dgl.graph(tuple(end.to(device) for end in cpp.edges()), num_nodes=90)
    for part in DataLoader(g, torch.arange(5, device=device), sampler, batch_size=2, device=device):
        assert part.device == device
        check_subgraph(g, part)


@pytest.mark.parametrize(
    "exclude", ["self", "reverse_types", lambda ids: ids], ids=["self", "reverse_types", "own"]
)
@pytest.mark.parametrize(
    "sampler",
    [NeighborSampler([3], fused=False), LaborSampler([3]), ShaDowKHopSampler([3])],
    ids=["neighbor", "labor", "shadow"],
)
def test_pairs_keep_their_edges_where_those_are_left_out(exclude, sampler):
    """On the CPU, where DGL's C++ sorts the ids it is to leave out, in the tensor that it gets."""
    g = link_graph("cpu")[0]
    if exclude == "reverse_types":
        etype = g.canonical_etypes[0]
        g = dgl.heterograph({etype: g.edges(), ("_N", "back", "_N"): g.edges()[::-1]})
        options, ids = {"reverse_etypes": {etype[1]: "back", "back": etype[1]}}, {etype: None}
    else:
        options, ids = {}, None
    ids = torch.arange(100) if ids is None else dict.fromkeys(ids, torch.arange(100))
    pairs = as_edge_prediction_sampler(sampler, exclude=exclude, **options)
    etype = g.canonical_etypes[0]
    for _, pair_graph, *_ in DataLoader(g, ids, pairs, batch_size=20, shuffle=True):
        nodes = pair_graph.ndata[dgl.NID]
        found = [nodes[ends] for ends in pair_graph.edges(etype=etype)]
        expected = g.find_edges(pair_graph.edges[etype].data[dgl.EID], etype=etype)
        assert all(map(torch.equal, found, expected))

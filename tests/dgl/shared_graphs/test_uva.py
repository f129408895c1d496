"""DataLoaders with ``use_uva=True`` whose graph is in a store, against the graph itself.

Without a GPU, stores are in shared memory and loaders on the CPU.  Where a graph is not shared, DGL
pins it, which is refused here: so tests see which of both is done.
"""

from __future__ import annotations

import inspect
import pickle

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import (
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    ShaDowKHopSampler,
    as_edge_prediction_sampler,
)
from dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform

from dgl_mgpu.dgl.shared_graphs import SharedGraph
from dgl_mgpu.store.feature_storage import TableStorage
from dgl_mgpu.store.graph import StoreGraph
from tests.sampling.loaders import (
    FEATURES,
    assert_blocks_are_right,
    assert_epoch_is_right,
    assert_pairs_are_right,
    link_graph,
    load,
    node_graph,
    typed_graph,
)

pytestmark = [
    pytest.mark.usefixtures("without_gpu"),
    pytest.mark.filterwarnings("ignore:Dataloader CPU affinity"),
]


# -- an epoch --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("told", "both_kinds")
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{}, {"prob": "weight"}, {"replace": True}], ids=str)
def test_nodes(idtype, options):
    g = node_graph("cpu", idtype)
    ids = torch.arange(0, 300, 2, dtype=idtype)
    assert_epoch_is_right(g, ids, device="cpu", use_uva=True, **options)


@pytest.mark.usefixtures("told", "both_kinds")
def test_nodes_of_several_types():
    ids = {"user": torch.arange(40), "item": torch.arange(10, 30)}
    assert_epoch_is_right(typed_graph("cpu"), ids, device="cpu", use_uva=True)


@pytest.mark.usefixtures("told", "both_kinds")
def test_without_a_gpu_no_device_is_the_graphs():
    loader = load(node_graph("cpu"), torch.arange(40), NeighborSampler([3]), device=None)
    assert loader.device == torch.device("cpu")
    input_nodes, _, _ = next(iter(loader))
    assert input_nodes.device == torch.device("cpu")


@pytest.mark.usefixtures("told", "both_kinds")
def test_batches_are_those_of_the_graph_itself():
    """Seeds come in the same order, and where all neighbours are taken, so is all else."""
    g = node_graph("cpu")
    sampler = MultiLayerFullNeighborSampler(2, fused=False, **FEATURES)
    for drop_last in (False, True):
        epochs = []
        for options in ({}, {"use_uva": False}):
            loader = load(
                g, torch.arange(7, 290), sampler, shuffle=True, drop_last=drop_last, **options
            )
            assert isinstance(loader.graph, SharedGraph) == (not options)
            np.random.seed(3)
            epochs.append([*loader, *loader])
        for found, expected in zip(*epochs, strict=True):
            assert torch.equal(found[1], expected[1])
            assert set(found[0].tolist()) == set(expected[0].tolist())
            for block, reference in zip(found[2], expected[2], strict=True):
                assert sorted(block.edata[dgl.EID].tolist()) == sorted(
                    reference.edata[dgl.EID].tolist()
                )
            assert_blocks_are_right(g, found[2], fetched=True)


@pytest.mark.usefixtures("told")
def test_an_epoch_is_sampled_anew_and_by_the_seed():
    g = node_graph("cpu")

    def epochs(seed):
        dgl.seed(seed)
        loader = load(g.clone(), torch.arange(50), NeighborSampler([3]))
        return [[batch[2][0].edata[dgl.EID].tolist() for batch in loader] for _ in range(2)]

    first, second = epochs(1)
    assert first != second
    assert epochs(1) == [first, second]
    assert epochs(2) != [first, second]


@pytest.mark.usefixtures("told")
def test_loaders_of_a_graph_draw_from_one_sequence_which_a_seed_begins_anew():
    g = node_graph("cpu")

    def epoch():
        loader = load(g, torch.arange(50), NeighborSampler([3]))
        return [batch[2][0].edata[dgl.EID].tolist() for batch in loader]

    unseeded = [epoch(), epoch()]  # by a loader of its own each
    assert unseeded[0] != unseeded[1]
    dgl.seed(5)
    seeded = [epoch(), epoch()]
    assert seeded[0] != seeded[1] and not any(each in unseeded for each in seeded)
    dgl.seed(5)
    assert [epoch(), epoch()] == seeded


@pytest.mark.usefixtures("told", "both_kinds")
@pytest.mark.parametrize(
    "fanouts", [np.array([3, 3]), torch.tensor([3, 3]), [3.0, torch.tensor(3)]]
)
def test_fanouts_of_any_kind_of_number(fanouts):
    g = node_graph("cpu")
    _, _, blocks = next(iter(load(g, torch.arange(50), NeighborSampler(fanouts, fused=False))))
    assert len(blocks) == 2 and int(blocks[1].in_degrees().max()) == 3


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("formats", ["coo", ["coo", "csr"], "csc"])
def test_graphs_of_some_formats(formats):
    g = node_graph("cpu").formats(formats)
    loader = load(g, torch.arange(50), NeighborSampler([3], fused=False))
    assert isinstance(loader.graph, SharedGraph)
    _, _, (block,) = next(iter(loader))
    assert_blocks_are_right(g.formats(["coo", "csr", "csc"]) if formats == "csc" else g, [block])


@pytest.mark.usefixtures("told")
def test_columns_without_bytes_stay_the_scripts():
    g = node_graph("cpu")
    g.ndata["none"] = torch.zeros(g.num_nodes(), 0)
    (inputs, _, (block,)) = next(iter(load(g, torch.arange(50), NeighborSampler([3]))))
    assert block.srcdata["none"].shape == (len(inputs), 0)


@pytest.mark.usefixtures("told", "both_kinds")
@pytest.mark.parametrize("make", [node_graph, typed_graph])
def test_blocks_have_features_that_nobody_has_fetched(make):
    g = make("cpu")
    ids = {ntype: torch.arange(0, g.num_nodes(ntype), 2) for ntype in g.ntypes}
    loader = load(g, ids if len(g.ntypes) > 1 else ids["_N"], NeighborSampler([3, 4]))
    for _, _, blocks in loader:
        assert_blocks_are_right(g, blocks, fetched=True)
        for block, copied in zip(blocks, pickle.loads(pickle.dumps(blocks)), strict=True):
            for ntype in g.ntypes:
                rows = block.srcnodes[ntype].data["label"]
                assert torch.equal(
                    rows, g.nodes[ntype].data["label"][block.srcnodes[ntype].data[dgl.NID]]
                )
                assert torch.equal(copied.srcnodes[ntype].data["label"], rows)
        part = blocks[0].clone()
        part.srcdata["feat"] = blocks[0].srcdata["feat"]


# -- features that change --------------------------------------------------------------------------


@pytest.mark.usefixtures("told")
def test_a_changed_feature_is_seen():
    g = node_graph("cpu")
    loader = load(g, torch.arange(300), NeighborSampler([2], **FEATURES), batch_size=50)

    def assert_epoch(is_stored):
        storage = loader.graph.get_node_storage("feat")
        assert isinstance(storage, TableStorage) == is_stored
        for _, _, blocks in loader:
            assert_blocks_are_right(g, blocks, fetched=True)

    assert_epoch(True)
    stored = g.ndata["feat"]
    g.ndata["feat"] = torch.rand(300, 5)
    assert_epoch(False)
    g.ndata["feat"] = stored
    assert_epoch(True)
    g.ndata["feat"][3:5] = 1
    assert_epoch(False)
    # Another name is no other tensor.
    label = g.ndata.pop("label")
    g.ndata["label"], g.ndata["other"] = torch.arange(300), label
    assert isinstance(loader.graph.get_node_storage("other"), TableStorage)
    assert_epoch(False)
    assert loader.graph.get_node_storage("other").fetch(torch.tensor([8]), "cpu").tolist() == [1]
    for batch in loader:
        assert torch.equal(batch[2][0].srcdata["other"], label[batch[0]])
    del g.ndata["other"]
    with pytest.raises(KeyError, match="other"):
        loader.graph.get_node_storage("other")
    g.edata["weight"] = torch.rand(3000)
    assert_epoch(False)


@pytest.mark.usefixtures("told")
def test_what_is_learned_stays_the_scripts():
    """Torch does not tell of everything that an optimizer writes."""
    g = node_graph("cpu")
    g.ndata["learned"] = torch.nn.Parameter(torch.zeros(300, 2))
    with torch.inference_mode():
        g.ndata["inferred"] = torch.zeros(300)
    loader = load(g, torch.arange(60), NeighborSampler([2], prefetch_node_feats=["inferred"]))
    inputs, _, blocks = next(iter(loader))
    assert blocks[0].srcdata["learned"].requires_grad
    blocks[0].srcdata["learned"].sum().backward()
    assert g.ndata["learned"].grad.sum() == 2 * len(inputs)
    assert "learned" not in loader.graph._stored.columns["_N"]
    assert "inferred" not in loader.graph._stored.columns["_N"]
    g.ndata["feat"].requires_grad_()
    assert not isinstance(loader.graph.get_node_storage("feat"), TableStorage)


# -- what a store does not serve -------------------------------------------------------------------


@pytest.mark.usefixtures("told", "both_kinds")
@pytest.mark.parametrize("exclude", [None, "self", "reverse_id"])
@pytest.mark.parametrize("negative", [None, PerSourceUniform(3), GlobalUniform(2)])
def test_edges(exclude, negative):
    g, reverse = link_graph("cpu")
    options = {"reverse_eids": reverse} if exclude == "reverse_id" else {}
    sampler = as_edge_prediction_sampler(
        NeighborSampler([4, 4], fused=False), exclude=exclude, negative_sampler=negative, **options
    )
    has_negatives = negative is not None
    for _ in range(2):
        assert_pairs_are_right(
            g, reverse, sampler, exclude, has_negatives, device="cpu", use_uva=True
        )


@pytest.mark.usefixtures("told", "both_kinds")
@pytest.mark.parametrize("first", ["nodes", "edges"])
def test_pairs_have_the_graphs_features(first):
    """Also of a store that was built by a loader of nodes, and knows no edge by its id."""
    g = node_graph("cpu")
    sampler = as_edge_prediction_sampler(
        NeighborSampler([2], prefetch_node_feats=["feat"]),
        negative_sampler=PerSourceUniform(1),
        prefetch_labels=["weight"],
        exclude="self",
    )
    if first == "nodes":
        load(g, torch.arange(3), NeighborSampler([1]))
    for inputs, positive, negative, blocks in load(g, torch.arange(0, 3000, 7), sampler):
        eids, nodes = positive.edata[dgl.EID], positive.ndata[dgl.NID]
        src, dst = g.find_edges(eids)
        assert torch.equal(nodes[positive.edges()[0]], src)
        assert torch.equal(nodes[positive.edges()[1]], dst)
        assert torch.equal(positive.edata["weight"], g.edata["weight"][eids])
        assert torch.equal(positive.ndata["label"], g.ndata["label"][nodes])
        assert torch.equal(negative.ndata[dgl.NID], nodes)
        assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])
        assert torch.equal(blocks[0].dstdata["label"], g.ndata["label"][nodes])
        assert torch.equal(blocks[0].edata["weight"], g.edata["weight"][blocks[0].edata[dgl.EID]])


@pytest.mark.usefixtures("told", "both_kinds")
def test_edges_of_several_types():
    g = typed_graph("cpu")
    reverse = {"buys": "bought-by", "bought-by": "buys"}
    sampler = as_edge_prediction_sampler(
        NeighborSampler([2, 2], fused=False),
        exclude="reverse_types",
        reverse_etypes=reverse,
        negative_sampler=PerSourceUniform(2),
    )
    eids = {"buys": torch.arange(0, 200, 3), "follows": torch.arange(100)}
    seen = {etype: [] for etype in eids}
    for _, positive, negative, blocks in load(g, eids, sampler):
        for etype in g.canonical_etypes:
            chosen = positive.edges[etype].data[dgl.EID]
            true_src, true_dst = g.find_edges(chosen, etype=etype)
            src, dst = positive.edges(etype=etype)
            assert torch.equal(positive.nodes[etype[0]].data[dgl.NID][src], true_src)
            assert torch.equal(positive.nodes[etype[2]].data[dgl.NID][dst], true_dst)
            weights = g.edges[etype].data["weight"][chosen]
            assert torch.equal(positive.edges[etype].data["weight"], weights)
            assert negative.num_edges(etype) == 2 * len(chosen)
            if etype[1] in seen:
                seen[etype[1]] += chosen.tolist()
        left_out = set(positive.edges["buys"].data[dgl.EID].tolist())
        for block in blocks:
            assert left_out.isdisjoint(block.edges["bought-by"].data[dgl.EID].tolist())
        assert_blocks_are_right(g, blocks)
    assert {etype: sorted(found) for etype, found in seen.items()} == {
        etype: ids.tolist() for etype, ids in eids.items()
    }


@pytest.mark.usefixtures("told", "both_kinds")
@pytest.mark.parametrize("kind", ["mask", "weights in place", "new weights", "column of weights"])
def test_weights_that_change_or_that_a_store_refuses(kind):
    """DGL takes no edges where all weights are zero."""
    g = node_graph("cpu")
    g.edata["p"] = torch.rand(3000) + 0.1
    loader = load(g, torch.arange(300), NeighborSampler([2], prob="p", fused=False))
    assert all(batch[2][0].num_edges() for batch in loader)
    wanted = torch.zeros(3000, dtype=torch.bool)
    wanted[::5] = True
    if kind == "mask":
        g.edata["p"] = wanted
    elif kind == "weights in place":
        g.edata["p"].mul_(wanted)
    elif kind == "column of weights":
        g.edata["p"] = wanted.float()[:, None].contiguous()[:, 0]
    else:  # none are zero everywhere at a node
        weights = torch.full((3000,), 1e-30)
        weights[wanted] = 1.0
        g.edata["p"] = weights
    edges = torch.cat([batch[2][0].edata[dgl.EID] for batch in loader])
    if kind == "new weights":
        # Where there are enough edges of weight 1, no others are drawn.
        degree = torch.bincount(g.edges()[1][wanted], minlength=300)
        unlikely = g.edges()[1][edges[~wanted[edges]]]
        assert (degree[unlikely] < 2).all()
    else:
        assert wanted[edges].all()
        expected = torch.bincount(g.edges()[1][wanted], minlength=300).clamp(max=2).sum()
        assert len(edges) == expected


@pytest.mark.usefixtures("told")
def test_a_feature_that_is_not_there_is_missed_as_dgl_misses_it():
    g = node_graph("cpu")
    for use_uva in (True, False):
        even = NeighborSampler([2], prob="nothing", fused=False)
        for _, _, blocks in load(g, torch.arange(30), even, use_uva=use_uva):
            assert_blocks_are_right(g, blocks)
            assert (blocks[0].in_degrees() == g.in_degrees(torch.arange(30)).clamp(max=2)).all()
        with pytest.raises(KeyError, match="nothing"):
            missing = NeighborSampler([2], prefetch_node_feats=["nothing"])
            list(load(g, torch.arange(3), missing, use_uva=use_uva))


@pytest.mark.usefixtures("told", "both_kinds")
def test_edges_by_source():
    g = node_graph("cpu")
    sampler = NeighborSampler([2], edge_dir="out", fused=False)
    for seeds in (torch.tensor([5, 9]), torch.tensor([3])):
        frontier = load(g, seeds, sampler).graph.sample_neighbors(seeds, 2, edge_dir="out")
        src, dst = frontier.edges()
        assert set(src.tolist()) <= set(seeds.tolist())
        eids = frontier.edata[dgl.EID]
        assert torch.equal(torch.stack(g.find_edges(eids)), torch.stack([src, dst]))


@pytest.mark.usefixtures("told", "both_kinds")
def test_other_samplers_of_dgls():
    g = node_graph("cpu")
    for inputs, outputs, blocks in load(g, torch.arange(100), LaborSampler([3, 4])):
        assert_blocks_are_right(g, blocks)
        assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])
        assert torch.equal(blocks[-1].dstdata["label"], g.ndata["label"][outputs])
    shadow = ShaDowKHopSampler([3, 2], prefetch_node_feats=["feat"])
    for inputs, _, subgraph in load(g, torch.arange(40), shadow, batch_size=5):
        assert torch.equal(subgraph.ndata[dgl.NID], inputs)
        assert torch.equal(subgraph.ndata["feat"], g.ndata["feat"][inputs])
        assert torch.equal(subgraph.ndata["label"], g.ndata["label"][inputs])
        src, dst = g.find_edges(subgraph.edata[dgl.EID])
        assert torch.equal(inputs[subgraph.edges()[0]], src)
        assert torch.equal(inputs[subgraph.edges()[1]], dst)


@pytest.mark.usefixtures("told")
def test_the_scripts_graph_answers_what_a_store_cannot():
    g = node_graph("cpu")
    shared = load(g, torch.arange(3), NeighborSampler([1])).graph
    assert shared.ndata["feat"] is g.ndata["feat"]
    assert torch.equal(shared.in_degrees(), g.in_degrees())
    assert shared.subgraph(torch.arange(9)).num_nodes() == 9
    assert shared.is_pinned() == g.is_pinned()
    # This graph is directed: a store would not walk along its edges.
    traces, _ = dgl.sampling.random_walk(shared, torch.arange(300), length=1)
    went = traces[:, 1] >= 0
    assert went.any() and g.has_edges_between(*traces[went].T).all()
    shared.ndata["new"] = torch.ones(300)
    assert g.ndata["new"].sum() == 300
    with pytest.raises(AttributeError, match="SharedGraph"):
        shared.no_such_thing  # noqa: B018


@pytest.mark.usefixtures("told", "both_kinds")
def test_features_through_a_cache():
    g = node_graph("cpu")
    loader = load(
        g, torch.arange(300), NeighborSampler([2], **FEATURES), gpu_cache={"node": {"feat": 64}}
    )
    for _ in range(2):
        for _, _, blocks in loader:
            assert_blocks_are_right(g, blocks, fetched=True)


@pytest.mark.parametrize("name", ["sample_blocks_async", "sample_neighbors", "sample_blocks"])
def test_a_shared_graph_takes_the_arguments_of_a_stores(name):
    """It stands in a store's place on GPUs alone, and what calls it is the same."""
    shared, stores = (
        inspect.signature(getattr(of, name)).parameters for of in (SharedGraph, StoreGraph)
    )
    assert stores.keys() <= shared.keys()

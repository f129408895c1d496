"""DataLoaders with ``use_uva=True`` whose graph is in a store, against the graph itself.

Without a GPU, stores are in shared memory and loaders on the CPU.  Where a graph is not shared, DGL
pins it, which is refused here: so tests see which of both is done.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import pickle
import warnings
import weakref
from pathlib import Path

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import (
    DataLoader,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    Sampler,
    ShaDowKHopSampler,
    as_edge_prediction_sampler,
)
from dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform

from dgl_mgpu.backend import runner
from dgl_mgpu.backend.global_store.graph import StoreGraph
from dgl_mgpu.backend.global_store.storage import TableStorage
from dgl_mgpu.backend.global_store.store import GlobalStore
from dgl_mgpu.backend.memory import pinning
from dgl_mgpu.backend.ours import graphs_on_tensors
from dgl_mgpu.backend.runner import RunnerOptions
from dgl_mgpu.backend.shared_graphs import SharedGraph, share
from dgl_mgpu.backend.shared_graphs.columns import stored_of
from dgl_mgpu.errors import ConfigError, InvalidInputError, UnavailableError
from dgl_mgpu.store import cuda
from dgl_mgpu.training.launch import launch
from tests.backend.loaders import (
    assert_blocks_are_right,
    assert_epoch_is_right,
    assert_pairs_are_right,
    link_graph,
    node_graph,
    typed_graph,
)

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")

FEATURES = {
    "prefetch_node_feats": ["feat"],
    "prefetch_labels": ["label"],
    "prefetch_edge_feats": ["weight"],
}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    for module in (cuda, pinning):
        monkeypatch.setattr(module, "find_runtime", lambda: None)


@pytest.fixture
def told(monkeypatch):
    """The runner, given options, which by default say nothing but that there is to be a store."""

    def tell(**store) -> None:
        monkeypatch.delenv(runner.VARIABLE, raising=False)
        runner.hand_on(RunnerOptions(store))

    monkeypatch.setenv(runner.VARIABLE, "")  # so that it is taken back
    tell()
    return tell


@pytest.fixture(params=[False, True], ids=["DGL's graphs", "graphs of tensors"])
def both_kinds(request):
    with graphs_on_tensors(request.param):
        yield


def load(g, ids, sampler, **options):
    return DataLoader(
        g, ids, sampler, **{"device": "cpu", "use_uva": True, "batch_size": 32} | options
    )


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


# -- which graphs are shared -----------------------------------------------------------------------


class Ours(Sampler):
    def sample(self, g, indices):
        return g.in_subgraph(indices)


def test_dgl_pins_what_is_not_shared(told, monkeypatch):
    sampler = NeighborSampler([2])

    def is_pinned(**options) -> bool:
        g = node_graph("cpu")
        try:
            loader = load(g, torch.arange(9), options.pop("sampler", sampler), **options)
        except UnavailableError:
            return True
        assert isinstance(loader.graph, SharedGraph)
        return False

    assert not is_pinned()
    with pytest.warns(UserWarning, match=r"Ours may need more") as warned:
        assert is_pinned(sampler=Ours())
    # Where the DataLoader is made.
    assert warned.pop(UserWarning).lineno == load.__code__.co_firstlineno + 1
    told()
    monkeypatch.delenv(runner.VARIABLE)
    assert is_pinned()
    runner.hand_on(RunnerOptions({}, uses_store=False))
    assert is_pinned()
    monkeypatch.setenv(runner.VARIABLE, "{")
    with pytest.raises(ConfigError, match="unset it"):
        is_pinned()


def test_options_that_do_nothing_are_told(told):
    g = node_graph("cpu")

    def warned(graph=g, **options) -> list[int]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            load(graph, torch.arange(9), NeighborSampler([2]), **options)
        return [each.lineno for each in seen if "do nothing" in str(each.message)]

    assert warned(use_uva=False) == [load.__code__.co_firstlineno + 1]
    assert not warned()  # the graph is in a store from now on
    assert not warned(use_uva=False)
    runner.hand_on(RunnerOptions({}, uses_store=False))
    assert not warned(node_graph("cpu"), use_uva=False)
    runner.hand_on(RunnerOptions())
    assert not warned(node_graph("cpu"), use_uva=False)


@pytest.mark.usefixtures("told")
def test_dgls_own_checks_are_made():
    g = node_graph("cpu")
    for options in ({"num_workers": 1}, {"pin_prefetcher": True}, {"use_prefetch_thread": True}):
        with pytest.raises(ValueError, match=r"must be 0|only effective"):
            load(g, torch.arange(9), NeighborSampler([2]), **options)
    assert stored_of(g) is None
    loader = load(g, torch.arange(9), NeighborSampler([2]))
    assert "csr" not in g.formats()["created"]  # which pinning makes, and nothing here needs
    assert loader.use_prefetch_thread is loader.pin_prefetcher is False
    block = next(iter(loader))[2][0]
    with pytest.raises((UnavailableError, dgl.DGLError)):  # a block is none that is sampled
        load(block, torch.arange(1), NeighborSampler([2]))


@pytest.mark.usefixtures("told")
def test_a_loader_that_is_made_of_anothers_parts():
    """As PyTorch Lightning does."""
    loader = load(node_graph("cpu"), torch.arange(90), NeighborSampler([2], **FEATURES))
    again = DataLoader(
        loader.graph, loader.indices, loader.graph_sampler, loader.device, batch_size=None,
        use_uva=True, collate_fn=loader.collate_fn, dataset=loader.dataset,
    )  # fmt: skip
    again.cpu_affinity_enabled = True  # DGL forgets it
    assert again.graph is loader.graph
    assert sorted(torch.cat([batch[1] for batch in again]).tolist()) == list(range(90))


def test_options_of_the_runner_place_the_graph(told, tmp_path):
    told(gpu_memory="8KiB", host_memory="24KiB", disk_path=str(tmp_path))
    g = node_graph("cpu")
    loader = load(g, torch.arange(300), NeighborSampler([3, 4], **FEATURES))
    plan = loader.graph._stored.store.plan
    used = {tier.memory for table in plan.tables.values() for tier in table.tiers}
    assert used == {"gpu", "host", "disk"}
    for _, _, blocks in loader:
        assert_blocks_are_right(g, blocks, fetched=True)
    told(gpu_memory="8KiB", host_memory="1KiB")
    with pytest.raises(MemoryError, match=r"store\.host_memory"):
        load(g.clone(), torch.arange(3), NeighborSampler([1]))


def test_a_store_is_planned_for_the_loaders_batches(told, monkeypatch):
    seen = []
    build = GlobalStore.from_dgl
    monkeypatch.setattr(
        GlobalStore,
        "from_dgl",
        lambda g, **options: seen.append(options) or build(g, **options),
    )
    ids = torch.arange(40)
    load(node_graph("cpu"), ids, NeighborSampler([3, 2]), batch_size=8)
    told(fanouts=[7], hotness="presample")
    load(node_graph("cpu"), ids, MultiLayerFullNeighborSampler(3), batch_size=9)
    by_type = {"user": ids, "item": ids[:5]}
    load(typed_graph("cpu"), by_type, NeighborSampler([2]))
    load(node_graph("cpu"), ids.tolist(), NeighborSampler([2]))
    pairs = as_edge_prediction_sampler(NeighborSampler([{("_N", "_E", "_N"): 2}]))
    told(hotness="presample")
    load(node_graph("cpu"), ids, pairs)
    first, second, third, fourth, last = seen
    assert (first["batch_size"], first["fanouts"], first["edges"]) == (8, [3, 2], False)
    assert (second["batch_size"], second["fanouts"]) == (9, [7])
    assert torch.equal(second["seeds"], ids) and third["seeds"] == by_type
    assert fourth["seeds"] is None
    assert last["edges"] and "fanouts" not in last and "seeds" not in last


@pytest.mark.usefixtures("told")
def test_a_store_is_where_its_loaders_are():
    g = node_graph("cpu")
    loader = load(g, torch.arange(3), NeighborSampler([1]))
    loader.device = torch.device("meta")
    with pytest.raises(ConfigError, match="store is on cpu"):
        share(loader, g, torch.arange(3), 1)


# -- one store for a graph, as long as it lives ----------------------------------------------------


def mapped() -> int:
    """Segments of stores that this process has mapped; nothing else keeps them, without a name."""
    gc.collect()
    return sum("/dev/shm/#" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.usefixtures("told", "both_kinds")
def test_all_loaders_of_a_graph_share_a_store_which_goes_with_it():
    before = mapped()
    g = node_graph("cpu")
    train, valid = (load(g, ids, NeighborSampler([2])) for ids in torch.arange(300).split(200))
    with g.local_scope():
        g.ndata["h"] = torch.ones(300)
        inner = load(g, torch.arange(9), NeighborSampler([2], prefetch_node_feats=["h"]))
        assert next(iter(inner))[2][0].srcdata["h"].sum() > 0
    variant = g.local_var()
    variant.ndata["feat"] = torch.zeros(300, 5)
    other = load(variant, torch.arange(9), NeighborSampler([2], **FEATURES))
    assert next(iter(other))[2][0].srcdata["feat"].sum() == 0
    assert next(iter(train))[2][0].srcdata["feat"].sum() > 0
    stored = {id(each.graph._stored) for each in (train, valid, other)}
    assert len(stored) == 1
    assert mapped() > before
    store = weakref.ref(train.graph._stored.store)
    batch = next(iter(valid))
    del g, variant, train, valid, inner, other
    gc.collect()
    assert store() is not None  # the batch has features that are not read yet
    assert batch[2][0].srcdata["feat"].sum() > 0 and batch[2][0].dstdata["label"].sum() > 0
    del batch
    gc.collect()
    assert store() is None and mapped() == before


@pytest.mark.usefixtures("told")
def test_a_store_does_not_keep_what_the_script_gives_up():
    g = node_graph("cpu")
    loader = load(g, torch.arange(9), NeighborSampler([2], **FEATURES))
    list(loader)
    feature = weakref.ref(g.ndata.pop("feat"))
    gc.collect()
    assert feature() is None
    g.ndata["feat"] = torch.zeros(300, 5)
    assert next(iter(loader))[2][0].srcdata["feat"].sum() == 0


@pytest.mark.usefixtures("told")
def test_a_graph_that_got_more_edges_is_refused():
    g = node_graph("cpu")
    loader = load(g, torch.arange(9), NeighborSampler([2]))
    g.add_edges([0], [1])
    with pytest.raises(InvalidInputError, match="have changed"):
        iter(loader)
    assert load(g, torch.arange(9), NeighborSampler([2])).graph.num_edges() == 3001


# -- ranks -----------------------------------------------------------------------------------------


def _layer(block: dgl.DGLGraph, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with block.local_scope():
        block.srcdata["x"] = x
        block.update_all(dgl.function.copy_u("x", "m"), dgl.function.mean("m", "y"))
        return (block.dstdata["y"] + x[: block.num_dst_nodes()]) @ weight


def _trains(folder: Path, with_tensors: bool) -> None:
    """As DGL's examples do it: loaders for training and validation, then inference layer-wise."""
    cuda.find_runtime = pinning.find_runtime = lambda: None  # this is a process of its own
    with graphs_on_tensors(with_tensors):
        before = mapped()
        g = node_graph("cpu")
        y = torch.from_file(str(folder / "y"), shared=True, size=2 * 300 * 5).view(2, 300, 5)
        sampler = NeighborSampler([3, 3], **FEATURES)
        loaders = [
            load(g, ids, sampler, use_ddp=True, shuffle=True, batch_size=20)
            for ids in torch.arange(300).split(203)
        ]
        seen = {}
        for (number, loader), epoch in itertools.product(enumerate(loaders), range(2)):
            for _, outputs, blocks in loader:
                assert_blocks_are_right(g, blocks, fetched=True)
                seen.setdefault((number, epoch), []).extend(outputs.tolist())
        stores = {id(loader.graph._stored) for loader in loaders}
        g.ndata["h"] = g.ndata["feat"]
        full = MultiLayerFullNeighborSampler(1, prefetch_node_feats=["h"])
        for layer, weight in enumerate(torch.eye(5).mul(2).expand(2, 5, 5)):
            loader = load(g, torch.arange(300), full, use_ddp=True, batch_size=64)
            stores.add(id(loader.graph._stored))
            storage = loader.graph.get_node_storage("h")
            assert isinstance(storage, TableStorage) == (layer == 0)
            for _, outputs, blocks in loader:
                y[layer, outputs] = _layer(blocks[0], blocks[0].srcdata["h"], weight)
            dist.barrier()
            g.ndata["h"] = y[layer]
        g.ndata.pop("h")
        assert len(stores) == 1
        # On one rank alone.
        if dist.get_rank() == 1:
            alone = load(g, torch.arange(100), sampler)
            assert id(alone.graph._stored) in stores
            assert sum(len(outputs) for _, outputs, _ in alone) == 100
            with pytest.raises((UnavailableError, dgl.DGLError), match=r"[Pp]in"):
                load(node_graph("cpu"), torch.arange(100), sampler)
            del alone
        torch.save(seen, folder / f"{dist.get_rank()}.pt")
        dist.barrier()
        del g, loaders, loader, storage, blocks
        assert mapped() == before


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("with_tensors", [False, True])
def test_ranks_share_a_store(tmp_path, with_tensors):
    (tmp_path / "y").write_bytes(bytes(4 * 2 * 300 * 5))
    launch(_trains, 2, tmp_path, with_tensors)
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for number, ids in enumerate((range(203), range(203, 300))):
        for epoch in range(2):
            mine, others = (share[number, epoch] for share in shares)
            assert set(mine) | set(others) == set(ids)
            assert len(mine) == len(others) == -(-len(ids) // 2)
    g = node_graph("cpu")
    x = g.ndata["feat"]
    for layer in torch.from_file(str(tmp_path / "y"), size=2 * 300 * 5).view(2, 300, 5):
        x = _layer(g, x, 2 * torch.eye(5))
        assert torch.allclose(layer, x)


def _reads_other_data(what: str) -> None:
    cuda.find_runtime = lambda: None
    g = node_graph("cpu")
    if dist.get_rank() == 1:
        if what == "nodes":
            g.add_nodes(1)
        elif what == "a feature":
            g.ndata["more"] = torch.zeros(300)
        else:
            g.ndata["feat"] = g.ndata["feat"].double()
    with pytest.raises(InvalidInputError, match="load the same graph on all ranks") as error:
        load(g, torch.arange(100), NeighborSampler([2]), use_ddp=True)
    assert {
        "nodes": "nodes of type '_N': 300 on the machine's first rank, 301 on rank 1",
        "a feature": "'more' of '_N': missing on",
        "a dtype": "torch.float32 of shape (300, 5) on the machine's first rank, torch.float64",
    }[what] in str(error.value)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("what", ["nodes", "a feature", "a dtype"])
def test_ranks_with_different_graphs_are_told(what):
    launch(_reads_other_data, 2, what)


@pytest.mark.parametrize("name", ["begin_blocks", "sample_neighbors", "sample_blocks"])
def test_a_shared_graph_takes_the_arguments_of_a_stores(name):
    """It stands in a store's place on GPUs alone, and what calls it is the same."""
    shared, stores = (
        inspect.signature(getattr(of, name)).parameters for of in (SharedGraph, StoreGraph)
    )
    assert stores.keys() <= shared.keys()

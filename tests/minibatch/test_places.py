"""Mini-batches that are sampled in place; without a GPU, captured steps are computed again."""

from __future__ import annotations

import dgl
import pytest
import torch
import torch.nn.functional as F
from dgl.dataloading import DataLoader, MultiLayerFullNeighborSampler, NeighborSampler
from dgl.nn import HeteroGraphConv, SAGEConv

import dgl_mgpu
from dgl_mgpu.backend.ours import graphs_on_tensors
from dgl_mgpu.backend.sampling import dataloading
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.minibatch.captured import step
from dgl_mgpu.minibatch.captured.places import PlacedBatch
from tests.minibatch.test_captured import (
    CLASSES,
    MODELS,
    assert_close,
    capturing,  # noqa: F401  (a fixture)
    computed,
    graph,
    step_of,
)
from tests.pipeline.lanes import HostLane

FEATURES = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}


@pytest.fixture(autouse=True)
def on_tensors():
    with graphs_on_tensors():
        yield


@pytest.fixture(params=["one by one", "ahead"])
def ahead(request, monkeypatch):
    """With a lane, which works at once, batches are put while the one before is computed."""
    is_ahead = request.param == "ahead"
    monkeypatch.setattr(dataloading, "lane_of", lambda device: HostLane() if is_ahead else None)
    return is_ahead


@pytest.fixture
def store():
    torch.manual_seed(0)
    with dgl_mgpu.GlobalStore.from_dgl(graph(), device="cpu") as made:
        yield made


def loader_of(store, sampler=None, size=32, count=9, **options):
    sampler = sampler or NeighborSampler([3, 4], **FEATURES)
    return DataLoader(store.graph, torch.arange(size * count), sampler, batch_size=size, **options)


def assert_same_training(begin, loader, model, take, seeds=32, epochs=2):
    """Steps over a loader have the results of its blocks, in epochs that ``begin`` has begin alike;
    gives how many were put in place."""
    placed = 0
    for epoch in range(epochs):
        begin(epoch)
        expected = [(computed(model, blocks, seeds), blocks) for *_, blocks in loader]
        begin(epoch)
        model.zero_grad()
        for batch, (results, blocks) in zip(take.batches(loader), expected, strict=True):
            placed += isinstance(batch, PlacedBatch)
            assert torch.equal(take.labels(batch), blocks[-1].dstdata["label"])
            loss = take(batch)
            gradients = [each.grad for each in model.parameters()]
            assert_close([loss, take.outputs, *gradients], results)
    return placed


@pytest.mark.parametrize("name", ["mean", "gcn", "gat"])
def test_batches_are_those_of_the_loader(name, store, ahead, capturing):  # noqa: F811
    model = MODELS[name]()
    take = step_of(model)
    loader = loader_of(store)
    # But those before the capture; ahead, the one that was begun by then is a block, too.
    placed = assert_same_training(store.graph.set_epoch, loader, model, take)
    assert placed >= 18 - len(capturing) // 2 * (step.WARM_UP + 2)
    assert len({id(each.room) for each in take._places}) == 2
    assert all(each.taken() is None for each in take._places)


@pytest.mark.parametrize("features", [{}, FEATURES])
def test_batches_of_a_graph_of_dgls(features, ahead, capturing):  # noqa: F811
    torch.manual_seed(0)
    for name, prob in (("mean", None), ("weighted", "weight")):
        model = MODELS[name]()
        sampler = NeighborSampler([3, 4], prob=prob, **features)
        loader = DataLoader(graph(), torch.arange(288), sampler, batch_size=32)
        assert assert_same_training(dgl.seed, loader, model, step_of(model))


def test_weights_that_dgl_alone_samples_by(ahead, capturing):  # noqa: F811
    """A batch may be sampled by DGL after others were put in place."""
    g = graph()
    take = step_of(MODELS["mean"]())
    loader = DataLoader(g, torch.arange(288), NeighborSampler([3, 4], prob="weight"), batch_size=32)
    kinds = []
    for number, batch in enumerate(take.batches(loader)):
        kinds.append(type(batch))
        assert take(batch).isfinite()
        if number == 6:
            g.edata["weight"][:] = 0.0
    assert PlacedBatch in kinds and kinds[-1] is list


def test_features_of_edges_and_ids(store, ahead, capturing):  # noqa: F811
    model = MODELS["weighted"]()
    read = []

    def forward(blocks):
        ends = blocks[0].srcdata[dgl.NID], blocks[1].dstdata[dgl.NID]
        read.append([*ends, blocks[1].edata[dgl.EID]])
        return model(blocks, blocks[0].srcdata["feat"])

    take = dgl_mgpu.CapturedStep(model, forward, F.cross_entropy)
    loader = loader_of(store, NeighborSampler([3, 4], prefetch_edge_feats=["weight"], **FEATURES))
    store.graph.set_epoch(0)
    blocks_of = [blocks for *_, blocks in loader]
    store.graph.set_epoch(0)
    placed = 0
    for batch, blocks in zip(take.batches(loader), blocks_of, strict=True):
        loss, *_ = computed(model, blocks, 32)
        assert_close([take(batch)], [loss])
        if isinstance(batch, PlacedBatch):
            placed += 1
            seeds = blocks[1].dstdata[dgl.NID]
            expected = blocks[0].srcdata[dgl.NID], seeds, blocks[1].edata[dgl.EID]
            for found, ids in zip(read[-1], expected, strict=True):
                assert torch.equal(found[: len(ids)], ids)
    assert placed


def test_weighted_samples_and_all_neighbours(store, ahead, capturing):  # noqa: F811
    samplers = (
        NeighborSampler([3, 4], prob="weight", **FEATURES),
        NeighborSampler([3, 4], replace=True, **FEATURES),
        MultiLayerFullNeighborSampler(2, **FEATURES),
    )
    for sampler in samplers:
        model = MODELS["mean"]()
        loader = loader_of(store, sampler)
        assert assert_same_training(store.graph.set_epoch, loader, model, step_of(model))


def test_several_types(ahead, capturing):  # noqa: F811
    g = dgl.heterograph(
        {
            ("a", "cites", "a"): tuple(torch.randint(0, 90, (2, 500))),
            ("b", "writes", "a"): (torch.randint(0, 40, (300,)), torch.randint(0, 90, (300,))),
            ("a", "written", "b"): (torch.randint(0, 90, (300,)), torch.randint(0, 40, (300,))),
        },
        num_nodes_dict={"a": 90, "b": 40},
    )
    for ntype in g.ntypes:
        g.nodes[ntype].data["feat"] = torch.randn(g.num_nodes(ntype), 6)
    g.nodes["a"].data["label"] = torch.randint(0, CLASSES, (90,))
    first = HeteroGraphConv({name: SAGEConv(6, 8, "mean") for name in g.etypes})
    last = HeteroGraphConv({name: SAGEConv(8, CLASSES, "mean") for name in g.etypes})
    model = torch.nn.ModuleList([first, last])

    def forward(blocks):
        return last(blocks[1], first(blocks[0], blocks[0].srcdata["feat"]))["a"]

    take = dgl_mgpu.CapturedStep(
        model, forward, F.cross_entropy, lambda blocks: blocks[-1].dstnodes["a"].data["label"]
    )
    features = {"prefetch_node_feats": {"a": ["feat"], "b": ["feat"]}}
    sampler = NeighborSampler([3, 3], prefetch_labels={"a": ["label"]}, **features)
    with dgl_mgpu.GlobalStore.from_dgl(g, device="cpu") as store:
        loader = DataLoader(store.graph, {"a": torch.arange(80)}, sampler, batch_size=10)
        placed = 0
        for epoch in range(2):
            store.graph.set_epoch(epoch)
            expected = [blocks for *_, blocks in loader]
            store.graph.set_epoch(epoch)
            for batch, blocks in zip(take.batches(loader), expected, strict=True):
                placed += isinstance(batch, PlacedBatch)
                labels = blocks[-1].dstnodes["a"].data["label"]
                assert torch.equal(take.labels(batch), labels)
                assert_close([take(batch)], [F.cross_entropy(forward(blocks), labels).detach()])
    assert placed


def test_a_last_batch_and_larger_ones_come_as_blocks(store, ahead, capturing):  # noqa: F811
    model = MODELS["mean"]()
    take = step_of(model)
    sampler = NeighborSampler([1, 1], **FEATURES)
    loader = DataLoader(store.graph, torch.arange(300), sampler, batch_size=32)
    for batch in take.batches(loader):
        kind = type(batch)
        take(batch)
    assert kind is list and len(capturing) == 2
    larger = loader_of(store, NeighborSampler([9, 9], **FEATURES))
    assert assert_same_training(store.graph.set_epoch, larger, model, take)
    assert len(capturing) in (4, 6)


def test_a_batch_whose_place_was_given_on_is_refused(store, ahead, capturing):  # noqa: F811
    take = step_of(MODELS["mean"]())
    kept = []
    with pytest.raises(InvalidInputError, match="given to another"):
        for batch in take.batches(loader_of(store)):
            take(batch)
            if isinstance(batch, PlacedBatch):
                kept.append(batch)
                take(kept[0])


def test_a_loop_that_is_left_gives_its_places_back(store, ahead, capturing):  # noqa: F811
    model = MODELS["mean"]()
    take = step_of(model)
    for _ in range(4):
        for number, batch in enumerate(take.batches(loader_of(store))):
            take(batch)
            if number == 6:
                break
        del batch
    assert all(each.taken() is None for each in take._places)
    assert len(capturing) <= 4


def test_two_loops_and_blocks_in_turns(store, ahead, capturing):  # noqa: F811
    model = MODELS["mean"]()
    take = step_of(model)
    loaders = [loader_of(store), loader_of(store, NeighborSampler([3, 4], **FEATURES))]
    store.graph.set_epoch(0)
    batches = [blocks for *_, blocks in loaders[0]]
    loops = []
    for loader in loaders:
        store.graph.set_epoch(0)
        loops.append(take.batches(loader))
    for blocks, *both in zip(batches, *loops, strict=True):
        loss, *_ = computed(model, blocks, 32)
        for batch in (*both, blocks):
            assert_close([take(batch)], [loss])


def test_a_model_that_is_switched_after_a_batch_was_put(store, ahead, capturing):  # noqa: F811
    model = MODELS["mean"]()
    model.drop = torch.nn.Dropout(0.9)
    take = dgl_mgpu.CapturedStep(
        model,
        lambda blocks: model(blocks, model.drop(blocks[0].srcdata["feat"])),
        F.cross_entropy,
    )
    loader = loader_of(store)
    store.graph.set_epoch(0)
    expected = [computed(model, blocks, 32)[0] for *_, blocks in loader]
    store.graph.set_epoch(0)
    placed = 0
    for batch, loss in zip(take.batches(loader), expected, strict=True):
        if isinstance(batch, PlacedBatch):
            placed += 1
            assert not torch.allclose(take(batch), loss)
            model.eval()
        found = take(batch)
        if not model.training:
            assert_close([found], [loss])
        model.train()
    assert placed


def test_other_loaders_give_blocks(store, capturing):  # noqa: F811
    take = step_of(MODELS["mean"]())

    class Own(NeighborSampler):
        pass

    for batch in take.batches(loader_of(store)):
        take(batch)
    assert capturing

    for loader in (
        loader_of(store, Own([3, 4], **FEATURES)),
        loader_of(store, NeighborSampler([3, 4], edge_dir="in", output_device="cpu", **FEATURES)),
    ):
        assert all(isinstance(batch, list) for batch in take.batches(loader))


def test_without_capturing_a_loader_is_as_it_is(store):
    take = step_of(MODELS["mean"]())
    assert all(isinstance(batch, list) for batch in take.batches(loader_of(store)))
    assert not take._places

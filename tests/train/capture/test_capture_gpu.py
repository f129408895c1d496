"""Training steps captured as CUDA graphs."""

from __future__ import annotations

import copy
import importlib.util

import dgl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler

import dgl_mgpu
from dgl_mgpu.errors import UnavailableError
from dgl_mgpu.train.capture.graph_slots import SlotBatch
from dgl_mgpu.train.capture.step import NUM_SLOTS
from dgl_mgpu.train.launch.launch import launch
from tests.train.capture.test_capture import MODELS, Model, assert_close, computed, graph, step_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)


def loader_of(g, fanouts=(3, 4), size=32, count=9):
    seeds = torch.randperm(g.num_nodes(), device=g.device)[: size * count].to(g.idtype)
    return DataLoader(g, seeds, NeighborSampler([*fanouts]), batch_size=size)


def on_gpu(idtype=torch.int32):
    return graph(idtype).to("cuda")


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_steps_that_are_not_captured(name, idtype):
    torch.manual_seed(0)
    model = MODELS[name]().cuda()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, twin)]
    take = step_of(model)
    for *_, blocks in loader_of(on_gpu(idtype)):
        loss = take(blocks)
        optimizers[0].step()
        expected = computed(twin, blocks, 32)
        optimizers[1].step()
        assert_close([loss, take.outputs], expected[:2])
    assert take._slots
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_over_a_store_and_with_others_captured_beside():
    g = graph(torch.int32)
    store = dgl_mgpu.GlobalStore.from_dgl(g, device="cuda")
    features = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
    models = [MODELS["mean"]().cuda(), MODELS["gat"]().cuda()]
    steps = [step_of(model) for model in models]
    seeds = torch.arange(320, device="cuda")
    for _ in range(2):
        loader = DataLoader(
            store.graph, seeds, NeighborSampler([3, 4], **features), batch_size=32, device="cuda"
        )
        for *_, blocks in loader:
            for model, take in zip(models, steps, strict=True):
                loss, outputs, *gradients = computed(model, blocks, 32)
                assert_close([take(blocks), take.outputs], [loss, outputs])
                assert_close([each.grad for each in model.parameters()], gradients)
    assert all(take._slots for take in steps)
    store.close()


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["mean", "gcn", "gat"])
def test_in_place_training_is_that_of_the_loaders_blocks(name, idtype):
    torch.manual_seed(0)
    store = dgl_mgpu.GlobalStore.from_dgl(graph(idtype), device="cuda")
    features = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
    seeds = torch.randperm(400)[:384]
    loader = DataLoader(
        store.graph, seeds, NeighborSampler([3, 4], **features), batch_size=32, device="cuda"
    )
    model = MODELS[name]().cuda()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, twin)]
    take = step_of(model)
    placed = 0
    for epoch in range(4):
        store.graph.set_epoch(epoch)
        expected = []
        for *_, blocks in loader:
            expected.append((computed(twin, blocks, 32)[:2], blocks[-1].dstdata["label"]))
            optimizers[1].step()
        store.graph.set_epoch(epoch)
        for batch, (results, labels) in zip(take.batches(loader), expected, strict=True):
            placed += isinstance(batch, SlotBatch)
            loss = take(batch)
            assert torch.equal(take.labels, labels)
            optimizers[0].step()
            assert_close([loss, take.outputs], results)
    assert placed >= 36
    store.close()


def test_a_place_is_not_written_to_while_a_slow_model_reads_it():
    """The side stream is done long before the model, which reads its blocks late."""
    torch.manual_seed(0)
    store = dgl_mgpu.GlobalStore.from_dgl(graph(torch.int32), device="cuda")
    features = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
    sampler = NeighborSampler([3, 4], **features)
    loader = DataLoader(store.graph, torch.arange(384), sampler, batch_size=32, device="cuda")
    model = MODELS["mean"]().cuda()

    def slow(blocks):
        torch.cuda._sleep(20_000_000)
        return model(blocks, blocks[0].srcdata["feat"])

    take = dgl_mgpu.CapturedStep(model, slow, F.cross_entropy)
    for epoch in range(3):
        store.graph.set_epoch(epoch)
        expected = [computed(model, blocks, 32)[0] for *_, blocks in loader]
        store.graph.set_epoch(epoch)
        assert_close([take(batch) for batch in take.batches(loader)], expected)
    assert len(take._slots) == NUM_SLOTS
    store.close()


def test_a_larger_batch_is_captured_anew_and_memory_comes_back():
    g = on_gpu()
    model = MODELS["mean"]().cuda()
    take = step_of(model)
    small, large = [[b for *_, b in loader_of(g, fanouts)] for fanouts in ((1, 1), (9, 9))]
    for blocks in (*small, *large, *small):
        loss, *_ = computed(model, blocks, 32)
        assert_close([take(blocks)], [loss])
    del take, blocks
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(5):
        take = step_of(model)
        for blocks in small:
            take(blocks)
        del take, blocks
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (4 << 20)


def test_dropout_draws_anew_each_time():
    class Dropping(Model):
        def forward(self, blocks, x):
            return super().forward(blocks, F.dropout(x, 0.5))

    layers = MODELS["mean"]().layers
    model = Dropping(*layers).cuda()
    take = step_of(model)
    *_, blocks = next(iter(loader_of(on_gpu())))
    losses = [take(blocks).item() for _ in range(12)]
    assert len(set(losses)) == 12


def test_what_waits_for_the_gpu_is_refused_with_a_hint():
    model = MODELS["mean"]().cuda()

    def forward(blocks):
        features = blocks[0].srcdata["feat"]
        return model(blocks, features) * float(features[0, 0])

    waits = dgl_mgpu.CapturedStep(model, forward, F.cross_entropy)
    g = on_gpu()
    with pytest.raises(UnavailableError, match=r"CUDA graph.*without capturing"):
        for *_, blocks in loader_of(g):
            waits(blocks)
    # And all goes on afterwards.
    other = step_of(model)
    for *_, blocks in loader_of(g):
        loss, *_ = computed(model, blocks, 32)
        assert_close([other(blocks)], [loss])
    assert other._slots


def train_on_rank():
    torch.cuda.set_device(dist.get_rank())
    torch.manual_seed(0)
    model = MODELS["mean"]().cuda()
    twin = copy.deepcopy(model)
    take = step_of(model)
    batches = [blocks for *_, blocks in loader_of(on_gpu(), count=9)]
    for number in range(8):
        computed(twin, batches[(number + dist.get_rank()) % 9], 32)
        for parameter in twin.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        take(batches[(number + dist.get_rank()) % 9])
        assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert take._slots
    take.without_batch() if dist.get_rank() else take(batches[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_are_the_mean_over_gpus():
    launch(train_on_rank, 2)


class Dropping(Model):
    """With dropout, whose draws are as many as there are rows."""

    def __init__(self):
        super().__init__(*MODELS["mean"]().layers)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, blocks, x):
        return super().forward(blocks, self.drop(x))


@pytest.mark.parametrize("prefetch", ["0", "1"])
def test_what_is_gone_on_with_from_a_state_is_the_same_bit_for_bit(prefetch, monkeypatch):
    monkeypatch.setenv("DGL_MGPU_PREFETCH", prefetch)
    torch.manual_seed(0)
    g = on_gpu()
    sampler = NeighborSampler([-1, -1], prefetch_node_feats=["feat"], prefetch_labels=["label"])

    def steps(model, take, epochs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in epochs:
            # Later nodes have more neighbours, and there are some more in a last mini-batch.
            seeds = g.in_degrees().argsort()[:300].to(g.idtype)
            dgl.seed(epoch)
            for batch in take.batches(DataLoader(g, seeds, sampler, batch_size=32)):
                yield take(batch)
                optimizer.step()

    model = Dropping().cuda()
    take = step_of(model)
    list(steps(model, take, range(2)))
    other = Dropping().cuda()
    other.load_state_dict(model.state_dict())
    goes_on = step_of(other)
    goes_on.load_state_dict(take.state_dict())
    drawn = torch.cuda.get_rng_state()
    expected = list(steps(model, take, range(2, 4)))
    torch.cuda.set_rng_state(drawn)
    found = list(steps(other, goes_on, range(2, 4)))
    assert goes_on._slots and torch.equal(torch.stack(found), torch.stack(expected))
    for one, its in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, its)


def test_a_model_that_waits_for_the_gpu_is_computed_as_always_unless_captures_are_required():
    class Looks(Model):
        def forward(self, blocks, x):
            return super().forward(blocks, x / x.abs().max().item())

    torch.manual_seed(0)
    model = Looks(*MODELS["mean"]().layers).cuda()
    take = dgl_mgpu.CapturedStep(
        model,
        lambda blocks: model(blocks, blocks[0].srcdata["feat"]),
        F.cross_entropy,
        required=False,
    )
    with pytest.warns(UserWarning, match="From here on no training step is a CUDA graph"):
        for *_, blocks in loader_of(on_gpu()):
            loss = take(blocks)
            assert_close([loss], computed(model, blocks, 32)[:1])
    assert not take._slots

"""What is learned by models that are captured is what eager runs learn."""

from __future__ import annotations

import contextlib
import copy
import gc
import io

import dgl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl.dataloading import (
    DataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    as_edge_prediction_sampler,
    negative_sampler,
)
from dgl.nn import GraphConv, HeteroGraphConv, SAGEConv
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgl_mgpu
from dgl_mgpu.capture import calls
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from tests.capture.scripts import (
    CLASSES,
    MODELS,
    LinkPredictor,
    Model,
    assert_same_training,
    graph,
    here,
    kinds_of,
    loader_of,
    made,
    plain_step,
    replays_of,
    seeded,
    train,
)


@pytest.mark.parametrize("name", MODELS)
def test_a_training_loop_learns_what_it_learns_eagerly(name, capturing):
    """The last mini-batch of a pass is smaller, and in the same graphs."""
    model = assert_same_training(MODELS[name])
    assert len(kinds_of(model)) == 1


@pytest.mark.parametrize("is_tensor_backed", [False, True])
def test_on_a_cpu_nothing_happens(is_tensor_backed):
    with tensor_backed_graphs() if is_tensor_backed else contextlib.nullcontext():
        g = dgl.rand_graph(300, 2400)
        g.ndata["feat"] = torch.randn(300, 6)
        calls.capture_models()
        try:
            model = MODELS["mean"]()
            seeds = torch.arange(300)
            for *_, blocks in DataLoader(g, seeds, NeighborSampler([3, 4]), batch_size=32):
                model(blocks, blocks[0].srcdata["feat"]).sum().backward()
            assert not kinds_of(model)
        finally:
            calls.capture_models(False)
    assert nn.Module.__call__ is calls._torchs_call


def test_it_is_one_call_in_a_program():
    dgl_mgpu.capture_models()
    assert nn.Module.__call__ is calls._call
    dgl_mgpu.capture_models(False)
    assert nn.Module.__call__ is calls._torchs_call


def test_evaluation_without_gradients_has_graphs_of_its_own(capturing):
    g, results = graph(), []
    for capture in (False, True):
        _, model = train(MODELS["gat"], g, capture, plain_step)
        model.eval()
        with torch.no_grad():
            results.append(torch.cat([model(b, b[0].srcdata["feat"]) for *_, b in loader_of(g)]))
    assert [kind.graphs is not None for kind in kinds_of(model)] == [True, True]
    assert not results[1].requires_grad
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


def test_gradients_accumulate_over_mini_batches(capturing):
    counts = {}

    def step(model, optimizer, blocks):
        loss = F.cross_entropy(
            model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]
        )
        (loss / 3).backward()
        counts[model] = counts.get(model, 0) + 1
        if counts[model] % 3 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    assert_same_training(MODELS["mean"], step)


def test_gradients_that_a_script_keeps_are_not_overwritten(capturing):
    kept = []

    def step(model, optimizer, blocks):
        loss = plain_step(model, optimizer, blocks)
        gradients = [it.grad for it in model.parameters()]
        kept.append((gradients, [it.clone() for it in gradients]))
        return loss

    assert_same_training(MODELS["mean"], step)
    for now, then in kept:
        for one, other in zip(now, then, strict=True):
            assert torch.equal(one, other)


def test_outputs_that_a_script_keeps_are_not_overwritten(capturing):
    model = made("mean")
    kept = []
    with torch.no_grad():
        for *_, blocks in loader_of(graph()):
            output = model(blocks, blocks[0].srcdata["feat"])
            kept.append((output, output.clone(), len(blocks[-1].dstdata["label"])))
    assert replays_of(model) > 2
    for output, copy_, rows in kept:
        assert len(output) == rows
        assert torch.equal(output, copy_)


def test_two_calls_before_a_backward_pass(capturing):
    """The second one is eager, as the graphs' memory holds the first one's activations."""
    before = []

    def step(model, optimizer, blocks):
        before[:] = [*before[-1:], blocks]
        scores = [model(b, b[0].srcdata["feat"]) for b in before]
        loss = sum(
            F.cross_entropy(y, b[-1].dstdata["label"]) for y, b in zip(scores, before, strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    expected, _ = train(MODELS["mean"], g := graph(), False, step)
    before.clear()
    losses, model = train(MODELS["mean"], g, True, step)
    assert replays_of(model) > 5
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_two_losses_of_one_call_have_a_backward_pass_each(capturing):
    def step(model, optimizer, blocks):
        scores = model(blocks, blocks[0].srcdata["feat"])
        optimizer.zero_grad()
        loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
        loss.backward(retain_graph=True)
        (0.1 * scores.square().mean()).backward()
        optimizer.step()
        return loss

    assert_same_training(MODELS["gat"], step)


class OfTypes(nn.Module):
    def __init__(self, etypes):
        super().__init__()
        self.first = HeteroGraphConv({etype: GraphConv(6, 8) for etype in etypes})
        self.second = HeteroGraphConv({etype: SAGEConv(8, CLASSES, "mean") for etype in etypes})

    def forward(self, blocks, inputs):
        h = self.first(blocks[0], inputs)
        return self.second(blocks[1], {k: torch.relu(v) for k, v in h.items()})


def hetero_graph():
    seeded(3)
    with tensor_backed_graphs():
        g = dgl.heterograph(
            {
                ("user", "rates", "item"): (
                    torch.randint(0, 80, (700,)),
                    torch.randint(0, 60, (700,)),
                ),
                ("item", "rated-by", "user"): (
                    torch.randint(0, 60, (800,)),
                    torch.randint(0, 80, (800,)),
                ),
                ("user", "knows", "user"): (torch.randint(0, 80, (500,)), torch.arange(500) % 80),
            },
            num_nodes_dict={"user": 80, "item": 60},
        )
        for ntype in g.ntypes:
            g.nodes[ntype].data["feat"] = torch.randn(g.num_nodes(ntype), 6)
            g.nodes[ntype].data["label"] = torch.randint(0, CLASSES, (g.num_nodes(ntype),))
        return g if here.device == "cpu" else g.to(here.device)


def test_blocks_of_several_types(capturing):
    g = hetero_graph()
    results = []
    for capture in (False, True):
        calls.capture_models(capture)
        seeded()
        model = OfTypes(["rates", "rated-by", "knows"]).to(here.device)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        seeds = {ntype: g.nodes(ntype) for ntype in g.ntypes}
        losses = []
        for _ in range(3):
            for *_, blocks in DataLoader(
                g, seeds, MultiLayerFullNeighborSampler(2), batch_size=20, shuffle=True
            ):
                outputs = model(blocks, blocks[0].srcdata["feat"])
                labels = blocks[-1].dstdata["label"]
                loss = sum(
                    F.cross_entropy(outputs[ntype], labels[ntype], reduction="sum")
                    for ntype in outputs
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss))
        results.append(torch.tensor(losses))
    assert replays_of(model) > 5
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_link_prediction_with_graphs_of_pairs(capturing):
    g = graph()
    results = []
    for capture in (False, True):
        calls.capture_models(capture)
        seeded()
        model = LinkPredictor().to(here.device)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        sampler = as_edge_prediction_sampler(
            NeighborSampler([3, 4]), negative_sampler=negative_sampler.Uniform(2)
        )
        losses = []
        for _, pairs, negatives, blocks in DataLoader(
            g, torch.arange(600, device=here.device), sampler, batch_size=32, shuffle=True
        ):
            true, false = model(pairs, negatives, blocks, blocks[0].srcdata["feat"])
            assert len(true) == pairs.num_edges()
            loss = F.softplus(-true).mean() + F.softplus(false).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        results.append(torch.tensor(losses))
    assert replays_of(model) > 5
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_inputs_that_are_learned_get_gradients(capturing):
    g = graph()
    results = []
    for capture in (False, True):
        calls.capture_models(capture)
        seeded()
        embedding, model = nn.Embedding(g.num_nodes(), 6).to(here.device), made("mean")
        optimizer = torch.optim.SGD([*embedding.parameters(), *model.parameters()], 0.5)
        for _ in range(2):
            for inputs, _, blocks in loader_of(g):
                loss = F.cross_entropy(
                    model(blocks, embedding(inputs)), blocks[-1].dstdata["label"]
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        results.append(embedding.weight.detach())
    assert replays_of(model) > 5
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_several_models_and_loaders_in_turn(capturing):
    g, results = graph(), []
    for capture in (False, True):
        calls.capture_models(capture)
        seeded()
        models = [made("mean"), made("gcn")]
        losses = []
        for _ in range(2):
            loaders = loader_of(g), loader_of(g, NeighborSampler([2, 2]), batch_size=24)
            for batches in zip(*loaders, strict=False):
                for model, (*_, blocks) in zip(models, batches, strict=True):
                    loss = F.cross_entropy(
                        model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]
                    )
                    model.zero_grad()
                    loss.backward()
                    losses.append(loss.detach())
        results.append(torch.stack(losses))
    assert all(replays_of(model) > 5 for model in models)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_autocast_is_captured_as_it_is(capturing):
    def step(model, optimizer, blocks):
        with torch.autocast(capturing, torch.bfloat16):
            scores = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    g = graph()
    expected, _ = train(MODELS["mean"], g, False, step)
    losses, model = train(MODELS["mean"], g, True, step)
    assert replays_of(model) > 5
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)


def test_scaled_gradients_under_autocast(capturing):
    scalers = {}

    def step(model, optimizer, blocks):
        scaler = scalers.setdefault(model, torch.amp.GradScaler(capturing, init_scale=2.0**10))
        with torch.autocast(capturing, torch.float16 if capturing == "cuda" else torch.bfloat16):
            scores = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(scores.float(), blocks[-1].dstdata["label"])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    g = graph()
    expected, _ = train(MODELS["mean"], g, False, step)
    losses, model = train(MODELS["mean"], g, True, step)
    assert replays_of(model) > 5
    assert scalers[model].get_scale() == 2.0**10  # no step was skipped
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_data_parallel_training(capturing, one_rank):
    """The module inside is captured; its wrapper averages gradients as always."""
    g, results = graph(), []
    for capture in (False, True):
        losses, model = train(lambda: DistributedDataParallel(made("gat")), g, capture, plain_step)
        results.append(losses)
    assert replays_of(model.module) > 5
    assert not kinds_of(model)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_dropout_is_repeatable_and_was_compared(capturing):
    def make():
        return Model(SAGEConv(6, 8, "mean"), SAGEConv(8, CLASSES, "mean"), dropout=0.5)

    g = graph()
    first, model = train(make, g, True, plain_step)
    assert replays_of(model) > 5
    again, _ = train(make, g, True, plain_step)
    assert torch.equal(first, again)
    model.eval()
    assert not torch.equal(first, train(make, g, False, plain_step)[0])  # other numbers


def test_a_checkpoint_in_mid_run_holds_the_model_alone(capturing):
    g = graph()
    _, model = train(MODELS["mean"], g, True, plain_step)
    file = io.BytesIO()
    torch.save({"model": model.state_dict()}, file)
    file.seek(0)
    other = made("mean")
    other.load_state_dict(torch.load(file, weights_only=True)["model"])
    twin = copy.deepcopy(model)
    for *_, blocks in loader_of(g):
        x = blocks[0].srcdata["feat"]
        expected = model(blocks, x)
        torch.testing.assert_close(other(blocks, x), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(twin(blocks, x), expected, rtol=1e-4, atol=1e-5)


def test_graphs_go_with_their_model(capturing):
    _, model = train(MODELS["mean"], graph(), True, plain_step)
    assert len(calls._models) == 1
    del model
    gc.collect()
    assert len(calls._models) == 0

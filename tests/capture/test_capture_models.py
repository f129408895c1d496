"""Models of scripts that are captured without code; without a GPU, replayed by computing."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import random
import re
import warnings
from types import SimpleNamespace

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl import DGLError
from dgl.dataloading import (
    DataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    as_edge_prediction_sampler,
    negative_sampler,
)
from dgl.nn import GATConv, GATv2Conv, GINConv, GraphConv, HeteroGraphConv, SAGEConv
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgl_mgpu
from dgl_mgpu.capture import calls, check, graphs
from dgl_mgpu.capture import model as captured_model
from dgl_mgpu.capture.call import inside
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from tests.capture.conftest import here

CLASSES = 5


def seeded(seed=0):
    random.seed(seed)
    np.random.seed(seed)
    dgl.seed(seed)
    torch.manual_seed(seed)


def graph(self_loops=True, num_nodes=300, num_edges=2400):
    seeded(7)
    ends = torch.randint(0, num_nodes, (2, num_edges))
    with tensor_backed_graphs():
        g = dgl.graph((ends[0], ends[1]), num_nodes=num_nodes)
        if self_loops:
            g = dgl.add_self_loop(g)
        g.ndata["feat"] = torch.randn(num_nodes, 6)
        g.ndata["label"] = torch.randint(0, CLASSES, (num_nodes,))
        g.edata["weight"] = torch.rand(g.num_edges())
        return g if here.device == "cpu" else g.to(here.device)


class Model(nn.Module):
    def __init__(self, *layers, dropout=0.0, weighted=False):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(dropout)
        self.weighted = weighted
        self.scale = 1.0
        self.options = SimpleNamespace(scale=1.0)
        self.nested = {"scales": [1.0]}

    def forward(self, blocks, x):
        for layer, block in zip(self.layers, blocks, strict=True):
            options = {"edge_weight": block.edata["weight"]} if self.weighted else {}
            x = layer(block, x, **options)
            x = x.mean(1) if x.dim() == 3 and layer is self.layers[-1] else x.flatten(1)
            if layer is not self.layers[-1]:
                x = self.dropout(torch.relu(x))
        return x * self.scale * self.options.scale * self.nested["scales"][0]


MODELS = {
    "mean": lambda: Model(SAGEConv(6, 8, "mean"), SAGEConv(8, CLASSES, "mean")),
    "pool": lambda: Model(SAGEConv(6, 8, "pool"), SAGEConv(8, CLASSES, "gcn")),
    "gcn": lambda: Model(GraphConv(6, 8), GraphConv(8, CLASSES)),
    "gat": lambda: Model(GATConv(6, 4, 2), GATConv(8, CLASSES, 3)),
    "gatv2": lambda: Model(GATv2Conv(6, 4, 2), GATv2Conv(8, CLASSES, 2)),
    "gin": lambda: Model(
        GINConv(nn.Linear(6, 8), "max"), GINConv(nn.Linear(8, CLASSES), "sum", learn_eps=True)
    ),
    "weighted": lambda: Model(
        GraphConv(6, 8, norm="right"), GraphConv(8, CLASSES, norm="none"), weighted=True
    ),
}


def made(name):
    return MODELS[name]().to(here.device)


def loader_of(g, sampler=None, batch_size=32, count=None):
    seeds = torch.arange(g.num_nodes() if count is None else count, device=here.device)
    return DataLoader(
        g, seeds, sampler or NeighborSampler([3, 4]), batch_size=batch_size, shuffle=True
    )


def train(make, g, capture, step, epochs=2, **options):
    """Losses of a script's training loop, and its model."""
    calls.capture_models(capture)
    seeded()
    model = make().to(here.device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(epochs):
        for *_, blocks in loader_of(g, **options):
            losses.append(float(step(model, optimizer, blocks)))
    return torch.tensor(losses), model


def plain_step(model, optimizer, blocks):
    loss = F.cross_entropy(model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def kinds_of(model):
    captured = calls._models.get(model)
    return [] if captured is None else [*captured._kinds.values()]


def replays_of(model):
    return sum(kind.graphs.num_replays for kind in kinds_of(model) if kind.graphs is not None)


def assert_same_training(make, step=plain_step, g=None, **options):
    g = graph() if g is None else g
    expected, eager = train(make, g, False, step, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*kernel by kernel.*")
        losses, model = train(make, g, True, step, **options)
    assert replays_of(model) > 5
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    return model


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


def test_a_backward_pass_after_another_call_is_refused(capturing):
    model, last = made("mean"), None
    with pytest.raises(InvalidInputError, match="holds another call by now"):
        for *_, blocks in loader_of(graph()):
            loss = model(blocks, blocks[0].srcdata["feat"]).sum()
            loss.backward(retain_graph=True)
            if last is not None and replays_of(model) > 3:
                last.backward()
            last = loss


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


class LinkPredictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = MODELS["mean"]()

    @staticmethod
    def scores(pairs, h):
        with pairs.local_scope():
            pairs.ndata["h"] = h
            pairs.apply_edges(dgl.function.u_dot_v("h", "h", "score"))
            return pairs.edata["score"]

    def forward(self, pairs, negatives, blocks, x):
        h = self.encoder(blocks, x)
        return self.scores(pairs, h), self.scores(negatives, h)


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


def freeze(model):
    model.layers[0].fc_neigh.weight.requires_grad_(False)


def replace_parameter(model):
    model.layers[1].fc_neigh.weight = nn.Parameter(torch.ones(CLASSES, 8, device=here.device))


def replace_memory(model):
    model.layers[1].fc_neigh.weight.data = torch.ones(CLASSES, 8, device=here.device)


def scale(model):
    model.scale = 3.0


def change_dropout(model):
    model.dropout.p = 0.9999999


def change_option(model):
    model.options.scale = 3.0


def change_nested(model):
    model.nested["scales"][0] = 3.0


def replace_layer(model):
    model.layers[1] = SAGEConv(8, CLASSES, "mean").to(here.device)


@pytest.mark.parametrize(
    "change",
    [
        freeze,
        replace_parameter,
        replace_memory,
        scale,
        change_option,
        change_nested,
        change_dropout,
        replace_layer,
    ],
)
def test_a_change_of_the_model_is_noticed(change, capturing):
    g = graph()
    batches = [blocks for *_, blocks in loader_of(g)]
    seeded(5)
    model = made("mean")
    for blocks in batches:
        model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    (kind,) = kinds_of(model)
    before = kind.graphs
    assert before is not None
    seeded(6)
    change(model)
    reference = copy.deepcopy(model)
    for blocks in batches:
        x = blocks[0].srcdata["feat"]
        model.zero_grad()
        reference.zero_grad()
        found = model(blocks, x)
        with inside():
            expected = reference(blocks, x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found.square().sum().backward()
        expected.square().sum().backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)
    assert all(kind.graphs is not before for kind in kinds_of(model))


class Normalised(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x) + self.bn(x)[: blocks[-1].num_dst_nodes()].mean()


def with_batch_norm():
    model = Normalised(SAGEConv(6, 8, "mean"), SAGEConv(8, CLASSES, "mean"))
    model.bn = nn.BatchNorm1d(6)
    return model


def with_hook():
    model = made("mean")
    model.layers[0].register_forward_hook(lambda *_: None)
    return model


class Counting(Model):
    count = 0

    def forward(self, blocks, x):
        self.count = self.count + 1
        return super().forward(blocks, x)


class Noting(Model):
    def forward(self, blocks, x):
        self.nested["scales"].append(1.0)
        return super().forward(blocks, x)


class Noisy(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x) * random.choice([1.0, 1.0])


class Writing(Model):
    def forward(self, blocks, x):
        blocks[-1].dstdata["written"] = super().forward(blocks, x)
        return blocks[-1].dstdata["written"]


class Mean(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x).mean()


class MeanOfRows(Model):
    def forward(self, blocks, x):
        h = super().forward(blocks, x)
        return h - h.mean(0)


class Randomised(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x + torch.rand_like(x))


class WithObject(Model):
    def forward(self, blocks, x):
        return {"scores": super().forward(blocks, x), "blocks": object()}["scores"], object()


class InPlace(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x.mul_(1.0))


#: Learned, but by no module.
FOREIGN: dict[torch.device, nn.Parameter] = {}


class FeatureInPlace(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x) + blocks[0].edata["weight"].clamp_(0.5).min() * 0


class WithForeignParameter(Model):
    def forward(self, blocks, x):
        if x.device not in FOREIGN:
            FOREIGN[x.device] = nn.Parameter(torch.ones((), device=x.device))
        return super().forward(blocks, x) * FOREIGN[x.device]


def of(kind):
    return lambda: kind(SAGEConv(6, 8, "mean"), SAGEConv(8, CLASSES, "mean"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_batch_norm, "'bn' is batch normalisation"),
        (with_hook, "'layers.0' has hooks"),
        (of(Counting), "side effects: Counting.count"),
        (of(Noting), r"side effects: Noting\.nested"),
        (of(Noisy), "draws random numbers on the CPU"),
        (of(Writing), "leaves features in its graphs"),
        (of(Mean), "gave other outputs|does not have a row"),
        (of(MeanOfRows), "gave other outputs"),
        (of(Randomised), "random numbers for other things than dropout"),
        (of(WithObject), "part of type object"),
        (of(InPlace), "changes an argument in place"),
        (of(FeatureInPlace), "changes an argument in place"),
        (of(WithForeignParameter), "neither its parameters nor arguments"),
    ],
)
def test_what_cannot_be_captured_runs_as_always_and_says_why(make, reason, capturing):
    g, results = graph(), []
    for capture in (False, True):
        calls.capture_models(capture)
        seeded()
        model = make().to(here.device)
        outputs = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for *_, blocks in loader_of(g):
                output = model(blocks, blocks[0].srcdata["feat"])
                output = output[0] if isinstance(output, tuple) else output
                output.sum().backward()
                outputs.append(output.detach().mean())
        results.append(torch.stack(outputs))
    told = [str(it.message) for it in caught if "kernel by kernel" in str(it.message)]
    assert len([text for text in told if type(model).__name__ in text]) == 1
    assert re.search(reason, told[0])
    assert all(kind.graphs is None for kind in kinds_of(model))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_layers_of_a_model_that_cannot_be_captured_are(capturing):
    model = of(Counting)().to(here.device)
    with pytest.warns(UserWarning, match=r"Counting\.count"):
        for _ in range(2):
            for *_, blocks in loader_of(graph()):
                model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    assert all(replays_of(layer) > 3 for layer in model.layers)


def test_a_replay_that_gives_something_else_is_never_used(capturing, monkeypatch):
    record = graphs.ModelGraphs.replay_forward

    def wrong(self, flat):
        return [output + 1 for output in record(self, flat)]

    monkeypatch.setattr(graphs.ModelGraphs, "replay_forward", wrong)
    g = graph()
    expected, _ = train(MODELS["mean"], g, False, plain_step)
    with pytest.warns(UserWarning, match="a replay gave other outputs"):
        losses, _ = train(MODELS["mean"], g, True, plain_step)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_replays_are_compared_again(capturing, monkeypatch):
    """A change that no guard sees: of a global, as the model reads it."""
    monkeypatch.setattr(captured_model, "FIRST_CHECK", 3)
    factor = [1.0]

    class Global(Model):
        def forward(self, blocks, x):
            return super().forward(blocks, x) * factor[0]

    checked = []
    compare = check.checked_result

    def noted(model, call, its):
        checked.append(its.num_replays)
        return compare(model, call, its)

    monkeypatch.setattr(captured_model, "checked_result", noted)
    model = of(Global)().to(here.device)
    for *_, blocks in loader_of(graph()):
        model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    assert len(checked) == 2
    assert checked[0] == 0


def test_nodes_without_in_edges_are_reported_after_the_call(capturing):
    g = graph(self_loops=True)
    lonely = graph(self_loops=False, num_edges=100)
    model = made("gcn")
    for *_, blocks in loader_of(g):
        model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    assert replays_of(model) > 3
    with pytest.raises(DGLError, match="0-in-degree nodes"):
        for *_, blocks in loader_of(lonely, NeighborSampler([3, 4])):
            model(blocks, blocks[0].srcdata["feat"]).sum().backward()


def test_an_error_of_the_model_is_raised_as_always(capturing):
    class Failing(Model):
        def forward(self, blocks, x):
            if self.training and len(x) and self.scale > 2:
                raise KeyError("mine")
            return super().forward(blocks, x)

    model = of(Failing)().to(here.device)
    batches = [blocks for *_, blocks in loader_of(graph())]
    for blocks in batches:
        model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    model.scale = 3.0
    with pytest.raises(KeyError, match="mine"):
        model(batches[0], batches[0][0].srcdata["feat"])
    model.scale = 1.0
    assert model(batches[0], batches[0][0].srcdata["feat"]).shape == (32, CLASSES)


def test_graphs_go_with_their_model(capturing):
    _, model = train(MODELS["mean"], graph(), True, plain_step)
    assert len(calls._models) == 1
    del model
    gc.collect()
    assert len(calls._models) == 0


@pytest.mark.parametrize("calls_before", [3, 12])
@pytest.mark.parametrize("is_global", [False, True])
def test_hooks_that_are_registered_later_are_called(is_global, calls_before, capturing):
    model, seen = made("mean"), []
    batches = [blocks for *_, blocks in loader_of(graph(), batch_size=20)]
    for blocks in batches[:calls_before]:
        model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    assert all((kind.graphs is None) == (calls_before == 3) for kind in kinds_of(model))
    register = (
        nn.modules.module.register_module_forward_hook
        if is_global
        else model.layers[0].register_forward_hook
    )
    hook = register(lambda module, *_: seen.append(module))
    try:
        with pytest.warns(UserWarning, match="hooks"):
            for blocks in batches[calls_before:]:
                model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    finally:
        hook.remove()
    assert seen.count(model.layers[0]) == len(batches) - calls_before
    assert all(kind.graphs is None for kind in kinds_of(model))


def chain(*counts):
    """Blocks with these numbers of nodes, each source with one edge."""
    blocks = []
    for src, dst in itertools.pairwise(counts):
        sources = torch.arange(src, device=here.device)
        targets = (sources % dst).sort()[0]
        with tensor_backed_graphs():
            blocks.append(
                dgl.create_block((sources, targets), num_src_nodes=src, num_dst_nodes=dst)
            )
    return blocks


class WithHidden(Model):
    def forward(self, blocks, x):
        h = torch.relu(self.layers[0](blocks[0], x))
        return self.layers[1](blocks[1], h), h


def test_an_output_whose_rows_could_be_of_two_sizes(capturing):
    """The sources of both blocks are as many, until they are not."""
    model = of(WithHidden)().to(here.device)
    for hidden in [60] * 8 + [45] * 8:
        scores, h = model(chain(60, hidden, 10), torch.randn(60, 6, device=here.device))
        assert (len(scores), len(h)) == (10, hidden)
        (scores.sum() + h.sum()).backward()
    assert replays_of(model) > 3


def test_a_comparison_of_as_many_pairs_as_there_is_room_for(capturing, monkeypatch):
    """Else an output would seem to have the same number of rows in all calls."""
    monkeypatch.setattr(captured_model, "FIRST_CHECK", 1)
    model = LinkPredictor().to(here.device)

    def scores(count):
        ends = torch.randint(0, 10, (2, count), device=here.device)
        with tensor_backed_graphs():
            pairs = dgl.graph((ends[0], ends[1]), num_nodes=10)
        found = model(pairs, pairs, chain(40, 20, 10), torch.randn(40, 6, device=here.device))
        assert [*map(len, found)] == [count, count]
        sum(found).sum().backward()

    for _ in range(5):
        scores(20)
    (kind,) = kinds_of(model)
    scores(kind.graphs._buffers.sizes.pairs[0][0])
    scores(20)


def test_a_parameter_that_changes_before_the_backward_pass_is_an_error(capturing):
    """As without capture; a replay would read the new values."""
    model = made("mean")
    batches = [blocks for *_, blocks in loader_of(graph())]
    for blocks in batches:
        model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    loss = model(batches[0], batches[0][0].srcdata["feat"]).sum()
    assert replays_of(model) > 3
    with torch.no_grad():
        model.layers[1].fc_neigh.weight.mul_(2)
    with pytest.raises(InvalidInputError, match="changed in place after the forward pass"):
        loss.backward()


class WithMask(Model):
    def forward(self, blocks, x):
        scores = super().forward(blocks, x)
        return scores * 3 if "mask" in blocks[-1].dstdata else scores


def test_a_feature_that_some_mini_batches_have(capturing):
    counts = {}

    def step(model, optimizer, blocks):
        counts[model] = counts.get(model, 0) + 1
        if counts[model] % 10 > 6:
            blocks[-1].dstdata["mask"] = torch.ones(blocks[-1].num_dst_nodes(), device=here.device)
        return plain_step(model, optimizer, blocks)

    assert_same_training(of(WithMask), step, epochs=4)


class Squeezing(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x).squeeze()


#: Sizes of blocks whose first one has none.
NO_EDGES = (30, 30, 10)


class SkippingEmpty(Model):
    def forward(self, blocks, x):
        scores = super().forward(blocks, x)
        return scores if blocks[0].num_edges() else scores + 1


@pytest.mark.parametrize(("kind", "rare"), [(Squeezing, (60, 30, 1)), (SkippingEmpty, NO_EDGES)])
def test_mini_batches_with_nothing_or_one_of_something(kind, rare, capturing):
    model = of(kind)().to(here.device)
    for sizes in [(60, 30, 10)] * 8 + [rare, (60, 30, 10)]:
        blocks, x = chain(*sizes), torch.randn(sizes[0], 6, device=here.device)
        if sizes == NO_EDGES:
            indptr = torch.zeros(sizes[1] + 1, dtype=torch.int64, device=here.device)
            with tensor_backed_graphs():
                csc = "csc", (indptr, indptr[:0], indptr[:0])
                blocks[0] = dgl.create_block(csc, num_src_nodes=30, num_dst_nodes=30)
        with inside(), torch.no_grad():
            expected = model(blocks, x)
        found = model(blocks, x)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-5)
        found.sum().backward()
    assert replays_of(model) > 3


def test_a_model_that_is_compiled_in_place_stays_so(capturing):
    model, compiled = made("mean"), []
    model._compiled_call_impl = lambda *args: (
        compiled.append(model._call_impl(*args)) or compiled[-1]
    )
    with pytest.warns(UserWarning, match="it is compiled"):
        for *_, blocks in loader_of(graph()):
            model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    assert len(compiled) == 10
    assert all(kind.graphs is None for kind in kinds_of(model))

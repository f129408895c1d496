"""What cannot be captured runs as always, and one warning says why."""

from __future__ import annotations

import gc
import random
import re
import warnings
from types import SimpleNamespace

import dgl
import numpy as np
import pytest
import torch
from dgl import DGLError
from dgl.dataloading import (
    DataLoader,
    NeighborSampler,
    as_edge_prediction_sampler,
    negative_sampler,
)
from dgl.nn import GINConv, SAGEConv
from torch import nn

from dgl_mgpu.capture import calls, check, graphs
from dgl_mgpu.capture.call import NotCapturable, inside
from dgl_mgpu.capture.cuda_graph import captured
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from tests.capture.conftest import needs_gpu
from tests.capture.scripts import (
    CLASSES,
    HOOKS,
    MODELS,
    LinkPredictor,
    Model,
    Normalised,
    graph,
    here,
    kinds_of,
    loader_of,
    made,
    of,
    plain_step,
    replays_of,
    run,
    seeded,
    train,
    two_batches,
)


def with_batch_norm():
    return of(Normalised)()


def with_batch_norm_of_batches():
    """Which does not keep statistics, and so looks at the mini-batch in evaluation as well."""
    layers = SAGEConv(6, 8, "mean"), SAGEConv(8, CLASSES, "mean")
    return Normalised(*layers, track_running_stats=False).eval()


def with_hook(kind):
    def make():
        model = made("mean")
        getattr(model.layers[0], f"register_{kind}")(lambda *_: None)
        return model

    return make


def with_hook_of_parameter():
    model = made("mean")
    model.layers[0].fc_neigh.weight.register_hook(lambda gradient: None)
    return model


def with_scripted_layer():
    return Model(GINConv(torch.jit.script(nn.Linear(6, 8))), GINConv(nn.Linear(8, CLASSES)))


def with_compiled_layer():
    layer = torch.compile(nn.Linear(6, 8))
    layer.forward = layer._orig_mod.forward  # to compile it would take seconds
    return Model(GINConv(layer), GINConv(nn.Linear(8, CLASSES)))


class Counting(Model):
    count = 0

    def forward(self, blocks, x):
        self.count = self.count + 1
        return super().forward(blocks, x)


class Noting(Model):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.nested = {"sizes": []}

    def forward(self, blocks, x):
        self.nested["sizes"].append(len(x))
        return super().forward(blocks, x)


class Averaging(Model):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, blocks, x):
        self.average.lerp_(x.mean(0), 0.1)
        return super().forward(blocks, x)


class Noisy(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x) * random.choice([1.0, 1.0])


class NoisyByNumPy(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x) * np.random.choice([1.0, 1.0])


class NoisyByTorch(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x) * torch.rand(()).ceil()


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


class FeatureInPlace(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x) + blocks[0].edata["weight"].clamp_(0.5).min() * 0


#: Learned, but by no module.
FOREIGN: dict[torch.device, nn.Parameter] = {}


class WithForeignParameter(Model):
    def forward(self, blocks, x):
        if x.device not in FOREIGN:
            FOREIGN[x.device] = nn.Parameter(torch.ones((), device=x.device))
        return super().forward(blocks, x) * FOREIGN[x.device]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_batch_norm, "'norm' is batch normalisation"),
        (with_batch_norm_of_batches, "'norm' is batch normalisation"),
        *((with_hook(kind), r"'layers\.0' has hooks") for kind in HOOKS),
        (with_hook_of_parameter, r"a parameter of 'layers\.0\.fc_neigh' has hooks"),
        (with_scripted_layer, r"'layers\.0\.apply_func' is compiled"),
        (with_compiled_layer, r"'layers\.0\.apply_func' is compiled"),
        (of(Counting), "side effects: Counting.count"),
        (of(Noting), r"side effects: Noting\.nested"),
        (of(Averaging), "its forward pass changes a buffer"),
        (of(Noisy), "draws random numbers on the CPU"),
        (of(NoisyByNumPy), "draws random numbers on the CPU"),
        # On a CPU dropout draws from the same generator.
        (of(NoisyByTorch), "draws random numbers on the CPU|for other things than dropout"),
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


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Averaging, "changes a buffer"),
        (InPlace, "changes an argument in place"),
        (Writing, "leaves features in its graphs"),
        (Noisy, "draws random numbers on the CPU"),
        (NoisyByNumPy, "draws random numbers on the CPU"),
    ],
)
def test_side_effects_are_noticed_in_the_first_call(kind, reason, capturing):
    model = of(kind)().to(here.device)
    with pytest.warns(UserWarning, match=reason):
        run(model, two_batches()[:1])


class Remembering(Model):
    """As `dgl.nn.RelGraphConv`, which keeps an argument in an attribute that it had not before."""

    def forward(self, blocks, x):
        self.num_blocks = len(blocks)
        return super().forward(blocks, x)


def test_an_attribute_that_all_calls_set_to_the_same_is_no_side_effect(capturing):
    model = of(Remembering)().to(here.device)
    for *_, blocks in loader_of(graph()):
        model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    assert replays_of(model) > 3


class LeavingScores(LinkPredictor):
    def forward(self, pairs, negatives, blocks, x):
        true, false = super().forward(pairs, negatives, blocks, x)
        negatives.edata["score"] = false
        return true, false


def test_features_left_in_a_graph_of_pairs_are_noticed(capturing):
    model = LeavingScores().to(here.device)
    sampler = as_edge_prediction_sampler(
        NeighborSampler([3, 4]), negative_sampler=negative_sampler.Uniform(2)
    )
    seeds = torch.arange(32, device=here.device)
    ((_, *graphs_, blocks),) = DataLoader(graph(), seeds, sampler, batch_size=32)
    with pytest.warns(UserWarning, match="leaves features in its graphs"):
        model(*graphs_, blocks, blocks[0].srcdata["feat"])


def test_pair_graphs_of_another_type_of_nodes_are_refused_once(capturing):
    model = LinkPredictor().to(here.device)
    sampler = as_edge_prediction_sampler(
        NeighborSampler([3, 4]), negative_sampler=negative_sampler.Uniform(2)
    )
    loader = DataLoader(graph(), torch.arange(90, device=here.device), sampler, batch_size=30)
    with pytest.warns(UserWarning, match=r"a graph has \d+ 'item' nodes, .* \d+ '_N' dest") as told:
        for _, *pairs, blocks in loader:
            ends = [it.edges() for it in pairs]
            number = pairs[0].num_nodes()
            with tensor_backed_graphs():
                graphs_ = [
                    dgl.heterograph({("item", "to", "item"): edges}, {"item": number})
                    for edges in ends
                ]
            model(*graphs_, blocks, blocks[0].srcdata["feat"])
    assert len({str(it.message) for it in told if "LinkPredictor" in str(it.message)}) == 1


class WithSparseEmbedding(Model):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.embedding = nn.Embedding(300, 6, sparse=True)

    def forward(self, blocks, x):
        return super().forward(blocks, x + self.embedding(blocks[0].srcdata[dgl.NID]))


def test_sparse_gradients_are_refused(capturing):
    model = of(WithSparseEmbedding)().to(here.device)
    with pytest.warns(UserWarning, match=r"the gradient of embedding\.weight is sparse"):
        for *_, blocks in loader_of(graph()):
            model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    assert model.embedding.weight.grad.is_sparse
    assert not replays_of(model)


def test_a_comparison_that_fails_does_not_end_the_call(capturing, monkeypatch):
    def failing(*args):
        raise RuntimeError("no such kernel\nfor this GPU")

    monkeypatch.setattr(graphs.ModelGraphs, "replayed", failing)
    expected, _ = train(MODELS["mean"], graph(), False, plain_step)
    with pytest.warns(UserWarning, match="cannot be compared with the eager passes: no such kern"):
        losses, _ = train(MODELS["mean"], graph(), True, plain_step)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


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


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", check._TOLERANCE)
def test_numbers_beside_infinite_and_undefined_ones_are_compared(dtype):
    tolerance = check._TOLERANCE[dtype]

    def numbers(last):
        return torch.tensor([INF, -INF, NAN, last], dtype=dtype)

    assert check._is_close(numbers(1.0), numbers(1.0))
    assert check._is_close(numbers(1.0), numbers(1 + tolerance / 2))
    assert not check._is_close(numbers(1.0), numbers(1 + 3 * tolerance))


@pytest.mark.parametrize(
    ("one", "other"), [(INF, -INF), (INF, NAN), (INF, 1e30), (-INF, 0.0), (NAN, 0.0)]
)
def test_infinite_and_undefined_numbers_must_be_the_same(one, other):
    numbers = [torch.tensor([it, 1.0]) for it in (one, other)]
    for is_close in (check._is_close, check._is_close_as_vector):
        assert not is_close(*numbers)
        assert not is_close(*reversed(numbers))
        assert all(is_close(it, it.clone()) for it in numbers)


def test_gradients_may_jump_in_some_elements_and_not_in_all():
    """As where ReLU's input is rounded to the other side of zero."""
    gradient = torch.randn(1000, 50, generator=torch.Generator().manual_seed(0))
    jumped = gradient.clone()
    jumped[7, 3] += 0.1
    assert not check._is_close(jumped, gradient)
    assert check._is_close_as_vector(jumped, gradient)
    assert not check._is_close_as_vector(gradient * 1.01, gradient)
    assert not check._is_close_as_vector(gradient[:-1], gradient)
    assert not check._is_close_as_vector(gradient.double(), gradient)


def test_gradients_of_what_cancels_may_be_as_far_apart_as_rounding_brings_them():
    """As those of attention's destinations, whose softmax does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    x, start = (torch.randn(1000, width, generator=generator) for width in (8, 1))
    weight = torch.randn(8, 1, generator=generator, requires_grad=True)
    outputs = x @ weight - (x.flip(0) @ weight).flip(0)
    eager = check._Eager(
        SimpleNamespace(differentiated=lambda call: [weight]),
        SimpleNamespace(device=torch.device("cpu")),
        [outputs],
        [start],
    )
    order = torch.randperm(1000, generator=generator)
    other = x[order].T @ start[order] - x.flip(0).T @ start.flip(0)
    (exact,) = eager._gradients
    assert not check._is_close_as_vector(other, exact)
    eager.compare(([outputs], [other]), "a replay")
    for wrong in (other + 1e-2, x.T @ start, None):
        with pytest.raises(NotCapturable, match="a replay gave other gradients"):
            eager.compare(([outputs], [wrong]), "a replay")


class Dividing(Model):
    """Gives infinite numbers of both signs, and undefined ones."""

    def forward(self, blocks, x):
        scores = super().forward(blocks, x)
        return torch.cat([scores, scores / 0, scores * 0 / 0], 1)


def test_a_model_that_gives_infinite_and_undefined_numbers_is_captured(capturing):
    model = of(Dividing)().to(here.device)
    with torch.no_grad():
        for *_, blocks in loader_of(graph()):
            x = blocks[0].srcdata["feat"]
            with inside():
                expected = model(blocks, x)
            torch.testing.assert_close(
                model(blocks, x), expected, rtol=1e-4, atol=1e-5, equal_nan=True
            )
    assert replays_of(model) > 2


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


class _Waits:
    """Garbage that waits for the GPU when it is collected, as a store does."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        torch.cuda.synchronize()


@needs_gpu
def test_garbage_does_not_end_a_capture():
    def run() -> torch.Tensor:
        _Waits()
        kept = [[] for _ in range(100_000)]  # after so many objects, garbage is collected
        return torch.ones(3, device="cuda") + len(kept)

    replay = captured(run, torch.device("cuda", torch.cuda.current_device()))
    assert replay().tolist() == [100_001.0] * 3
    assert gc.isenabled() and gc.collect() > 0

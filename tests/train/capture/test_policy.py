"""Which steps are captured: the same in every run, and none where that is not possible."""

from __future__ import annotations

import json
import weakref
from typing import ClassVar

import dgl
import pytest
import torch
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler
from torch import nn

import dgl_mgpu
from dgl_mgpu.errors import InvalidInputError, UnavailableError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.sampling import dataloading
from dgl_mgpu.train.capture import step
from dgl_mgpu.train.capture.policy import WARM_UP
from tests.sampling.side_streams import HostStream
from tests.train.capture.test_capture import (
    CLASSES,
    MODELS,
    Model,
    assert_close,
    batches_of,
    computed,
    graph,
)


@pytest.fixture(autouse=True)
def on_tensors():
    with tensor_backed_graphs():
        yield


class Run:
    """Training with dropout on mini-batches that turn out larger now and then."""

    def __init__(self, g, **options):
        torch.manual_seed(1)
        self.model = Model(*MODELS["mean"]().layers)
        self.drop = nn.Dropout(0.5)
        self.step = dgl_mgpu.CapturedStep(
            self.model,
            lambda blocks: self.model(blocks, self.drop(blocks[0].srcdata["feat"])),
            F.cross_entropy,
            **options,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        # Later nodes have more neighbours; and there are some seeds more, in a last mini-batch.
        seeds = g.in_degrees().argsort()[:300]
        sampler = NeighborSampler([-1, -1], prefetch_node_feats=["feat"], prefetch_labels=["label"])
        self.loader = DataLoader(g, seeds, sampler, batch_size=32)

    def epoch(self, number):
        dgl.seed(number)
        losses = []
        for batch in self.step.batches(self.loader):
            losses.append(self.step(batch))
            self.optimizer.step()
            assert len(self.step.labels) == len(self.step.outputs)
        return losses


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_takes_anothers_state_goes_on_as_that(ahead, monkeypatch, capturing):
    monkeypatch.setattr(
        dataloading, "side_stream_of", lambda device: HostStream() if ahead else None
    )
    torch.manual_seed(0)
    g = graph()
    for before in range(3):  # also none
        whole, other = Run(g), Run(g)
        for epoch in range(before):
            whole.epoch(epoch)
        other.model.load_state_dict(whole.model.state_dict())
        other.step.load_state_dict(json.loads(json.dumps(whole.step.state_dict())))
        state = torch.get_rng_state()
        expected = whole.epoch(before) + whole.epoch(before + 1)
        torch.set_rng_state(state)
        capturing.clear()
        assert torch.equal(
            torch.stack(other.epoch(before) + other.epoch(before + 1)), torch.stack(expected)
        )
        assert capturing
        for one, its in zip(other.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(one, its)


def test_steps_are_the_same_whether_mini_batches_are_made_ahead(monkeypatch, capturing):
    """Also of one that was put in place before there was another place for it."""
    torch.manual_seed(0)
    g, found, moved = graph(), [], []
    blocks_of = step.SlotBatch.blocks
    monkeypatch.setattr(
        step.SlotBatch, "blocks", lambda batch: moved.append(batch) or blocks_of(batch)
    )
    for side_stream in (None, HostStream()):
        monkeypatch.setattr(
            dataloading, "side_stream_of", lambda device, side_stream=side_stream: side_stream
        )
        run = Run(g)
        torch.manual_seed(2)
        # Sizes that go up and down, so that one fits the room that the next one is too large for.
        orders = torch.randperm(300).split(100)
        for epoch, order in enumerate(orders):
            run.loader = DataLoader(
                g, order, run.loader.graph_sampler, batch_size=8, drop_last=True
            )
            found += run.epoch(epoch)
        assert len(capturing) > 2 * step.NUM_SLOTS  # some are captured anew
        capturing.clear()
        assert bool(moved) == (side_stream is not None)
    half = len(found) // 2
    assert torch.equal(torch.stack(found[:half]), torch.stack(found[half:]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"chosen": 1},
        {"chosen": [[1, 2], 3, 4]},
        {"chosen": None, "counts": 3},
        {"counts": [[[[[1], [2]], [True]], "x"]]},
        {"largest": [[1]]},
        None,
    ],
)
def test_a_state_that_is_none_is_refused(wrong, capturing):
    run = Run(graph())
    run.epoch(0)
    state = run.step.state_dict()
    with pytest.raises((KeyError, TypeError, ValueError)):
        run.step.load_state_dict(wrong and {**state, **wrong})
    assert run.step.state_dict() == state  # nothing was taken


@pytest.mark.parametrize("error", [UnavailableError, torch.OutOfMemoryError])
def test_where_captures_are_not_required_they_may_fail(error, monkeypatch, capturing):
    def fails(run, device, pool):
        raise (
            error("the cause\nand more")
            if error is torch.OutOfMemoryError
            else error("capture", "the cause", "leave it")
        )

    monkeypatch.setattr(step, "captured", fails)
    batches = batches_of(graph(), 8)
    model = MODELS["mean"]()
    forward = lambda blocks: model(blocks, blocks[0].srcdata["feat"])  # noqa: E731
    take = dgl_mgpu.CapturedStep(model, forward, F.cross_entropy, required=False)
    for number, blocks in enumerate(batches):
        expected = computed(model, blocks, 32)[:2]
        if number == WARM_UP:
            with pytest.warns(UserWarning, match="no training step is a CUDA graph.*the cause"):
                loss = take(blocks)
        else:
            loss = take(blocks)  # and nothing is said again
        assert_close([loss, take.outputs], expected)
    assert len(capturing) == 1 and not take._slots
    take = dgl_mgpu.CapturedStep(model, forward, F.cross_entropy)
    with pytest.raises(error, match="the cause"):
        for blocks in batches:
            take(blocks)


@pytest.mark.parametrize("required", [False, True])
def test_steps_that_lack_the_memory_of_graphs_get_it(required, capturing):
    """Those of another number of seeds are computed as always."""
    model, rooms = MODELS["mean"](), []

    def forward(blocks):
        if blocks[-1].num_dst_nodes() == 7 and any(room() for room in rooms):
            raise torch.OutOfMemoryError("too full")
        return model(blocks, blocks[0].srcdata["feat"])

    take = dgl_mgpu.CapturedStep(model, forward, F.cross_entropy, required=required)
    g = graph()
    (whole,), (part,) = batches_of(g, 1, size=32), batches_of(g, 1, size=7)
    for _ in range(WARM_UP + 1):
        take(whole)
    rooms += [weakref.ref(each.buffers) for each in take._slots]
    capturing.clear()
    if required:
        with pytest.raises(torch.OutOfMemoryError):
            take(part)
        return
    with pytest.warns(UserWarning, match="too full"):
        loss = take(part)
    expected, _, *gradients = computed(model, part, 7)
    assert_close([loss], [expected])
    take(part)
    assert_close([each.grad for each in model.parameters()], gradients)
    take(whole)
    assert not capturing


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("what", ["gradients", "rows to spare"])
def test_what_only_a_capture_refuses_is_computed_as_always(what, required, capturing):
    g, model = dgl.add_self_loop(graph()), MODELS["mean"]()
    g.ndata["feat"].requires_grad_(what == "gradients")

    def forward(blocks):
        found = model(blocks, blocks[0].srcdata["feat"])
        return found + torch.zeros(32, CLASSES) if what == "rows to spare" else found

    take = dgl_mgpu.CapturedStep(model, forward, F.cross_entropy, required=required)
    errors = InvalidInputError if what == "gradients" else UnavailableError
    with pytest.raises(errors) if required else pytest.warns(UserWarning):
        for blocks in batches_of(g, 8):
            loss = take(blocks)
            with torch.no_grad():
                expected = F.cross_entropy(forward(blocks), blocks[-1].dstdata["label"])
            assert_close([loss], [expected])


class Graph:
    """A graph, of which one is alive as long as something can replay it."""

    every: ClassVar[list[weakref.ref[Graph]]] = []

    def __init__(self, run, pool):
        self.results, self.pool = run(), pool
        Graph.every.append(weakref.ref(self))

    def __call__(self):
        return self.results

    @staticmethod
    def alive(but_of=None):
        return [each for each in Graph.every if each() is not None and each().pool != but_of]


def test_a_run_goes_on_without_captures_where_they_were_given_up(capturing):
    def forward_full(run):
        """As long as there are graphs, there is no memory for the last mini-batch."""
        forward = run.step._pass._functions[0]

        def full(blocks):
            if blocks[-1].num_dst_nodes() < 32 and run.step._slots:
                raise torch.OutOfMemoryError("too full")
            return forward(blocks)

        run.step._pass._functions = full, *run.step._pass._functions[1:]
        return run

    torch.manual_seed(0)
    g = graph()
    whole, other, required = (Run(g, required=flag) for flag in (False, False, True))
    with pytest.warns(UserWarning, match="too full"):
        forward_full(whole).epoch(0)
    state = json.loads(json.dumps(whole.step.state_dict()))
    other.model.load_state_dict(whole.model.state_dict())
    other.step.load_state_dict(state)
    drawn = torch.get_rng_state()
    expected = whole.epoch(1)
    torch.set_rng_state(drawn)
    capturing.clear()
    assert torch.equal(torch.stack(forward_full(other).epoch(1)), torch.stack(expected))
    assert not capturing
    required.step.load_state_dict(state)
    required.epoch(1)
    assert capturing  # where it is an error not to


def epochs_of_changing_sizes(take, g):
    """Mini-batches that are captured anew now and then."""
    torch.manual_seed(2)
    sampler = NeighborSampler([-1, -1], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    for order in torch.randperm(300).split(100):
        loader = DataLoader(g, order, sampler, batch_size=8, drop_last=True)
        expected = [(blocks, blocks[-1].dstdata["label"]) for *_, blocks in loader]
        for batch, (blocks, labels) in zip(take.batches(loader), expected, strict=True):
            yield batch, blocks, labels
            del batch


@pytest.mark.parametrize("ahead", [False, True])
def test_old_graphs_are_given_up_before_there_are_new_ones(ahead, monkeypatch, capturing):
    """Also where a mini-batch is in place for one, and with what they computed last."""
    monkeypatch.setattr(
        dataloading, "side_stream_of", lambda device: HostStream() if ahead else None
    )
    monkeypatch.setattr(Graph, "every", [])
    numbers = iter(range(100))
    monkeypatch.setattr(step, "new_pool", lambda device: next(numbers))
    results = []

    def captured(run, device, pool):
        assert not Graph.alive(but_of=pool)
        old = [each() for each, its in results if its != pool]
        assert all(each is None for each in old)
        made = Graph(run, pool)
        kept = made.results
        results.extend((weakref.ref(each), pool) for each in (*kept.gradients, kept.outputs))
        return made

    monkeypatch.setattr(step, "captured", captured)
    torch.manual_seed(0)
    model = MODELS["mean"]()
    take = dgl_mgpu.CapturedStep(
        model, lambda blocks: model(blocks, blocks[0].srcdata["feat"]), F.cross_entropy
    )
    g = graph()
    for _ in range(2):
        for batch, _, _ in epochs_of_changing_sizes(take, g):
            take(batch)
        take.load_state_dict(take.state_dict())
    assert next(numbers) > 3


@pytest.mark.parametrize("ahead", [False, True])
def test_after_giving_up_no_graph_is_alive_and_results_are_right(ahead, monkeypatch, capturing):
    """Also of a mini-batch that was in place by then."""
    monkeypatch.setattr(
        dataloading, "side_stream_of", lambda device: HostStream() if ahead else None
    )
    monkeypatch.setattr(Graph, "every", [])

    def captured(run, device, pool):
        if len(Graph.every) == step.NUM_SLOTS:
            raise torch.OutOfMemoryError("too full")

        made = Graph(run, pool)

        def again():
            made.results = run()
            return made()

        return again

    monkeypatch.setattr(step, "captured", captured)
    torch.manual_seed(0)
    model = MODELS["mean"]()
    forward = lambda blocks: model(blocks, blocks[0].srcdata["feat"])  # noqa: E731
    take = dgl_mgpu.CapturedStep(model, forward, F.cross_entropy, required=False)
    outdated = 0
    with pytest.warns(UserWarning, match="too full"):
        for batch, blocks, labels in epochs_of_changing_sizes(take, graph()):
            is_placed = isinstance(batch, step.SlotBatch)
            loss = take(batch)
            assert torch.equal(take.labels, labels)
            gradients = [each.grad.clone() for each in model.parameters()]
            found = [loss, take.outputs.clone(), *gradients]
            assert_close(found, computed(model, blocks, 8))
            if not take._captures:
                assert not Graph.alive()
                outdated += is_placed
    assert outdated == ahead

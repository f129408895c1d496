"""Mini-batches that are sampled in place; without a GPU, captured steps are computed again."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from functools import partial

import dgl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl.dataloading import DataLoader, MultiLayerFullNeighborSampler, NeighborSampler

import dgl_mgpu
from dgl_mgpu.capture.static_buffers import StaticBuffers
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.sampling import dataloading
from dgl_mgpu.store.row_updates import write_rows
from dgl_mgpu.train.capture import graph_slots as graph_slots
from dgl_mgpu.train.capture import policy as choice
from dgl_mgpu.train.capture import step
from dgl_mgpu.train.capture.graph_slots import SlotBatch
from tests.sampling.side_streams import HostStream
from tests.train.capture.test_capture import (
    CLASSES,
    MODELS,
    Model,
    assert_close,
    computed,
    graph,
    step_of,
    typed_graph_and_layers,
)
from tests.train.jobs import reports_of, train

FEATURES = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}


@pytest.fixture(autouse=True)
def on_tensors():
    with tensor_backed_graphs():
        yield


@pytest.fixture(params=["one by one", "ahead"])
def ahead(request, monkeypatch):
    """With a side stream, which works at once, batches are put while the one before is computed."""
    is_ahead = request.param == "ahead"
    monkeypatch.setattr(
        dataloading, "side_stream_of", lambda device: HostStream() if is_ahead else None
    )
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
            placed += isinstance(batch, SlotBatch)
            assert take.num_seeds(batch) == seeds
            loss = take(batch)
            assert torch.equal(take.labels, blocks[-1].dstdata["label"])
            gradients = [each.grad for each in model.parameters()]
            assert_close([loss, take.outputs, *gradients], results)
    return placed


@pytest.mark.parametrize("name", ["mean", "gcn", "gat"])
def test_batches_are_those_of_the_loader(name, store, ahead, capturing):
    model = MODELS[name]()
    take = step_of(model)
    loader = loader_of(store)
    # But those before the capture; ahead, the one that was made by then is of blocks, too.
    torch.manual_seed(0)
    placed = assert_same_training(store.graph.set_epoch, loader, model, take)
    captures = len(capturing) // step.NUM_SLOTS
    # As what turned out larger did; the one that was in place by then stays a mini-batch in place.
    assert placed == 18 - (choice.WARM_UP + 1 + ahead) - (captures - 1) * (1 + ahead)
    assert len({id(each.buffers) for each in take._slots}) == step.NUM_SLOTS
    assert all(each.current_batch() is None for each in take._slots)


def test_batches_of_a_graph_of_dgls(ahead, capturing):
    torch.manual_seed(0)
    for name, prob in (("mean", None), ("weighted", "weight")):
        model = MODELS[name]()
        sampler = NeighborSampler([3, 4], prob=prob, prefetch_edge_feats=["weight"], **FEATURES)
        loader = DataLoader(graph(), torch.arange(288), sampler, batch_size=32)
        assert assert_same_training(dgl.seed, loader, model, step_of(model))


def test_features_that_are_not_prefetched_are_read_when_they_are_used(ahead, capturing):
    g = graph()
    model = MODELS["mean"]()
    take = step_of(model)
    loader = DataLoader(g, torch.arange(288), NeighborSampler([3, 4]), batch_size=32)
    for batch in take.batches(loader):
        assert isinstance(batch, list)
        g.ndata["feat"] += 1.0
        loss, *_ = computed(model, batch, 32)
        assert_close([take(batch)], [loss])
    assert capturing


def test_a_feature_of_another_width_or_dtype_is_not_put(ahead, capturing):
    class Padded(Model):
        def forward(self, blocks, x):
            return super().forward(blocks, F.pad(x.float(), (0, 6 - x.shape[1])))

    for other in (torch.randn(400, 5), torch.randn(400, 6).double()):
        g = graph()
        model = Padded(*MODELS["mean"]().layers)
        take = step_of(model)
        sampler = NeighborSampler([3, 4], **FEATURES)
        loader = DataLoader(g, torch.arange(288), sampler, batch_size=32)
        seen = []
        for number, batch in enumerate(take.batches(loader)):
            seen.append(type(batch))
            loss = take(batch)
            if number == 6:
                g.ndata["feat"] = other
            if number == 7:
                assert isinstance(batch, list)
                assert_close([loss], [computed(model, batch, 32)[0]])
        assert SlotBatch in seen[:7] and SlotBatch in seen[8:]


def test_weights_that_dgl_alone_samples_by(ahead, capturing):
    """A batch may be sampled by DGL after others were put in place."""
    g = graph()
    take = step_of(MODELS["mean"]())
    sampler = NeighborSampler([3, 4], prob="weight", **FEATURES)
    loader = DataLoader(g, torch.arange(288), sampler, batch_size=32)
    kinds = []
    for number, batch in enumerate(take.batches(loader)):
        kinds.append(type(batch))
        assert take(batch).isfinite()
        if number == 6:
            g.edata["weight"][:] = 0.0
    assert SlotBatch in kinds and kinds[-1] is list


def test_features_of_edges_and_ids(store, ahead, capturing):
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
        if isinstance(batch, SlotBatch):
            placed += 1
            seeds = blocks[1].dstdata[dgl.NID]
            expected = blocks[0].srcdata[dgl.NID], seeds, blocks[1].edata[dgl.EID]
            for found, ids in zip(read[-1], expected, strict=True):
                assert torch.equal(found[: len(ids)], ids)
    assert placed


def test_weighted_samples_and_all_neighbours(store, ahead, capturing):
    samplers = (
        NeighborSampler([3, 4], prob="weight", **FEATURES),
        NeighborSampler([3, 4], replace=True, **FEATURES),
        MultiLayerFullNeighborSampler(2, **FEATURES),
    )
    for sampler in samplers:
        model = MODELS["mean"]()
        loader = loader_of(store, sampler)
        assert assert_same_training(store.graph.set_epoch, loader, model, step_of(model))


def test_several_types(ahead, capturing):
    g, first, last = typed_graph_and_layers()
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
                placed += isinstance(batch, SlotBatch)
                labels = blocks[-1].dstnodes["a"].data["label"]
                model.zero_grad()
                expected_loss = F.cross_entropy(forward(blocks), labels)
                expected_loss.backward()
                gradients = [each.grad for each in model.parameters()]
                assert_close([take(batch)], [expected_loss.detach()])
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    if gradient is not None:
                        torch.testing.assert_close(parameter.grad, gradient)
                assert torch.equal(take.labels, labels)
    assert placed


def test_a_last_batch_and_larger_ones_come_as_blocks(store, ahead, capturing):
    model = MODELS["mean"]()
    take = step_of(model)
    sampler = NeighborSampler([1, 1], **FEATURES)
    loader = DataLoader(store.graph, torch.arange(300), sampler, batch_size=32)
    for batch in take.batches(loader):
        kind = type(batch)
        take(batch)
    assert kind is list and len(capturing) == step.NUM_SLOTS
    larger = loader_of(store, NeighborSampler([9, 9], **FEATURES))
    assert assert_same_training(store.graph.set_epoch, larger, model, take)
    assert len(capturing) in (4, 6)


def test_a_batch_whose_place_was_given_on_is_refused(store, ahead, capturing):
    take = step_of(MODELS["mean"]())
    kept = []
    with pytest.raises(InvalidInputError, match="given to another"):
        for batch in take.batches(loader_of(store)):
            take(batch)
            if isinstance(batch, SlotBatch):
                kept.append(batch)
                take(kept[0])


def test_a_batch_in_place_for_another_step_is_refused(store, ahead, capturing):
    take, other = step_of(MODELS["mean"]()), step_of(MODELS["mean"]())
    with pytest.raises(InvalidInputError, match="another step"):
        for batch in take.batches(loader_of(store)):
            take(batch)
            other(batch)


def test_a_loop_that_is_left_gives_its_places_back(store, ahead, capturing):
    model = MODELS["mean"]()
    take = step_of(model)
    for _ in range(4):
        for number, batch in enumerate(take.batches(loader_of(store))):
            take(batch)
            if number == 6:
                break
        del batch
    assert all(each.current_batch() is None for each in take._slots)
    assert len(capturing) <= 4


def test_two_loops_and_blocks_in_turns(store, ahead, capturing):
    model = MODELS["mean"]()
    take = step_of(model)
    loaders = [loader_of(store), loader_of(store, NeighborSampler([3, 4], **FEATURES))]
    store.graph.set_epoch(0)
    batches = [blocks for *_, blocks in loaders[0]]
    loops, placed = [], 0
    for loader in loaders:
        store.graph.set_epoch(0)
        loops.append(take.batches(loader))
    for blocks, *both in zip(batches, *loops, strict=True):
        loss, *_ = computed(model, blocks, 32)
        for batch in (*both, blocks):
            placed += isinstance(batch, SlotBatch)
            assert_close([take(batch)], [loss])
    assert placed


def test_a_model_that_is_switched_after_a_batch_was_put(store, ahead, capturing):
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
        if isinstance(batch, SlotBatch):
            placed += 1
            assert not torch.allclose(take(batch), loss)
            model.eval()
        found = take(batch)
        if not model.training:
            assert_close([found], [loss])
        model.train()
    assert placed


def test_other_loaders_give_blocks(store, capturing):
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
    assert not take._slots


class Streams:
    """Notes which of what is queued has been waited for, as streams of a GPU would."""

    def __init__(self, monkeypatch, side_stream):
        self._side_stream, self._now, self._seen = side_stream, 0, 0
        self._computed: dict[int, int] = {}
        self.overwritten: list[int] = []
        monkeypatch.setattr(graph_slots, "record_event", self.record_event)
        monkeypatch.setattr(step, "record_event", self.record_event)
        monkeypatch.setattr(graph_slots, "wait_event", self.wait_event)
        monkeypatch.setattr(step, "wait_event", self.wait_event)
        load = StaticBuffers.load_hops

        def load_hops(buffers, hops, features):
            if side_stream.is_inside and self._computed.get(id(buffers), 0) > self._seen:
                self.overwritten.append(id(buffers))
            load(buffers, hops, features)

        monkeypatch.setattr(StaticBuffers, "load_hops", load_hops)

    def record_event(self, device):
        self._now += 1
        return self._now

    def wait_event(self, queued, device):
        if queued is not None and self._side_stream.is_inside:
            self._seen = max(self._seen, queued)

    def computing(self, buffers):
        self._now += 1
        self._computed[id(buffers)] = self._now


def test_no_place_is_written_to_before_it_was_computed(store, capturing, monkeypatch):
    side_stream = HostStream()
    monkeypatch.setattr(dataloading, "side_stream_of", lambda device: side_stream)
    streams = Streams(monkeypatch, side_stream)
    take = step_of(MODELS["mean"]())
    replay = take._replay

    def replayed(slot, weight):
        streams.computing(slot.buffers)
        return replay(slot, weight)

    monkeypatch.setattr(take, "_replay", replayed)
    for _ in range(2):
        placed = [isinstance(b, SlotBatch) for b in take.batches(loader_of(store)) if [take(b)]]
    assert any(placed) and len(streams._computed) == step.NUM_SLOTS
    assert not streams.overwritten


def test_a_stores_rows_that_are_written_count_from_the_next_batch_on(store, ahead, capturing):
    model = MODELS["mean"]()
    table = store.graph._store.tables["node/_N/feat"]
    rows = store.gather("feat", torch.arange(400))

    def losses(batches, compute):
        write_rows(table, torch.arange(400), rows)
        found = []
        for number, batch in enumerate(batches):
            found.append(compute(batch))
            if number == 6:
                write_rows(table, torch.arange(400), torch.ones(400, 6))
        return found

    take = step_of(model)
    loader = loader_of(store)
    store.graph.set_epoch(0)
    expected = losses((blocks for *_, blocks in loader), lambda b: computed(model, b, 32)[0])
    store.graph.set_epoch(0)
    assert_close(losses(take.batches(loader), take), expected)
    assert not torch.allclose(expected[6], expected[7])


def test_without_memory_for_two_places_there_is_one(store, ahead, capturing, monkeypatch):
    pools, replays = [], []

    def captured(run, device, pool):
        pools.append(pool)
        if len(pools) == 2:
            raise torch.OutOfMemoryError

        def replay():
            replays.append(pool)
            return run()

        return replay

    pool = iter("ab")
    monkeypatch.setattr(step, "new_pool", lambda device: next(pool))
    monkeypatch.setattr(step, "captured", captured)
    model = MODELS["mean"]()
    take = step_of(model)
    loader = loader_of(store, MultiLayerFullNeighborSampler(2, **FEATURES), size=9, count=1)
    loader = DataLoader(store.graph, torch.arange(9).repeat(16), loader.graph_sampler, batch_size=9)
    assert not assert_same_training(store.graph.set_epoch, loader, model, take, seeds=9)
    # The first one was captured anew, and all batches after that are computed there.
    assert pools == ["a", "a", "b"] and replays == ["b"] * (32 - choice.WARM_UP)


def test_a_loop_found_to_be_left_while_the_side_stream_works(store, capturing, monkeypatch):
    """Its place was left when the step had computed it, and not on the side stream."""
    side_stream = HostStream()
    monkeypatch.setattr(dataloading, "side_stream_of", lambda device: side_stream)
    streams = Streams(monkeypatch, side_stream)
    points, record_event = [], streams.record_event
    for module in (graph_slots, step):
        monkeypatch.setattr(
            module,
            "record_event",
            lambda device: points.append(side_stream.is_inside) or record_event(device),
        )
    take = step_of(MODELS["mean"]())
    replay = take._replay

    def replayed(slot, weight):
        streams.computing(slot.buffers)
        return replay(slot, weight)

    monkeypatch.setattr(take, "_replay", replayed)
    held = take.batches(loader_of(store))
    for _ in range(7):
        take(next(held))
    with side_stream.use():
        del held
    assert points and not any(points)
    assert all(each.current_batch() is None for each in take._slots)
    assert all(each.last_use > streams._computed[id(each.buffers)] for each in take._slots)


def test_labels_may_depend_on_edges(store, ahead, capturing):
    """They are of the mini-batch that is in place, and not of the one before it."""
    model = MODELS["mean"]()
    take = dgl_mgpu.CapturedStep(
        model,
        lambda blocks: model(blocks, blocks[0].srcdata["feat"]),
        F.cross_entropy,
        lambda blocks: blocks[-1].in_degrees()[: blocks[-1].num_dst_nodes()] % CLASSES,
    )
    loader = loader_of(store)
    for epoch in range(2):
        store.graph.set_epoch(epoch)
        expected = [blocks[-1].in_degrees() % CLASSES for *_, blocks in loader]
        store.graph.set_epoch(epoch)
        for batch, labels in zip(take.batches(loader), expected, strict=True):
            take(batch)
            assert torch.equal(take.labels, labels)
    assert take._slots


def test_a_sampler_that_is_changed_and_a_step_of_another_graph(store, ahead, capturing):
    take = step_of(MODELS["mean"]())
    loader = loader_of(store)
    kinds = []
    for number, batch in enumerate(take.batches(loader)):
        take(batch)
        kinds.append(type(batch))
        if number == 6:
            loader.graph_sampler.output_device = "cpu"
            break
    assert SlotBatch in kinds
    assert all(isinstance(batch, list) for batch in take.batches(loader))

    g = graph()
    renamed = dgl.heterograph({("_N", "other", "_N"): g.edges()}, {"_N": 400})
    renamed.ndata.update(g.ndata)
    with dgl_mgpu.GlobalStore.from_dgl(renamed, device="cpu") as other:
        assert all(isinstance(batch, list) for batch in take.batches(loader_of(other)))


def test_loaders_that_give_something_else(store, ahead, capturing):
    take = step_of(MODELS["mean"]())

    class Fewer(DataLoader):
        def __iter__(self):
            return itertools.islice(super().__iter__(), 2)

    sampler = NeighborSampler([3, 4], **FEATURES)
    fewer = Fewer(store.graph, torch.arange(288), sampler, batch_size=32)
    assert len(list(take.batches(fewer))) == 2
    g = graph()
    pairs = dgl.dataloading.as_edge_prediction_sampler(
        NeighborSampler([3, 4]), negative_sampler=dgl.dataloading.negative_sampler.Uniform(2)
    )
    for blocks in take.batches(DataLoader(g, torch.arange(64), pairs, batch_size=32)):
        assert len(blocks) == 2 and blocks[0].is_block
    with pytest.raises(InvalidInputError, match=r"type list.*DataLoader"):
        take.batches([1, 2])


def test_old_places_are_given_up_before_new_ones_are_captured(store, ahead, capturing, monkeypatch):
    take = step_of(MODELS["mean"]())
    for batch in take.batches(loader_of(store, NeighborSampler([1, 1], **FEATURES))):
        take(batch)
    old = [weakref.ref(each) for each in take._slots]
    for batch in take.batches(loader_of(store, NeighborSampler([9, 9], **FEATURES))):
        take(batch)
        del batch
    assert len(old) == step.NUM_SLOTS and not any(each() for each in old)


_until_the_end = contextlib.ExitStack()


def capture_here(folder, trainer):
    """Hook of a run: its rank captures, and leaves how many mini-batches it put in place."""
    if dist.is_initialized():  # a process of its own; the test's has it from a fixture
        _until_the_end.enter_context(tensor_backed_graphs())
    step.captures = lambda device: True
    step.captured = lambda run, device, pool: run
    put, rank = graph_slots.SlotPool.put, dist.get_rank() if dist.is_initialized() else 0

    def counted(self, hops, features):
        found = put(self, hops, features)
        if found is not None:
            with (folder / f"placed-{rank}").open("a") as file:
                file.write(".")
        return found

    graph_slots.SlotPool.put = counted


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_runs_put_their_batches_in_place(ranks, tmp_path, monkeypatch):
    replaced = (
        (step, "captures"), (step, "captured"), (graph_slots.SlotPool, "put"),
    )  # fmt: skip
    for owner, name in replaced:
        # One rank is this process, which gets them back.
        monkeypatch.setattr(owner, name, getattr(owner, name))
    # Of two ranks one has no batch in the last round, and the other's is a part of one.
    options = (
        f"data.root={tmp_path}", "model.dropout=0", "trainer.epochs=4", "trainer.batch_size=40",
    )  # fmt: skip
    expected = reports_of(train(tmp_path / "blocks", ranks, *options))
    folder = tmp_path / "placed"
    folder.mkdir()
    captured = (*options, "trainer.cuda_graphs=true")
    found = reports_of(train(folder, ranks, *captured, hook=partial(capture_here, folder)))
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.train_accuracy == pytest.approx(other.train_accuracy, abs=0.01)
        assert (one.steps, one.seeds) == (other.steps, other.seeds)
    steps = sum(each.steps for each in expected)
    for rank in range(ranks):
        assert len((folder / f"placed-{rank}").read_text()) > steps / ranks / 3

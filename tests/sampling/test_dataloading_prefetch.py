"""Mini-batches that a DataLoader makes ahead are those it makes when they are asked for."""

from __future__ import annotations

import gc
import itertools
import weakref

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import (
    DataLoader,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    ShaDowKHopSampler,
    as_edge_prediction_sampler,
)
from dgl.dataloading.base import BlockSampler
from dgl.dataloading.dataloader import _init_gpu_caches, _PrefetchingIter
from dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform

import dgl_mgpu
from dgl_mgpu.errors import StoreClosedError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.sampling import dataloading
from dgl_mgpu.sampling.prefetcher import Prefetcher
from dgl_mgpu.store.row_updates import write_rows
from dgl_mgpu.train.minibatch.samplers import RandomWalkSampler
from tests.docs.pages import ROOT
from tests.docs.pages import blocks as blocks_of
from tests.sampling.loaders import link_graph, node_graph, typed_graph
from tests.sampling.side_streams import HostStream

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")

DEPTHS = [0, 1, 3]


@pytest.fixture(autouse=True)
def on_tensors():
    with tensor_backed_graphs():
        yield


@pytest.fixture
def with_side_stream(monkeypatch):
    """Has loaders look ahead on the CPU, to a depth; the lanes that they asked for so far."""
    made = []

    def use(depth):
        def side_stream_of(device):
            made.append(HostStream())
            return made[-1]

        monkeypatch.setattr(dataloading, "DEPTH", depth)
        monkeypatch.setattr(
            dataloading, "side_stream_of", side_stream_of if depth else lambda device: None
        )
        return made

    return use


def contents(thing):
    """Everything in a batch as lists."""
    if isinstance(thing, torch.Tensor):
        return thing.tolist()
    if isinstance(thing, dict):
        return {name: contents(each) for name, each in thing.items()}
    if isinstance(thing, dgl.DGLGraph):
        frames = [*thing._node_frames, *thing._edge_frames]
        return [
            [
                contents(torch.stack(thing.edges(etype=e, order="eid")))
                for e in thing.canonical_etypes
            ],
            [{name: contents(frame[name]) for name in frame} for frame in frames],
        ]
    return [contents(each) for each in thing]


def given_up(side_stream):
    """How many batches were: one that was made and one that was begun, if it was once."""
    return [what for what, _ in side_stream.log].count("waits")


def homogeneous():
    g = node_graph("cpu")
    features = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
    return g, torch.arange(0, 300, 2), NeighborSampler([3, 4], **features)


def weighted():
    g, ids, _ = homogeneous()
    return g, ids, NeighborSampler([3, 4], prob="weight", prefetch_edge_feats=["weight"])


def full():
    g, ids, _ = homogeneous()
    return g, ids, MultiLayerFullNeighborSampler(2, fused=False)


def heterogeneous():
    ids = {"user": torch.arange(40), "item": torch.arange(10, 30)}
    sampler = NeighborSampler([3, 4], prefetch_node_feats={"user": ["feat"], "item": ["feat"]})
    return typed_graph("cpu"), ids, sampler


def shadow():
    g, ids, _ = homogeneous()
    return g, ids, ShaDowKHopSampler([3, 4], prefetch_node_feats=["feat"])


def pairs(negative, exclude):
    def make():
        g, reverse = link_graph("cpu")
        sampler = as_edge_prediction_sampler(
            NeighborSampler([4, 4], fused=False),
            negative_sampler=negative,
            exclude=exclude,
            reverse_eids=reverse,
        )
        return g, torch.arange(0, 500, 5), sampler

    return make


def stored():
    with tensor_backed_graphs(False):
        g, ids, sampler = homogeneous()
        return dgl_mgpu.GlobalStore.from_dgl(g, device="cpu").graph, ids, sampler


def walks():
    with tensor_backed_graphs(False):
        g, ids, _ = homogeneous()
        graph = dgl_mgpu.GlobalStore.from_dgl(g, device="cpu").graph
    features = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
    return graph, ids, RandomWalkSampler(2, 3, 4, 2, **features)


PURE = [
    homogeneous,
    weighted,
    full,
    heterogeneous,
    shadow,
    pairs(None, None),
    pairs(PerSourceUniform(3), "reverse_id"),
    pairs(GlobalUniform(2), "self"),
    stored,
    walks,
]


def run(make, with_side_stream, depth, *, stop=None, **options):
    """Two epochs with dropout in between, and one after the script's own draws."""
    found = with_side_stream(depth)
    del found[:]
    dgl.seed(3)
    torch.manual_seed(3)
    np.random.seed(3)
    g, ids, sampler = make()
    seen, dropped = [], []
    for _ in range(2):
        loader = DataLoader(g, ids, sampler, batch_size=20, **options)
        for number, batch in enumerate(itertools.islice(loader, stop)):
            dropped.append(torch.rand(3).tolist())
            seen.append(contents(batch))
            if number == 1 and isinstance(g, dgl.DGLGraph):
                seen.append(contents(dgl.sampling.sample_neighbors(g, {g.ntypes[0]: [1, 2]}, 2)))
    assert bool(found) == bool(depth)
    for side_stream in found:
        assert [what for what, _ in side_stream.log].count("follows") == 1
    return seen, dropped


@pytest.mark.parametrize("make", PURE)
@pytest.mark.parametrize("stop", [None, 2])
def test_batches_are_the_same(make, stop, with_side_stream):
    expected = run(make, with_side_stream, 0, stop=stop, shuffle=True)
    for depth in DEPTHS[1:]:
        assert run(make, with_side_stream, depth, stop=stop, shuffle=True) == expected


def test_draws_of_the_script_are_those_without_a_loader(with_side_stream):
    """Sampling negative edges takes nothing of torch's generator."""
    _, dropped = run(pairs(PerSourceUniform(3), None), with_side_stream, 1)
    torch.manual_seed(3)
    drawn = []
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_()  # torch's DataLoader, once a pass
        drawn += [torch.rand(3).tolist() for _ in range(5)]
    assert dropped == drawn


def test_every_batch_and_epoch_has_draws_of_its_own(with_side_stream):
    with_side_stream(1)
    g, _, sampler = pairs(PerSourceUniform(3), None)()
    loader = DataLoader(g, torch.arange(40).repeat(2), sampler, batch_size=40)
    for what in (
        lambda batch: batch[3][0].edata[dgl.EID].tolist(),
        lambda batch: batch[2].ndata[dgl.NID][batch[2].edges()[1]].tolist(),
    ):
        found = [what(batch) for _ in range(2) for batch in loader]
        assert len({tuple(each) for each in found}) == 4


def test_two_loaders_interleaved(with_side_stream):
    results = []
    for depth in DEPTHS:
        with_side_stream(depth)
        dgl.seed(1)
        (g, ids, sampler), (other, others, edges) = homogeneous(), pairs(GlobalUniform(2), None)()
        first = DataLoader(g, ids, sampler, batch_size=20)
        second = DataLoader(other, others, edges, batch_size=20)
        results.append([contents(pair) for pair in zip(first, second, strict=False)])
        # One within the other, and one left early.
        for batch in first:
            results[-1] += [contents(batch), contents(next(iter(second)))]
    assert results[1:] == results[:1] * 2


@pytest.mark.parametrize("make", [homogeneous, stored])
def test_two_passes_of_one_loader(make, with_side_stream):
    results = []
    for depth in DEPTHS:
        with_side_stream(depth)
        dgl.seed(1)
        g, ids, sampler = make()
        loader = DataLoader(g, ids, sampler, batch_size=20)
        one = iter(loader)
        found = [contents(next(one)) for _ in range(2)]
        two = iter(loader)  # gives a store's graph the next epoch
        found += [contents(next(each)) for _ in range(3) for each in (one, two)]
        results.append(found)
    assert results[1:] == results[:1] * 2


def _new_column(g, sampler, loader):
    g.ndata["feat"] = g.ndata["feat"] + 1


def _write_column(g, sampler, loader):
    g.ndata["feat"][:] = 7


def _another_feature(g, sampler, loader):
    g.ndata["more"] = torch.arange(g.num_nodes())


def _no_feature(g, sampler, loader):
    del g.ndata["label"]


def _weights(g, sampler, loader):
    g.edata["weight"][::2] = 0


def _structure(g, sampler, loader):
    g.remove_edges(torch.arange(0, g.num_edges(), 2))


def _another_graph(g, sampler, loader):
    loader.graph = loader.collate_fn.g = node_graph("cpu", num_edges=900)
    _init_gpu_caches(loader.graph, None)


def _features_of_another_graph(g, sampler, loader):
    loader.graph = node_graph("cpu")
    loader.graph.ndata["feat"] = loader.graph.ndata["feat"] + 1
    _init_gpu_caches(loader.graph, None)


def _fanouts(g, sampler, loader):
    sampler.fanouts[0] = 1


def _replace(g, sampler, loader):
    sampler.replace = True


def _prefetched(g, sampler, loader):
    sampler.prefetch_node_feats = ["feat", "label"]


def _attached(g, sampler, loader):
    loader.attach_data("other", torch.rand(9))


@pytest.mark.parametrize(
    "change",
    [
        _new_column, _write_column, _another_feature, _no_feature, _weights, _structure,
        _another_graph, _features_of_another_graph, _fanouts, _replace, _prefetched, _attached,
    ],
)  # fmt: skip
def test_what_the_script_changes_counts_from_the_next_batch_on(change, with_side_stream):
    results = []
    for depth in DEPTHS:
        made = with_side_stream(depth)
        dgl.seed(1)
        torch.manual_seed(1)
        g, ids, sampler = homogeneous()
        sampler.prob, sampler.prefetch_labels = "weight", []
        loader = DataLoader(g, ids, sampler, batch_size=20)
        found = []
        for number, batch in enumerate(loader):
            found.append(contents(batch))
            if number == 2:
                change(g, sampler, loader)
                if made:
                    del made[-1].log[:]
        results.append(found)
        if depth:
            # What was made ahead has been given up, and no more is.
            assert {what for what, _ in made[-1].log} == {"waits"}
    assert len(results[0]) == 8
    assert results[1:] == results[:1] * 2


@pytest.mark.parametrize("kind", ["inference", "fused optimizer"])
def test_features_whose_changes_torch_does_not_count_are_not_fetched_ahead(kind, with_side_stream):
    made = with_side_stream(1)
    g, ids, sampler = homogeneous()
    with torch.inference_mode() if kind == "inference" else torch.no_grad():
        g.ndata["feat"] = rows = torch.nn.Parameter(torch.rand(300, 2))
        optimizer = torch.optim.SGD([rows], lr=1.0, fused=True)
        for inputs, _, blocks in DataLoader(g, ids, sampler, batch_size=20):
            assert torch.equal(blocks[0].srcdata["feat"], rows[inputs])
            rows.grad = torch.rand(300, 2)
            optimizer.step()
    assert given_up(made[0]) == 2


def test_edges_without_features_count_too(with_side_stream):
    made = with_side_stream(1)
    ends = torch.arange(100)
    g = dgl.graph((ends, ends))
    batches = iter(DataLoader(g, ends, NeighborSampler([-1]), batch_size=20))
    next(batches)
    g.add_edges(ends, ends)
    for _, _, (block,) in batches:
        assert block.num_edges() == 40
    assert given_up(made[0]) == 2


def test_features_of_another_graph_than_is_sampled_count_too(with_side_stream):
    made = with_side_stream(1)
    g, ids, sampler = homogeneous()
    loader = DataLoader(g, ids, sampler, batch_size=20)
    loader.graph = other = node_graph("cpu")
    _init_gpu_caches(other, None)
    batches = iter(loader)
    next(batches)
    other.ndata["feat"].zero_()
    for _, _, blocks in batches:
        assert not blocks[0].srcdata["feat"].any()
    assert given_up(made[0]) == 2


def test_another_stores_graph_counts(with_side_stream):
    made = with_side_stream(1)
    g, ids, sampler = stored()
    loader = DataLoader(g, ids, sampler, batch_size=20)
    batches = iter(loader)
    next(batches)
    loader.graph = stored()[0]
    assert len(list(batches)) == 7
    assert given_up(made[0]) == 2


def test_what_is_replaced_lives_as_long_as_the_lane_may_read_it(with_side_stream):
    with_side_stream(1)
    g, ids, sampler = homogeneous()
    batches = iter(DataLoader(g, ids, sampler, batch_size=20))
    next(batches)
    old = weakref.ref(g._graph)
    g.add_edges(ids, ids)
    assert old() is not None
    next(batches)
    assert old() is None


class _Own(NeighborSampler):
    """A sampler of the script's, which may look at anything."""


class _Sure(NeighborSampler):
    prefetch_safe = True


class _Derived(_Sure):
    pass


class _OwnNegatives(PerSourceUniform):
    pass


def _impure():
    g, ids, _ = homogeneous()
    yield g, ids, _Own([2]), {}
    yield g, ids, LaborSampler([2]), {}  # goes on in a sequence of its own
    yield g, ids, NeighborSampler([2]), {"use_alternate_streams": True}
    yield g, ids.tolist(), NeighborSampler([2]), {}
    g, _ = link_graph("cpu")
    for inner, options in (
        (NeighborSampler([2], fused=False), {"negative_sampler": _OwnNegatives(1)}),
        (NeighborSampler([2], fused=False), {"exclude": lambda edges: edges}),
        (_Own([2], fused=False), {}),
        (_Sure([2], fused=False), {}),
    ):
        yield g, torch.arange(50), as_edge_prediction_sampler(inner, **options), {}
    g, ids, _ = homogeneous()
    yield g, ids, _Sure([2]), {}
    yield g, ids, _Derived([2]), {}


def test_passes_over_a_loader_share_what_is_known_of_its_pace():
    g, ids, sampler = homogeneous()
    loader, other = (DataLoader(g, ids, sampler, batch_size=20) for _ in range(2))
    first, again, others = map(iter, (loader, loader, other))
    assert first._tuner is again._tuner is not others._tuner


@pytest.mark.parametrize("case", range(10))
def test_what_may_depend_on_more_is_made_when_it_is_asked_for(case, with_side_stream, monkeypatch):
    monkeypatch.setattr(dgl.dataloading.dataloader, "is_tensor_adaptor_enabled", lambda: True)
    made = with_side_stream(1)
    g, ids, sampler, options = list(_impure())[case]
    loader = DataLoader(g, ids, sampler, batch_size=20, **options)
    batches = iter(loader)
    assert isinstance(batches, Prefetcher)
    assert len(list(batches)) == -(-len(ids) // 20)
    # A list of ids becomes a tensor, and a class may say that it depends on no more.
    assert bool(made) == (case in (3, 7, 8))


def samplers_of_the_page() -> list[type]:
    """The classes that docs/howto/migrating.md says may be called ahead."""
    names = {"dgl": dgl, "torch": torch}
    for block in blocks_of(ROOT / "docs" / "howto" / "migrating.md"):
        if block.language == "python" and "prefetch_safe" in block.code:
            exec(block.code.partition("\n\n\nloader")[0], names)
    return [each for each in names.values() if isinstance(each, type)]


def test_the_pages_sampler_is_called_ahead_and_gives_the_same(with_side_stream):
    (kind,) = samplers_of_the_page()
    results = []
    for depth in DEPTHS:
        made = with_side_stream(depth)
        dgl.seed(1)
        torch.manual_seed(1)
        g, ids, _ = homogeneous()
        found = [
            [inputs, outputs, *(block.edges() for block in blocks), blocks[0].srcdata["is_seed"]]
            for inputs, outputs, blocks in DataLoader(g, ids, kind([3, 2]), batch_size=20)
        ]
        assert bool(made) == bool(depth)
        results.append(found)
        for inputs, outputs, *_, is_seed in found:
            assert set(inputs[is_seed].tolist()) == set(outputs.tolist())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("prob", [None, "weight"])
def test_rows_that_are_written_to_the_store_are_in_the_next_batch(prob, with_side_stream):
    made = with_side_stream(1)
    with tensor_backed_graphs(False):
        g, ids, _ = homogeneous()
        store = dgl_mgpu.GlobalStore.from_dgl(g, device="cpu")
    sampler = NeighborSampler([3, 4], prob=prob, prefetch_node_feats=["feat"])
    features, every = g.ndata["feat"], torch.arange(g.num_nodes())
    for number, (inputs, _, blocks) in enumerate(
        DataLoader(store.graph, ids, sampler, batch_size=20)
    ):
        assert torch.equal(blocks[0].srcdata["feat"], features[inputs])
        if number == 2:
            assert any(what == "records" and event.on_side_stream for what, event in made[0].log)
            made[0].log.clear()
            write_rows(store.graph._store.tables["node/_N/label"], every, g.ndata["label"])
        elif number == 4:  # what no batch reads may change
            assert any(what == "records" and event.on_side_stream for what, event in made[0].log)
            features = features + 1
            write_rows(store.graph._store.tables["node/_N/feat"], every, features)
    assert number == 7


def test_the_environment_turns_it_off(with_side_stream, monkeypatch):
    made = with_side_stream(1)
    loader = DataLoader(*homogeneous(), batch_size=20)
    monkeypatch.setenv("DGL_MGPU_PREFETCH", "0")
    expected = [contents(batch) for batch in loader]
    assert not made and len(expected) == 8
    monkeypatch.setenv("DGL_MGPU_PREFETCH", "1")
    assert len(list(loader)) == 8 and made


def test_dgls_own_graphs_on_the_cpu_and_workers_keep_dgls_iterator(with_side_stream):
    made = with_side_stream(1)
    with tensor_backed_graphs(False):
        assert type(iter(DataLoader(*homogeneous()))) is _PrefetchingIter
    assert type(iter(DataLoader(*homogeneous(), num_workers=1))) is _PrefetchingIter
    g, ids, sampler = stored()
    threaded = DataLoader(g, ids, sampler, batch_size=20, use_prefetch_thread=True)
    assert type(iter(threaded)) is _PrefetchingIter
    assert not made


def test_a_full_gpu_is_not_tried_again(with_side_stream, monkeypatch):
    with_side_stream(1)
    side_stream = HostStream()
    monkeypatch.setattr(dataloading, "side_stream_of", lambda device: side_stream)
    g, ids, sampler = homogeneous()
    sample = NeighborSampler.sample_blocks

    def short_of_memory(self, *arguments, **options):
        if side_stream.is_inside:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return sample(self, *arguments, **options)

    loader = DataLoader(g, ids, sampler, batch_size=20)
    dgl.seed(1)
    expected = [contents(batch) for _ in range(2) for batch in loader]
    monkeypatch.setattr(NeighborSampler, "sample_blocks", short_of_memory)
    dgl.seed(1)
    with pytest.warns(UserWarning, match="does not fit") as warned:
        found = [contents(batch) for _ in range(2) for batch in loader]
    assert found == expected
    assert sum("does not fit" in str(each.message) for each in warned) == 1
    assert side_stream.is_full


def test_what_is_wrong_with_seeds_is_told_in_their_turn(with_side_stream):
    for depth in DEPTHS:
        with_side_stream(depth)
        g, ids, sampler = homogeneous()
        ids[70] = 1000  # in the fourth batch
        batches = iter(DataLoader(g, ids, sampler, batch_size=20))
        for _ in range(3):
            next(batches)
        with pytest.raises(dgl.DGLError):
            next(batches)
        assert len(list(batches)) == 4


def test_a_format_that_a_batch_makes_is_waited_for(with_side_stream):
    made = with_side_stream(1)
    ends = torch.arange(50)
    g = dgl.heterograph({("a", "x", "a"): (ends, ends), ("b", "y", "b"): (ends, ends)})
    edges = {("a", "x", "a"): torch.arange(20), ("b", "y", "b"): torch.arange(20)}
    sampler = as_edge_prediction_sampler(NeighborSampler([2], fused=False), exclude="self")
    batches = iter(DataLoader(g, edges, sampler, batch_size=20))
    assert g._graph.relations[1].created == ("coo",)
    next(batches)  # and the second one, which is of the other type
    assert g._graph.relations[1].created == ("coo", "csc")
    *_, (records, event), (waits, waited) = made[0].log
    assert (records, waits) == ("records", "waits") and waited is event


def test_a_format_that_the_script_makes_is_waited_for(with_side_stream):
    made = with_side_stream(1)
    ends = torch.arange(50)
    g = dgl.heterograph({("a", "x", "a"): (ends, ends), ("b", "y", "b"): (ends, ends)})
    batches = iter(DataLoader(g, {"a": torch.arange(40)}, NeighborSampler([2]), batch_size=10))
    next(batches)
    made[0].log.clear()
    next(batches)
    assert "follows" not in [what for what, _ in made[0].log]
    g._graph.relations[1].csr()
    made[0].log.clear()
    next(batches)
    order = [what for what, _ in made[0].log]
    assert order.count("follows") == 1
    on_side_stream = next(
        i
        for i, (what, event) in enumerate(made[0].log)
        if what == "records" and event.on_side_stream
    )
    assert order.index("follows") < on_side_stream


def test_nothing_lives_on_after_a_pass_that_is_left(with_side_stream):
    with_side_stream(1)
    g, ids, sampler = homogeneous()
    loader = DataLoader(g, ids, sampler, batch_size=20)
    batches = iter(loader)
    next(batches)
    refs = [weakref.ref(entry.batch[2][0]) for entry in batches._queue]
    refs += [weakref.ref(batches), weakref.ref(loader), weakref.ref(g)]
    gc.collect()
    gc.disable()
    try:
        del batches, loader, g, sampler
        assert len(refs) == 4 and [ref() for ref in refs] == [None] * 4
    finally:
        gc.enable()


def test_a_loader_made_of_anothers_attributes_as_lightning_does_it(with_side_stream):
    results = []
    for depth in DEPTHS:
        with_side_stream(depth)
        dgl.seed(1)
        loader = DataLoader(*homogeneous(), batch_size=20)
        names = (
            "graph indices graph_sampler device use_ddp ddp_seed shuffle drop_last use_uva "
            "use_prefetch_thread use_alternate_streams pin_prefetcher batch_size collate_fn dataset"
        )
        again = DataLoader(**{name: getattr(loader, name) for name in names.split()})
        results.append([contents(batch) for batch in again])
    assert len(results[0]) == 8
    assert results[1:] == results[:1] * 2


def test_what_is_begun_is_sampled_by_what_dgl_samples_with(with_side_stream, monkeypatch):
    """The sampler that a loader was made with, and a method that a script has put in its place."""
    sample, calls = BlockSampler.sample, []

    def noted(self, *arguments, **options):
        calls.append(self)
        return sample(self, *arguments, **options)

    with_side_stream(1)
    g, ids, sampler = homogeneous()
    loader = DataLoader(g, ids, sampler, batch_size=20)
    loader.graph_sampler = NeighborSampler([1])
    assert {len(blocks) for _, _, blocks in loader} == {2}
    monkeypatch.setattr(BlockSampler, "sample", noted)
    assert len(list(DataLoader(g, ids, sampler, batch_size=20))) == len(calls) == 8


def test_a_sampler_starts_sampling_itself(with_side_stream):
    made = with_side_stream(1)
    g, ids, sampler = walks()
    log = []

    def sample_blocks_async(g, nodes, *, on_host=None):
        future = RandomWalkSampler.sample_blocks_async(sampler, g, nodes, on_host=on_host)
        log.append(("starts", nodes[0].item()))
        return future.then(lambda blocks: log.append(("finishes", nodes[0].item())) or blocks)

    sampler.sample_blocks_async = sample_blocks_async
    assert len(list(DataLoader(g, ids, sampler, batch_size=20))) == 8 and made
    # The first two come before there is something ahead of them.
    assert log[2:7] == [
        ("starts", 40), ("starts", 80), ("finishes", 40), ("starts", 120), ("finishes", 80)
    ]  # fmt: skip
    assert len(log) == 16


def test_a_sampler_may_have_begin_blocks_until_0_2(with_side_stream):
    """The old name of ``sample_blocks_async``, which returned a callable."""

    class OldSampler(BlockSampler):
        prefetch_safe = True

        def begin_blocks(self, g, nodes, *, on_host=None):
            return lambda: calls.append(on_host) or g.sample_blocks(nodes, [3])

        def sample_blocks(self, g, seed_nodes, exclude_eids=None):
            raise AssertionError("it is to be started")

    calls = []
    with_side_stream(1)
    with tensor_backed_graphs(False):
        g, ids, _ = homogeneous()
        store = dgl_mgpu.GlobalStore.from_dgl(g, device="cpu")
    with pytest.warns(DeprecationWarning, match=r"OldSampler\.begin_blocks .* sample_blocks_async"):
        batches = list(DataLoader(store.graph, ids, OldSampler(), batch_size=20))
    assert len(batches) == len(calls) == 8


@pytest.mark.parametrize(
    "sampler", [NeighborSampler([3, 4]), NeighborSampler([-1, -1]), RandomWalkSampler(2, 3, 4, 2)]
)
def test_a_store_that_was_closed_is_not_sampled(with_side_stream, sampler):
    with_side_stream(1)
    with tensor_backed_graphs(False):
        g, ids, _ = homogeneous()
        store = dgl_mgpu.GlobalStore.from_dgl(g, device="cpu")
    batches = iter(DataLoader(store.graph, ids, sampler, batch_size=20))
    next(batches)
    store.close()
    next(batches)  # was made by then
    with pytest.raises(StoreClosedError):
        next(batches)

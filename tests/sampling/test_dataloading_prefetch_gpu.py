"""Mini-batches that a DataLoader makes ahead on a GPU are those it makes when they are asked for.

Nothing here waits for the GPU before a batch is given back, so that whichever stream is late would
read what is not there yet, or what is another batch's by then.
"""

from __future__ import annotations

import importlib.util

import dgl
import pytest
import torch
from dgl.dataloading import (
    BlockSampler,
    DataLoader,
    NeighborSampler,
    ShaDowKHopSampler,
    as_edge_prediction_sampler,
)
from dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform

import dgl_mgpu
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.random import BatchDraws
from dgl_mgpu.sampling import loader_batches
from dgl_mgpu.sampling.prefetcher import Prefetcher
from dgl_mgpu.sampling.side_stream import side_stream_of
from dgl_mgpu.train.minibatch.samplers import RandomWalkSampler
from tests.sampling.loaders import link_graph, node_graph, typed_graph
from tests.sampling.side_streams import poison

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)


#: Of a GPU's clock: some milliseconds, more than a batch takes here.
LATE = 20_000_000
FEATURES = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}


def copies(thing):
    """Everything in a batch, copied on the current stream without waiting for it."""
    if isinstance(thing, torch.Tensor):
        return [thing.clone()]
    if isinstance(thing, dgl.DGLGraph):
        parts = [end for e in thing.canonical_etypes for end in thing.edges(etype=e, order="eid")]
        for frame in (*thing._node_frames, *thing._edge_frames):
            parts += [frame[name] for name in frame]
    else:
        parts = thing.values() if isinstance(thing, dict) else thing
    return [copy for part in parts for copy in copies(part)]


def on_gpu(sampler=None):
    sampler = sampler or NeighborSampler([3, 4], **FEATURES)
    return node_graph("cuda"), torch.arange(0, 300, 2, device="cuda"), sampler, {}


def weighted():
    return on_gpu(NeighborSampler([3, 4], prob="weight", prefetch_edge_feats=["weight"]))


def not_prefetched():
    return on_gpu(NeighborSampler([3, 4]))


def shadow():
    return on_gpu(ShaDowKHopSampler([3, 4], prefetch_node_feats=["feat"]))


def pinned():
    sampler = NeighborSampler([3, 4], **FEATURES)
    return node_graph("cpu"), torch.arange(0, 300, 2), sampler, {"use_uva": True}


def stored():
    graph = dgl_mgpu.GlobalStore.from_dgl(node_graph("cpu"), device="cuda").graph
    return graph, torch.arange(0, 300, 2), NeighborSampler([3, 4], **FEATURES), {}


def walks():
    graph, ids, _, options = stored()
    return graph, ids, RandomWalkSampler(3, 3, 4, 2, **FEATURES), options


def heterogeneous():
    ids = {
        "user": torch.arange(40, device="cuda"),
        "item": torch.arange(10, 30, device="cuda"),
    }
    sampler = NeighborSampler([3, 4], prefetch_node_feats={"user": ["feat"], "item": ["feat"]})
    return typed_graph("cuda"), ids, sampler, {}


def edges(negative, exclude, device="cuda"):
    def make():
        g, reverse = link_graph(device)
        sampler = as_edge_prediction_sampler(
            NeighborSampler([4, 4]),
            negative_sampler=negative,
            exclude=exclude,
            reverse_eids=reverse.cuda(),
        )
        ids = torch.arange(0, 500, 5, device=device)
        return g, ids, sampler, {"use_uva": device == "cpu"}

    return make


CASES = [
    on_gpu,
    weighted,
    not_prefetched,
    shadow,
    pinned,
    stored,
    walks,
    heterogeneous,
    edges(PerSourceUniform(3), "reverse_id"),
    edges(GlobalUniform(2), "self"),
    edges(PerSourceUniform(3), "reverse_id", "cpu"),
]


@pytest.fixture
def where():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def side_stream_is_late(monkeypatch, where):
    """The side stream takes its time between sampling and fetching."""
    with side_stream_of(where).use():
        with_side_stream = torch.cuda.current_stream(where)

    def slow(make):
        def made(sampler, sampled):
            if torch.cuda.current_stream(where) == with_side_stream:
                torch.cuda._sleep(LATE)
            return make(sampler, sampled)

        return made

    # DGL samples by the former, and what is started ahead is finished by the latter.
    for owner, name in (
        (BlockSampler, "assign_lazy_features"),
        (loader_batches, "finish_blocks"),
    ):
        monkeypatch.setattr(owner, name, slow(getattr(owner, name)))


def train(make, *, ahead=True, late=0, stop=None, change=None):
    """Everything in the batches of two epochs, and what dropout has drawn meanwhile.

    Parameters
    ----------
    late : int
        Cycles that the model takes before it looks at a batch.
    stop : int, optional
        Batch at which the script leaves an epoch.
    change : callable, optional
        Called with the graph and the sampler after the third batch.
    """
    dgl.seed(3)
    torch.manual_seed(3)
    g, ids, sampler, options = make()
    seen, dropped = [], []
    for _ in range(2):
        batches = iter(DataLoader(g, ids, sampler, device="cuda", batch_size=20, **options))
        assert isinstance(batches, Prefetcher) and (batches._side_stream is not None) == ahead
        for number, batch in enumerate(batches):
            torch.cuda._sleep(late)
            seen.append(copies(batch))
            dropped += [torch.rand(3, device="cuda"), torch.rand(3).cuda()]
            # Given back while the GPU has yet to read it.
            del batch
            if number == 2 and change is not None:
                change(g, sampler)
            if number == stop:
                break
        if change is None:
            # Nothing has made it stop on the way.
            assert (batches._side_stream is not None) == ahead
    torch.cuda.synchronize()
    if isinstance(g, dgl.DGLGraph) and g.is_pinned():
        g.unpin_memory_()
    return [*seen, dropped]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.cpu(), other.cpu()), number


@pytest.fixture
def without(monkeypatch):
    """What :func:`train` gives if nothing is made ahead."""

    def run(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setenv("DGL_MGPU_PREFETCH", "0")
            return train(*arguments, ahead=False, **options)

    return run


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("late", [0, LATE])
@pytest.mark.parametrize("stop", [None, 2])
def test_batches_are_the_same(make, late, stop, without, where):
    expected = without(make, stop=stop)
    poison(where)
    assert_same(train(make, late=late, stop=stop), expected)


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("late", [0, LATE])
def test_batches_are_the_same_from_a_late_side_stream(make, late, without, request, where):
    expected = without(make)
    request.getfixturevalue("side_stream_is_late")
    poison(where)
    assert_same(train(make, late=late), expected)


def test_batches_are_the_same_on_a_stream_of_the_scripts(without, side_stream_is_late, where):
    expected = without(on_gpu)
    poison(where)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same(train(on_gpu, late=LATE), expected)


def test_samples_are_those_of_the_cpu():
    dgl.seed(5)
    g, ids, sampler, _ = on_gpu()
    found = [batch[2] for batch in DataLoader(g, ids, sampler, device="cuda", batch_size=20)]
    with tensor_backed_graphs():
        dgl.seed(5)
        loader = DataLoader(node_graph("cpu"), ids.cpu(), sampler, batch_size=20)
        expected = [batch[2] for batch in loader]
    assert len(found) == len(expected) == 8
    for blocks, references in zip(found, expected, strict=True):
        for block, reference in zip(blocks, references, strict=True):
            assert torch.equal(block.edata[dgl.EID].cpu(), reference.edata[dgl.EID])
        assert torch.equal(blocks[0].srcdata["feat"].cpu(), references[0].srcdata["feat"])


def _write(g, sampler):
    torch.cuda._sleep(LATE)
    g.ndata["feat"].add_(1)


def _write_on_the_host(g, sampler):
    torch.cuda.synchronize()
    g.ndata["feat"].add_(1)


def _replace(g, sampler):
    new = g.ndata.pop("feat") * 2
    torch.cuda._sleep(LATE)
    g.ndata["feat"] = new + 1
    # Of what the side stream reads, only the script's own hold was given up.
    torch.full_like(new, torch.nan)


def _remove_edges(g, sampler):
    g.remove_edges(torch.arange(0, g.num_edges(), 2, device=g.device))
    torch.full((1 << 20,), 1 << 40, device="cuda")


def _fanouts(g, sampler):
    sampler.fanouts[0] = 1


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (on_gpu, _write),
        (on_gpu, _replace),
        (on_gpu, _remove_edges),
        (on_gpu, _fanouts),
        (pinned, _write_on_the_host),
        (pinned, _fanouts),
    ],
)
def test_what_the_script_changes_counts_from_the_next_batch_on(
    make, change, without, side_stream_is_late, where
):
    expected = without(make, change=change)
    poison(where)
    assert_same(train(make, late=LATE, change=change), expected)


def test_two_loaders_interleaved(monkeypatch, side_stream_is_late, where):
    results = []
    for prefetch in ("0", "1"):
        monkeypatch.setenv("DGL_MGPU_PREFETCH", prefetch)
        poison(where)
        dgl.seed(1)
        loaders = []
        for make in (on_gpu, edges(GlobalUniform(2), None)):
            g, ids, sampler, _ = make()
            loaders.append(DataLoader(g, ids, sampler, device="cuda", batch_size=20))
        results.append([])
        for pair in zip(*loaders, strict=False):
            torch.cuda._sleep(LATE)
            results[-1].append(copies(pair))
            del pair
        for batch in loaders[0]:
            results[-1].append(copies([batch, next(iter(loaders[1]))]))
            del batch
        torch.cuda.synchronize()
    assert_same(*results)


def test_a_graph_that_is_given_up_with_its_loader_may_be_overwritten(side_stream_is_late, where):
    """Nothing on the side stream reads the graph's memory when it is the allocator's again."""
    for _ in range(5):
        g, ids, sampler, _ = on_gpu()
        batches = iter(DataLoader(g, ids, sampler, device="cuda", batch_size=20))
        next(batches)
        torch.cuda._sleep(10 * LATE)  # also where others use the GPU meanwhile
        next(batches)
        last = batches._queue[-1].event
        assert not last.query()
        del batches, g, ids
        assert last.query()
        poison(where)


def test_formats_that_the_side_stream_makes_are_the_scripts_to_use(where, monkeypatch):
    ends = torch.arange(50, device="cuda")
    g = dgl.heterograph({("a", "x", "a"): (ends, ends), ("b", "y", "b"): (ends, ends.flip(0))})
    eids = {(t, e, t): torch.arange(40, device="cuda") for t, e in (("a", "x"), ("b", "y"))}
    sampler = as_edge_prediction_sampler(NeighborSampler([2]), exclude="self")
    poison(where)
    batches = iter(DataLoader(g, eids, sampler, device="cuda", batch_size=40))
    assert "csc" not in g._graph.relations[1].created
    with monkeypatch.context() as patch:
        # A GPU that always has work left: the second batch is made with the first one.
        patch.setattr(torch.cuda.Event, "query", lambda event: False)
        next(batches)
    assert "csc" in g._graph.relations[1].created
    indptr, indices, eids = g.adj_tensors("csc", etype="y")
    assert torch.equal(indptr, torch.arange(51, device="cuda"))
    assert torch.equal(indices, ends.flip(0))
    # Given up on the script's stream, which still reads it: the side stream must not get it yet.
    torch.cuda._sleep(LATE)
    kept = [indptr.clone(), indices.clone()]
    expected = [ends.new_tensor(range(51)), ends.flip(0)]
    del batches, g, indptr, indices, eids
    poison(where)
    for one, other in zip(kept, expected, strict=True):
        assert torch.equal(one, other)


def test_draws_of_a_batch_are_not_torchs(where):
    torch.manual_seed(1)
    batches = BatchDraws(where, 7)
    found = [torch.rand(2, device=where)]
    inside = []
    for number in (0, 1, 0):
        with batches.of_batch(number):
            inside.append(torch.rand(4, device=where))
        found.append(torch.rand(1, device=where))
    assert torch.equal(inside[0], inside[2]) and not torch.equal(inside[0], inside[1])
    torch.manual_seed(1)
    again = [torch.rand(2, device=where), *(torch.rand(1, device=where) for _ in range(3))]
    assert torch.equal(torch.cat(found), torch.cat(again))

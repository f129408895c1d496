"""DGL's DataLoader over graphs made of tensors, as it is over graphs on a GPU."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dgl import DGLError
from dgl.dataloading import DataLoader, NeighborSampler, as_edge_prediction_sampler
from dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform
from dgl.frame import Column, LazyFeature

import dgl_mgpu
from dgl_mgpu import GlobalStore
from dgl_mgpu.errors import WorkerFailedError
from dgl_mgpu.graph import random
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.sampling import block_sampling
from dgl_mgpu.train.launch.launch import launch
from tests.sampling.loaders import (
    assert_epoch_is_right,
    assert_pairs_are_right,
    link_graph,
    node_graph,
    typed_graph,
)
from tests.store.test_graph import hetero_graph, power_law_graph

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")


@pytest.fixture(autouse=True)
def on_tensors():
    with tensor_backed_graphs():
        yield


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("workers", [0, 2])
def test_nodes(idtype, workers):
    g = node_graph("cpu", idtype)
    assert isinstance(g._graph, TensorIndex)
    assert_epoch_is_right(g, torch.arange(0, 300, 2, dtype=idtype), num_workers=workers)


@pytest.mark.parametrize("options", [{"drop_last": True}, {"prob": "weight"}, {"replace": True}])
def test_options(options):
    g = node_graph("cpu", torch.int64)
    assert_epoch_is_right(g, torch.arange(0, 300, 2), **options)


def test_nodes_of_several_types():
    g = typed_graph("cpu")
    assert_epoch_is_right(g, {"user": torch.arange(40), "item": torch.arange(10, 30)})


@pytest.mark.parametrize("exclude", [None, "self", "reverse_id"])
@pytest.mark.parametrize("negative", [None, PerSourceUniform(3), GlobalUniform(2)])
def test_edges(exclude, negative):
    g, reverse = link_graph("cpu")
    options = {"reverse_eids": reverse} if exclude == "reverse_id" else {}
    sampler = as_edge_prediction_sampler(
        NeighborSampler([4, 4], fused=False), exclude=exclude, negative_sampler=negative, **options
    )
    assert_pairs_are_right(g, reverse, sampler, exclude, negative is not None)


def _loads_its_share(folder) -> None:
    with tensor_backed_graphs():
        g = node_graph("cpu", torch.int64)
        seen = []
        loader = DataLoader(
            g, torch.arange(103), NeighborSampler([3]), batch_size=20, use_ddp=True, shuffle=True
        )
        for epoch in range(2):
            for _, outputs, blocks in loader:
                assert isinstance(blocks[0]._graph, TensorIndex)
                seen.append((epoch, outputs.tolist()))
    torch.save(seen, folder / f"{dist.get_rank()}.pt")


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_share_an_epoch(tmp_path):
    launch(_loads_its_share, 2, tmp_path)
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for epoch in range(2):
        seen = [[node for e, nodes in share if e == epoch for node in nodes] for share in shares]
        assert len(seen[0]) == len(seen[1]) == 52
        assert set(seen[0]) | set(seen[1]) == set(range(103))


# -- a store whose graphs are made of tensors, as they are on GPUs -------------------------------


def stored(make):
    """A graph of DGL's own, and a store of it."""
    with tensor_backed_graphs(False):
        g = make()
        return g, dgl_mgpu.GlobalStore.from_dgl(g, device="cpu").graph


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("make", "seeds"),
    [
        (power_law_graph, torch.arange(0, 800, 7)),
        (hetero_graph, {"user": torch.arange(9), "item": torch.arange(5, 20)}),
    ],
)
def test_a_stores_blocks_are_the_same_whatever_they_are_made_of(idtype, make, seeds):
    g, graph = stored(lambda: make().astype(idtype))
    with tensor_backed_graphs(False):
        expected_inputs, _, expected = graph.sample_blocks(seeds, [3, 4])
    inputs, outputs, found = graph.sample_blocks(seeds, [3, 4])
    assert outputs is seeds
    for block, reference in zip(found, expected, strict=True):
        assert isinstance(block._graph, TensorIndex)
        assert not isinstance(reference._graph, TensorIndex)
        assert block.canonical_etypes == reference.canonical_etypes
        assert block.idtype == reference.idtype == idtype
        for etype in g.canonical_etypes:
            ends = block.edges(etype=etype, order="eid")
            with tensor_backed_graphs(False):
                expected_ends = reference.edges(etype=etype, order="eid")
            assert torch.equal(torch.stack(ends), torch.stack(expected_ends))
            eids = block.edges[etype].data
            assert eids.keys() == {dgl.EID, *g.edges[etype].data}
            assert torch.equal(eids[dgl.EID], reference.edges[etype].data[dgl.EID])
        for ntype in g.ntypes:
            for ours, theirs in (
                (block.srcnodes[ntype].data, reference.srcnodes[ntype].data),
                (block.dstnodes[ntype].data, reference.dstnodes[ntype].data),
            ):
                assert ours.keys() == theirs.keys() == {dgl.NID, *g.nodes[ntype].data}
                assert torch.equal(ours[dgl.NID], theirs[dgl.NID])
    if isinstance(seeds, dict):
        assert inputs.keys() == expected_inputs.keys()
    else:
        assert torch.equal(inputs, expected_inputs)


def test_a_store_samples_hop_by_hop_into_graphs_of_tensors():
    g, graph = stored(power_law_graph)
    seeds = torch.arange(0, 800, 9)
    frontier = graph.sample_neighbors(seeds, 4)
    assert isinstance(frontier._graph, TensorIndex)
    src, dst = frontier.edges()
    with tensor_backed_graphs(False):
        true_src, true_dst = g.find_edges(frontier.edata[dgl.EID])
        degrees = g.in_degrees(seeds)
    assert torch.equal(src, true_src) and torch.equal(dst, true_dst)
    assert torch.equal(dst.unique(), seeds[degrees > 0])
    visited = graph.pinsage_neighbors(seeds, 3, 2, 2)
    assert isinstance(visited._graph, TensorIndex)
    assert visited.edata["visits"].min() > 0


class _Garbage:
    """What only the collector of cycles frees; leaves a file if a child of the process does."""

    def __init__(self, path):
        self.itself, self.path, self.process = self, path, os.getpid()

    def __del__(self):
        if os.getpid() != self.process:
            self.path.touch()


class _Collecting(NeighborSampler):
    def sample_blocks(self, *arguments, **options):
        gc.collect()
        return super().sample_blocks(*arguments, **options)


def test_workers_leave_the_garbage_of_their_parent_alone(tmp_path):
    path = tmp_path / "freed by a worker"
    gc.disable()
    try:
        _Garbage(path)
        loader = DataLoader(node_graph("cpu"), torch.arange(8), _Collecting([2]), num_workers=1)
        assert len(list(loader)) == 8
    finally:
        gc.enable()
    assert not path.exists()


def test_without_dgls_seed_an_epoch_follows_torchs(monkeypatch):
    monkeypatch.setattr(random, "_common", random._Sequences())
    g = node_graph("cpu", torch.int64)
    loader = DataLoader(g, torch.arange(50), NeighborSampler([3]), batch_size=10)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append([blocks[0].edata[dgl.EID].tolist() for *_, blocks in loader])
    assert found[0] == found[1] != found[2]


class _Last(NeighborSampler):
    """Samples, and then something happens to the worker."""

    def __init__(self, happens):
        super().__init__([3], prefetch_node_feats=["feat"])
        self._happens = happens

    def sample(self, *arguments):
        sampled = super().sample(*arguments)
        return *sampled, self._happens()


def no_more_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), 4096))
    return torch.zeros(1)


def what_cannot_be_pickled():
    return lambda: None


@pytest.mark.parametrize(
    ("happens", "message"),
    [(no_more_files, "Too many open files.*ulimit"), (what_cannot_be_pickled, "can be pickled")],
)
def test_a_batch_that_a_worker_cannot_hand_over_is_told_of(happens, message):
    graph = power_law_graph()
    loader = DataLoader(graph, torch.arange(100), _Last(happens), batch_size=50, num_workers=1)
    with pytest.raises(WorkerFailedError, match=f"cannot hand a mini-batch over.*{message}"):
        list(loader)


class _First(NeighborSampler):
    """Its first mini-batch of a worker cannot be handed over, while others follow at once."""

    def sample(self, g, seeds, *arguments):
        sampled = super().sample(g, seeds, *arguments)
        return *sampled, _PickledLate() if 0 in seeds.tolist() else torch.zeros(1)


class _PickledLate:
    def __reduce__(self):
        time.sleep(0.5)  # the worker goes on, to its end
        raise OSError("full")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_worker_has_made_later_does_not_overtake_what_it_cannot_hand_over(workers):
    """Torch would drop a mini-batch of a worker that has said that it has no more, in silence."""
    graph = power_law_graph()
    loader = DataLoader(
        graph, torch.arange(100), _First([3]), batch_size=50, num_workers=workers,
        prefetch_factor=4,
    )  # fmt: skip
    with pytest.raises(WorkerFailedError, match=r"cannot hand a mini-batch over.*full"):
        list(loader)


def loaded(change, fanouts=(3, 2)):
    """The mini-batches of a graph of tensors, whose sampler is changed first."""
    with tensor_backed_graphs():
        g = node_graph("cpu")
        g.ndata["wide"] = torch.rand(g.num_nodes(), 9)
        sampler = NeighborSampler(fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"])
        change(sampler)
        dgl.seed(3)
        return g, [*DataLoader(g, torch.arange(60), sampler, batch_size=20)]


def test_samplers_whose_methods_are_replaced_have_their_own_features():
    def another(sampler):
        assign = sampler.assign_lazy_features

        def assigned(result):
            result = assign(result)
            result[2][0].srcdata["feat"] = LazyFeature("wide")
            result[2][0].dstdata["wide"] = LazyFeature("wide")
            return result

        sampler.assign_lazy_features = assigned

    g, batches = loaded(another)
    for inputs, _, blocks in batches:
        assert torch.equal(blocks[0].srcdata["feat"], g.ndata["wide"][inputs])
        assert torch.equal(
            blocks[0].dstdata["wide"], g.ndata["wide"][inputs[: blocks[0].num_dst_nodes()]]
        )


def test_samplers_may_return_more_than_blocks():
    def longer(sampler):
        sample = sampler.sample
        sampler.sample = lambda g, seeds: (*sample(g, seeds), torch.ones(2))

    g, batches = loaded(longer)
    for inputs, _, blocks, more in batches:
        assert more.tolist() == [1, 1]
        assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_fanouts_are_numbers_of_any_kind(kind):
    (_, expected), (_, found) = loaded(lambda _: None), loaded(lambda _: None, kind([3, 2]))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[2][0].srcdata["feat"], other[2][0].srcdata["feat"])


def test_a_graph_keeps_few_plans_of_sampling():
    with tensor_backed_graphs():
        g = node_graph("cpu")
        for fanout in range(3 * block_sampling.MAX_PLANS):
            NeighborSampler([fanout]).sample(g, torch.arange(5))
    assert len(g._graph._cache["uniform plans"]) <= block_sampling.MAX_PLANS


@pytest.mark.parametrize("seeds", [{"user": 60}, {"user": 60, "item": 40}])
@pytest.mark.parametrize(
    ("of_inputs", "of_seeds"),
    [
        ({"item": ["feat"], "user": ["feat", "label"]}, {"user": ["label"]}),
        ({"item": ["label"]}, None),
        (None, {"item": ["feat", "label"], "user": ["feat"]}),
    ],
)
@pytest.mark.parametrize("is_stored", [False, True])
def test_features_of_several_types_without_those_of_edges(seeds, of_inputs, of_seeds, is_stored):
    g = typed_graph("cpu")
    sampler = NeighborSampler([3, 2], prefetch_node_feats=of_inputs, prefetch_labels=of_seeds)
    ids = {ntype: torch.randperm(count) for ntype, count in seeds.items()}
    with contextlib.ExitStack() as stack:
        graph = stack.enter_context(GlobalStore.from_dgl(g)).graph if is_stored else g
        for inputs, outputs, blocks in DataLoader(graph, ids, sampler, batch_size=16):
            first, last = blocks[0], blocks[-1]
            for ntype in g.ntypes:
                source, target = (
                    first.get_ntype_id_from_src(ntype),
                    last.get_ntype_id_from_dst(ntype),
                )
                for frame, nodes, fetched in (
                    (first._node_frames[source], inputs[ntype], of_inputs),
                    (last._node_frames[target], outputs.get(ntype, []), of_seeds),
                ):
                    assert frame[dgl.NID].tolist() == [*nodes]
                    for name, rows in g.nodes[ntype].data.items():
                        column = frame._columns[name]
                        is_fetched = name in (fetched or {}).get(ntype, ())
                        assert not is_fetched or (type(column) is Column and column.index is None)
                        assert torch.equal(frame[name], rows[frame[dgl.NID].long()])


def test_features_of_a_type_that_there_is_not():
    sampler = NeighborSampler([2], prefetch_node_feats={"users": ["feat"]})
    loader = DataLoader(typed_graph("cpu"), {"user": torch.arange(20)}, sampler)
    with pytest.raises(DGLError, match="users"):
        next(iter(loader))

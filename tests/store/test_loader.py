"""DGL's DataLoader over a store's graph: passes, seeds and epochs, and what users add to it."""

from __future__ import annotations

from functools import partial

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import (
    BlockSampler,
    DataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    Sampler,
    as_edge_prediction_sampler,
)
from dgl.dataloading.negative_sampler import Uniform

import dgl_mgpu
from dgl_mgpu.errors import (
    IdOutOfRangeError,
    InvalidInputError,
)
from dgl_mgpu.train.launch.launch import launch
from tests.store.test_graph import batches, power_law_graph

pytestmark = pytest.mark.usefixtures("in_shared_memory")


def test_a_pass_keeps_its_epoch_when_another_one_begins():
    g = power_law_graph()

    def edges(batch):
        return batch[2][0].edata[dgl.EID].tolist()

    for options in ({}, {"num_workers": 1}):

        def make(options=options):
            graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
            ids = torch.arange(200)
            return DataLoader(graph, ids, NeighborSampler([3]), batch_size=20, **options)

        loader = make()
        expected = [[edges(batch) for batch in loader] for _ in range(2)]
        loader = make()
        first = iter(loader)
        found = [edges(next(first))]
        second = iter(loader)
        between = [edges(next(second))]
        found += [edges(batch) for batch in first]
        between += [edges(batch) for batch in second]
        assert [found, between] == expected


def _drawn(loader):
    return [blocks[0].edata[dgl.EID].tolist() for *_, blocks in loader]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_loaders_made_anew_go_on_with_the_passes_of_their_store(options):
    g, ids, sampler = power_law_graph(), torch.arange(200), NeighborSampler([3])

    def make(graph):
        return DataLoader(graph, ids, sampler, batch_size=50, **options)

    with dgl_mgpu.GlobalStore.from_dgl(g, seed=3) as store:
        one = make(store.graph)
        expected = [_drawn(one) for _ in range(3)]
    with dgl_mgpu.GlobalStore.from_dgl(g, seed=3) as store:
        found = [_drawn(make(store.graph)) for _ in range(3)]
        assert found == expected
        assert len({str(each) for each in found}) == 3
        store.graph.set_epoch(1)
        assert [_drawn(make(store.graph)) for _ in range(2)] == 2 * [expected[1]]
    with dgl_mgpu.GlobalStore.from_dgl(g, seed=4) as store:
        assert _drawn(make(store.graph)) not in expected


def test_workers_that_live_on_go_on_with_the_passes_of_their_store():
    ids, sampler = torch.arange(200), NeighborSampler([3])
    with dgl_mgpu.GlobalStore.from_dgl(power_law_graph()) as store:
        expected = [_drawn(DataLoader(store.graph, ids, sampler, batch_size=50)) for _ in range(4)]
    with dgl_mgpu.GlobalStore.from_dgl(power_law_graph()) as store:
        loader = partial(DataLoader, store.graph, ids, sampler, batch_size=50)
        living = loader(num_workers=1, persistent_workers=True)
        assert [_drawn(each) for each in (living, living, loader(), living)] == expected


@pytest.mark.parametrize("batch_size", [0, -1, 0.5, 2.5, "4"])
def test_batches_of_no_seeds_are_refused(batch_size):
    g = power_law_graph()
    for graph in (g, dgl_mgpu.GlobalStore.from_dgl(g).graph):
        with pytest.raises(
            InvalidInputError, match=f"batch_size is {batch_size!r}; pass a positive"
        ):
            DataLoader(graph, torch.arange(9), NeighborSampler([3]), batch_size=batch_size)


def test_samplers_of_no_layers_are_refused():
    g = power_law_graph()
    empty = NeighborSampler([]), MultiLayerFullNeighborSampler(0)
    for graph in (g, dgl_mgpu.GlobalStore.from_dgl(g, edges=True).graph):
        for sampler in empty:
            for each in (sampler, as_edge_prediction_sampler(sampler)):
                with pytest.raises(InvalidInputError, match=r"no fanouts.*a fanout for each layer"):
                    DataLoader(graph, torch.arange(9), each)
            with pytest.raises(InvalidInputError, match="no fanouts"):
                sampler.sample(graph, torch.arange(9))


def test_what_torch_draws_for_a_batch_is_by_torchs_seed():
    g = power_law_graph()
    sampler = as_edge_prediction_sampler(NeighborSampler([3]), negative_sampler=Uniform(2))

    def negatives(seed, graph):
        torch.manual_seed(seed)
        return [
            batch[2].ndata[dgl.NID][batch[2].edges()[1]].tolist()
            for batch in DataLoader(graph, torch.arange(100), sampler, batch_size=25)
        ]

    with dgl_mgpu.GlobalStore.from_dgl(g, edges=True) as store:
        dgl.seed(0)
        found = negatives(1, store.graph)
        assert found == negatives(1, store.graph) != negatives(2, store.graph)
        assert len({tuple(each) for each in found}) == 4  # no two batches draw the same


def test_data_that_is_attached_to_a_loader():
    class Named(Sampler):
        def sample(self, g, ids):
            return ids, dgl.LazyFeature("x", ids)

    graph = dgl_mgpu.GlobalStore.from_dgl(power_law_graph()).graph
    rows = torch.randn(800, 3)
    loader = DataLoader(graph, torch.arange(40), Named(), batch_size=10, shuffle=True)
    loader.attach_data("x", rows)
    for ids, found in loader:
        assert torch.equal(found, rows[ids])


def test_attributes_of_a_sampler_of_ones_own_are_its_own():
    class Own(BlockSampler):
        prob = 0.5

        def sample_blocks(self, g, seeds, exclude_eids=None):
            block = dgl.to_block(g.sample_neighbors(seeds, 3), seeds)
            return block.srcdata[dgl.NID], seeds, [block]

    graph = dgl_mgpu.GlobalStore.from_dgl(power_law_graph()).graph
    assert len(batches(graph, torch.arange(128), Own())) == 2


def test_a_workers_error_keeps_its_type():
    graph = dgl_mgpu.GlobalStore.from_dgl(power_law_graph()).graph
    loader = DataLoader(graph, torch.tensor([800]), NeighborSampler([3]), num_workers=1)
    with pytest.raises(IdOutOfRangeError, match="no seed node 800, the graph has 800 nodes"):
        next(iter(loader))


def test_set_epoch_repeats_an_epoch():
    graph = dgl_mgpu.GlobalStore.from_dgl(power_law_graph()).graph
    ids = torch.arange(200)

    def epoch(number):
        graph.set_epoch(number)
        return [
            blocks[0].edata[dgl.EID].tolist()
            for *_, blocks in DataLoader(graph, ids, NeighborSampler([3]), batch_size=50)
        ]

    assert epoch(4) == epoch(4)
    assert epoch(4) != epoch(5)


def test_epochs_are_numbers():
    graph = dgl_mgpu.GlobalStore.from_dgl(power_law_graph()).graph
    for epoch in ("x", None, 1.5, -1):
        with pytest.raises(InvalidInputError, match="epoch"):
            graph.set_epoch(epoch)


def test_loss_curve_equals_plain_tensors_number_for_number():
    g = power_law_graph()
    store = dgl_mgpu.GlobalStore.from_dgl(g, gpu_memory="8KiB")

    def curve(features, labels):
        torch.manual_seed(0)
        conv = torch.nn.ModuleList([dgl.nn.SAGEConv(6, 16, "mean"), dgl.nn.SAGEConv(16, 7, "mean")])
        optimizer = torch.optim.Adam(conv.parameters(), lr=0.01)
        losses = []
        for epoch in range(3):
            store.graph.set_epoch(epoch)
            loader = DataLoader(
                store.graph, torch.arange(400), NeighborSampler([5, 5]), batch_size=100
            )
            for inputs, outputs, blocks in loader:
                hidden = conv[0](blocks[0], features(inputs)).relu()
                loss = torch.nn.functional.cross_entropy(
                    conv[1](blocks[1], hidden), labels(outputs)
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    ours = curve(lambda ids: store.gather("feat", ids), lambda ids: store.gather("label", ids))
    plain = curve(lambda ids: g.ndata["feat"][ids], lambda ids: g.ndata["label"][ids])
    assert ours == plain
    assert ours[-1] < ours[0]


def _ddp_loader(folder) -> None:
    rank = dist.get_rank()
    g = power_law_graph()
    store = dgl_mgpu.GlobalStore.from_dgl(g if rank == 0 else None, device="cpu")
    ids = torch.arange(103)
    sampler = NeighborSampler([4, 4], prefetch_node_feats=["feat"], prefetch_edge_feats=["w"])
    seen, sizes = [], []
    for workers in (0, 1):
        loader = DataLoader(
            store.graph,
            ids,
            sampler,
            batch_size=20,
            use_ddp=True,
            shuffle=True,
            num_workers=workers,
        )
        for inputs, outputs, blocks in loader:
            assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])
            eids = blocks[0].edata[dgl.EID]
            assert torch.equal(blocks[0].edata["w"], g.edata["w"][eids])
            seen.extend(outputs.tolist())
            sizes.append(len(outputs))
    torch.save((seen, sizes), folder / f"{rank}.pt")


@pytest.mark.usefixtures("forked_ranks")
def test_ddp_loaders_share_the_seeds(tmp_path):
    launch(_ddp_loader, 2, tmp_path)
    (seen, sizes), (others, other_sizes) = (torch.load(tmp_path / f"{r}.pt") for r in range(2))
    assert set(seen) | set(others) == set(range(103))
    assert len(sizes) == len(other_sizes)  # uneven seeds, even steps: DDP does not hang
    assert len(seen) == len(others) == 2 * 52


def test_dgl_loaders_of_plain_graphs_are_untouched():
    g = power_law_graph()
    assert len(batches(g, torch.arange(128), NeighborSampler([3]))) == 2

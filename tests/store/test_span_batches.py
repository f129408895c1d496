"""Mini-batches of a store over machines: what they take of the network, made ahead, in slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler

from dgl_mgpu import GlobalStore
from dgl_mgpu.sampling import dataloading
from dgl_mgpu.sampling.loader_batches import FrameKey
from tests.ranks import RankProcesses, machines_on_gpus_too, on_machines
from tests.sampling.side_streams import HostStream
from tests.store.span_graphs import (
    NODES,
    WIDTH,
    assert_same_batches,
    batches,
    emulated_gpus,
    power_law,
)


def _sent(ratio: float) -> tuple[int, int, float]:
    """Bytes of rows that others sent, those of all reads, and the modelled share of these."""
    g = power_law()
    options = {"batch_size": 16, "fanouts": [10, 10]}
    with GlobalStore.from_dgl(g, span="job", replica_ratio=ratio, **options) as store:
        seeds = torch.arange(dist.get_rank(), NODES, 3)
        asked = 0
        for inputs, _, blocks in batches(store.graph, seeds, NeighborSampler([10, 10])):
            assert len(blocks[0].srcdata["feat"]) == len(inputs)
            asked += len(inputs)
        sent = store.graph.traffic.take().nbytes["feat", "remote"]
        assert store.plan.share is not None
        return sent, asked * WIDTH * 4, store.plan.share.remote_reads["node/_N/feat"]


@machines_on_gpus_too
def test_replicas_save_network(ranks: RankProcesses) -> None:
    alone = ranks.run(on_machines, "abc", _sent, 0)
    of_others = 1 - 1 / ranks.size
    for sent, asked, modelled in alone:
        assert 0.75 * of_others * asked < sent < 1.2 * of_others * asked
        assert sent / asked == pytest.approx(modelled, rel=0.15)
    for (sent, asked, modelled), (before, _, _) in zip(
        ranks.run(on_machines, "abc", _sent, 0.3), alone, strict=True
    ):
        assert 0 < sent < 0.8 * before
        assert sent / asked == pytest.approx(modelled, rel=0.25)


def _collectives_of_batches() -> list[int]:
    """How many each batch took, of three hops, features and labels."""
    counts = []

    def counted(name: str) -> Callable[..., Any]:
        collective = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            counts[-1] += 1
            return collective(*args, **options)

        return call

    names = "all_to_all_single", "all_gather", "broadcast", "all_reduce"
    g = power_law()
    options = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
    with (
        GlobalStore.from_dgl(g, span="job", replica_ratio=0.1) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in names:
            patch.setattr(dist, name, counted(name))
        draw = torch.Generator().manual_seed(dist.get_rank())
        seeds = torch.randperm(NODES, generator=draw)[:200]
        sampler = NeighborSampler([3, 3, 3], **options)
        batches = iter(dgl.dataloading.DataLoader(store.graph, seeds, sampler, batch_size=20))
        for _ in range(10):
            counts.append(0)
            _, outputs, blocks = next(batches)
            assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][blocks[0].srcdata["_ID"]])
            assert torch.equal(blocks[-1].dstdata["label"], g.ndata["label"][outputs])
    return counts


def test_a_hop_takes_two_collectives_and_so_do_all_features(ranks: RankProcesses) -> None:
    for counts in ranks.run(on_machines, "abc", _collectives_of_batches):
        assert min(counts) == 8
        # Messages longer than those before take one more each.
        assert max(counts[1:]) <= 16 and sum(counts[1:]) <= 9 * 12


def _made_ahead(by_kernels: bool) -> None:
    g, rank = power_law(), dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    seeds = torch.randperm(NODES, generator=draw)[:200]
    side_stream = HostStream()
    sampler = NeighborSampler([3, 3], prefetch_node_feats=["feat"])
    with (
        GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=0.1) as store,
        GlobalStore.from_dgl(g, seed=5) as whole,
        pytest.MonkeyPatch.context() as patch,
        contextlib.ExitStack() as stack,
    ):
        expected = batches(whole.graph, seeds, sampler)
        patch.setattr(dataloading, "side_stream_of", lambda device: side_stream)
        if by_kernels:
            stack.enter_context(emulated_gpus(store))
        store.graph.set_epoch(1)
        loader = dgl.dataloading.DataLoader(store.graph, seeds, sampler, batch_size=16)
        for number, ((inputs, _, blocks), (other, _, _)) in enumerate(
            zip(loader, expected, strict=True)
        ):
            assert torch.equal(inputs, other)
            assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])
            # GPUs have work left at other times, and wait for each other's gradients.
            side_stream.is_idle = (number + rank) % 3 == 0
            gradients = torch.tensor(rank)
            dist.all_reduce(gradients)
            assert gradients == 3
        records = [event for what, event in side_stream.log if what == "records"]
        assert sum(event.on_side_stream for event in records) >= len(expected) - 1


@pytest.mark.parametrize("by_kernels", [False, True])
def test_batches_are_made_ahead_on_all_ranks_alike(ranks: RankProcesses, by_kernels: bool) -> None:
    ranks.run(on_machines, "abc", _made_ahead, by_kernels)


def _made_ahead_on_some_ranks() -> None:
    g, seeds = power_law(), torch.arange(60)
    sampler = NeighborSampler([3, 3], prefetch_node_feats=["feat"])
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setenv("DGL_MGPU_PREFETCH", "0")
        store = GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=0.1)
        patch.setattr(dataloading, "side_stream_of", lambda device: HostStream())
        with store, emulated_gpus(store):
            assert_same_batches(g, store, sampler, seeds)


def test_batches_are_made_ahead_on_all_ranks_or_none(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _made_ahead_on_some_ranks)


class _SlotsOfOneRank:
    """Slots that take the batches of the first rank alone."""

    def put(self, hops: Any, features: Any) -> Any:
        if dist.get_rank() > 0:
            return None
        ids = hops[0].src_nodes["_N"]
        rows = torch.empty(len(ids), WIDTH)
        features.fetch(FrameKey("src", "_N"), "feat", ids, rows)
        return rows


def _into_slots() -> None:
    g = power_law()
    sampler = NeighborSampler([3], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    with GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store:
        loader = dgl.dataloading.DataLoader(store.graph, torch.arange(30), sampler, batch_size=10)
        for inputs, _, blocks in dataloading.batches_into_slots(loader, _SlotsOfOneRank()):
            assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])


def test_no_rank_has_its_batches_in_slots_alone(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _into_slots)

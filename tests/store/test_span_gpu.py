"""One store over machines with GPUs, as one of a machine that has all."""

from __future__ import annotations

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler

from dgl_mgpu import GlobalStore
from tests.ranks import RankProcesses, on_machines
from tests.store.test_span import NODES, power_law

on_gpus = pytest.mark.parametrize("ranks", ["cuda"], indirect=True)


def _batches(store: GlobalStore, seeds: torch.Tensor, fanouts: list[int], **options: bool) -> list:
    store.graph.set_epoch(1)
    sampler = NeighborSampler(
        fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"], **options
    )
    seeds = seeds.to(store.device)
    loader = dgl.dataloading.DataLoader(
        store.graph, seeds, sampler, batch_size=16, device=store.device
    )
    return list(loader)


def _as_one_machine(options: dict) -> None:
    g = power_law()
    draw = torch.Generator().manual_seed(dist.get_rank())
    seeds = torch.randperm(NODES, generator=draw)[:100]
    with (
        GlobalStore.from_dgl(g, seed=5, span="job", **options) as store,
        GlobalStore.from_dgl(g, seed=5) as whole,
    ):
        for fanouts, replaced in (([4, 3], False), ([3, 2, 5], True), ([-1, 5], False)):
            pairs = zip(
                _batches(store, seeds, fanouts, replace=replaced),
                _batches(whole, seeds, fanouts, replace=replaced),
                strict=True,
            )
            for (inputs, outputs, blocks), (others, _, expected) in pairs:
                assert torch.equal(inputs, others)
                for block, other in zip(blocks, expected, strict=True):
                    assert all(map(torch.equal, block.edges(), other.edges()))
                    assert torch.equal(block.edata[dgl.EID], other.edata[dgl.EID])
                rows = blocks[0].srcdata["feat"].cpu()
                assert torch.equal(rows, g.ndata["feat"][inputs.cpu()])
                labels = blocks[-1].dstdata["label"].cpu()
                assert torch.equal(labels, g.ndata["label"][outputs.cpu()])
        ids = torch.randint(NODES, (5000,), generator=draw)
        for name in "feat", "label", "number":
            rows = store.gather(name, ids.to(store.device)).cpu()
            assert torch.equal(rows.long(), g.ndata[name][ids].long())
        halves = store.gather("feat", ids.to(store.device), dtype=torch.float16).cpu()
        assert torch.equal(halves, g.ndata["feat"][ids].half())
        assert store.graph.traffic.take().nbytes["feat", "remote"] > 0


@on_gpus
@pytest.mark.parametrize(
    "options",
    [{"replica_ratio": 0.0}, {"replica_ratio": 0.3}, {"replica_ratio": 0.1, "gpu_memory": 20_000}],
)
def test_machines_with_gpus_are_as_one(ranks: RankProcesses, options: dict) -> None:
    ranks.run(on_machines, "abc", _as_one_machine, options)

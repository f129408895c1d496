"""Graphs of stores over machines, and their mini-batches against those of one machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import dgl
import pytest
import torch

from dgl_mgpu import GlobalStore
from dgl_mgpu.ops import device
from dgl_mgpu.store.graph import StoreGraph
from tests.kernels.emulator import EmulatedDriver

NODES, EDGES, WIDTH = 600, 6_000, 16


def power_law() -> dgl.DGLGraph:
    """A few nodes are the sources of most edges."""
    draw = torch.Generator().manual_seed(0)
    hot = (NODES * torch.rand(EDGES, generator=draw) ** 3).long()
    # Hot nodes are anywhere among the ids.
    sources = torch.randperm(NODES, generator=draw)[hot]
    g = dgl.graph((sources, torch.randint(NODES, (EDGES,), generator=draw)), num_nodes=NODES)
    g.ndata["feat"] = torch.randn(NODES, WIDTH, generator=draw)
    g.ndata["label"] = torch.randint(5, (NODES,), generator=draw)
    g.ndata["number"] = torch.arange(NODES).to(torch.uint16)
    g.edata["w"] = torch.rand(EDGES, 2, generator=draw)
    return g


def of_two_types() -> dgl.DGLGraph:
    draw = torch.Generator().manual_seed(1)

    def ends(first: int, second: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.randint(first, (count,), generator=draw),
            torch.randint(second, (count,), generator=draw),
        )

    g = dgl.heterograph(
        {
            ("user", "follows", "user"): ends(40, 40, 300),
            ("user", "buys", "item"): ends(40, 70, 400),
            ("item", "bought", "user"): ends(70, 40, 350),
        },
        {"user": 40, "item": 70},
    ).int()
    g.nodes["user"].data["feat"] = torch.randn(40, 3, generator=draw).half()
    g.nodes["item"].data["feat"] = torch.randn(70, 5, generator=draw)
    return g


def batches(graph: StoreGraph, seeds: Any, sampler: Any) -> list[tuple]:
    graph.set_epoch(1)
    on_device = (
        seeds.to(graph.device)
        if isinstance(seeds, torch.Tensor)
        else {ntype: ids.to(graph.device) for ntype, ids in seeds.items()}
    )
    return list(
        dgl.dataloading.DataLoader(graph, on_device, sampler, batch_size=16, device=graph.device)
    )


def assert_same_batches(g: dgl.DGLGraph, spanning: GlobalStore, sampler: Any, seeds: Any) -> None:
    """As a store of one machine on the CPU makes them; each rank has seeds of its own, or none."""
    with GlobalStore.from_dgl(g, seed=5, device="cpu") as whole:
        expected = batches(whole.graph, seeds, sampler)
        found = batches(spanning.graph, seeds, sampler)
        assert len(found) == len(expected) > 0
        for (inputs, outputs, blocks), (other_inputs, other_outputs, others) in zip(
            found, expected, strict=True
        ):
            assert equal(inputs, other_inputs) and equal(outputs, other_outputs)
            for block, other in zip(blocks, others, strict=True):
                assert block.device.type == spanning.device.type
                for etype in g.canonical_etypes:
                    for ends in zip(
                        block.edges(etype=etype), other.edges(etype=etype), strict=True
                    ):
                        assert equal(*ends)
                    eids = block.edges[etype].data[dgl.EID]
                    assert equal(eids, other.edges[etype].data[dgl.EID])
                for ntype in g.ntypes:
                    ids = block.srcnodes[ntype].data[dgl.NID]
                    assert equal(ids, other.srcnodes[ntype].data[dgl.NID])
            for ntype in g.ntypes:
                for nodes in blocks[0].srcnodes[ntype].data, blocks[-1].dstnodes[ntype].data:
                    ids = nodes[dgl.NID].cpu().long()
                    # Features that were not prefetched are asked for now, by all ranks in one
                    # order, which that of a set of names is not: each process has its own.
                    for name in "feat", "label":
                        if name in nodes:
                            assert equal(nodes[name], g.nodes[ntype].data[name][ids])
                assert "feat" in blocks[0].srcnodes[ntype].data


def equal(rows: Any, others: Any) -> bool:
    """Whether tensors, or those of dicts, are alike, wherever they are."""
    if isinstance(rows, torch.Tensor):
        return torch.equal(rows.cpu(), others.cpu())
    return rows.keys() == others.keys() and all(equal(rows[key], others[key]) for key in rows)


@contextlib.contextmanager
def emulated_gpus(store: GlobalStore) -> Iterator[EmulatedDriver]:
    """Sample over machines by the kernels for GPUs, which an emulator runs."""
    driver = EmulatedDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "driver", driver)
        patch.setattr(store.graph._structure.others, "_have_gpus", True)
        yield driver

"""Features of what is sampled from stores on GPUs, which are read when they are looked at."""

from __future__ import annotations

import importlib.util

import dgl
import pytest
import torch
from dgl.dataloading import DataLoader, NeighborSampler, as_edge_prediction_sampler
from dgl.dataloading.negative_sampler import GlobalUniform

import dgl_mgpu
from tests.sampling.loaders import node_graph, typed_graph

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)

_MEMORY = [{}, {"policy": "host"}, {"gpu_memory": "24KiB"}]


def assert_rows_are(g, part, device):
    """Features of a graph's nodes and edges are those of ``g``, and on a device."""
    sides = ((part.srcnodes, part.srctypes), (part.dstnodes, part.dsttypes))
    for side, ntypes in sides if part.is_block else ((part.nodes, part.ntypes),):
        for ntype in ntypes:
            data = side[ntype].data
            ids = data[dgl.NID].cpu() if dgl.NID in data else g.nodes(ntype)
            for name, rows in g.nodes[ntype].data.items():
                assert data[name].device.type == device
                assert torch.equal(data[name].cpu(), rows[ids.long()])
    for etype in g.canonical_etypes:
        data = part.edges[etype].data
        for name, rows in g.edges[etype].data.items():
            assert torch.equal(data[name].cpu(), rows[data[dgl.EID].cpu().long()])


@pytest.mark.parametrize("ahead", ["0", "1"])
@pytest.mark.parametrize("memory", _MEMORY, ids=["gpu", "host", "both"])
def test_blocks_have_features_also_if_they_are_made_ahead(memory, ahead, monkeypatch):
    monkeypatch.setenv("DGL_MGPU_PREFETCH", ahead)
    for g, seeds in (
        (node_graph("cpu"), torch.arange(200)),
        (typed_graph("cpu"), {"user": torch.arange(60), "item": torch.arange(40)}),
    ):
        with dgl_mgpu.GlobalStore.from_dgl(g, device="cuda", **memory) as store:
            loader = DataLoader(store.graph, seeds, NeighborSampler([3, 3]), batch_size=20)
            for _ in range(2):
                for _, _, blocks in loader:
                    for block in blocks:
                        assert_rows_are(g, block, "cuda")
                        assert_rows_are(g, block.to("cpu"), "cpu")


def test_what_nobody_looks_at_is_not_read():
    with dgl_mgpu.GlobalStore.from_dgl(node_graph("cpu"), device="cuda") as store:
        loader = DataLoader(store.graph, torch.arange(100), NeighborSampler([3]), batch_size=20)
        assert all("feat" in blocks[0].srcdata.keys() for *_, blocks in loader)  # noqa: SIM118
        assert not store.graph.traffic.take().rows


def test_pairs_and_frontiers_have_features():
    g = node_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g, device="cuda", edges=True) as store:
        sampler = as_edge_prediction_sampler(
            NeighborSampler([3]), negative_sampler=GlobalUniform(2)
        )
        for _, pairs, _, blocks in DataLoader(
            store.graph, torch.arange(200), sampler, batch_size=50
        ):
            assert_rows_are(g, pairs, "cuda")
            assert_rows_are(g, blocks[0], "cuda")
        seeds = torch.arange(30, device="cuda")
        frontier = dgl.sampling.sample_neighbors(store.graph, seeds, 3)
        eids = frontier.edata[dgl.EID]
        block = dgl.to_block(frontier, seeds)
        block.edata[dgl.EID] = eids
        assert_rows_are(g, frontier, "cuda")
        assert_rows_are(g, block, "cuda")


@pytest.mark.parametrize("memory", _MEMORY, ids=["gpu", "host", "both"])
def test_degrees_and_writes(memory):
    g = node_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g, device="cuda", **memory) as store:
        graph, ids = store.graph, torch.tensor([7, 0, 299], device="cuda")
        assert torch.equal(graph.in_degrees().cpu(), g.in_degrees())
        assert torch.equal(graph.in_degrees(ids).cpu(), g.in_degrees(ids.cpu()))
        loader = DataLoader(graph, ids, NeighborSampler([2]), batch_size=1)
        expected = g.ndata["feat"].clone()
        for number, (inputs, _, [block]) in enumerate(loader):
            graph.ndata["feat"][ids] = torch.full((3, 5), float(number))
            expected[ids.cpu()] = float(number)
            assert torch.equal(block.srcdata["feat"].cpu(), expected[inputs.cpu()])
        assert torch.equal(graph.ndata["feat"][:].cpu(), expected)
        graph.ndata["feat"] = g.ndata["feat"]
        assert torch.equal(graph.ndata["feat"][:].cpu(), g.ndata["feat"])


def test_loaders_made_anew_draw_anew():
    with dgl_mgpu.GlobalStore.from_dgl(node_graph("cpu"), device="cuda") as store:
        drawn = [
            [
                blocks[0].edata[dgl.EID].tolist()
                for *_, blocks in DataLoader(
                    store.graph, torch.arange(90), NeighborSampler([3]), batch_size=30
                )
            ]
            for _ in range(2)
        ]
        assert drawn[0] != drawn[1]

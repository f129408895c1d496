"""A graph whose features stores keep in narrower types, and what they are to give."""

from __future__ import annotations

import dgl
import torch
from dgl.dataloading import DataLoader, NeighborSampler

import dgl_mgpu

NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
NUM_NODES = 400


def rounded(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows.to(dtype).to(rows.dtype)


def graph(dtype: torch.dtype = torch.float32) -> dgl.DGLGraph:
    draw = torch.Generator().manual_seed(3)
    src, dst = torch.randint(NUM_NODES, (2, 4000), generator=draw)
    g = dgl.graph((src, dst), num_nodes=NUM_NODES)
    g.ndata["feat"] = 9 * torch.randn(NUM_NODES, 7, generator=draw, dtype=dtype)
    g.ndata["other"] = torch.randn(NUM_NODES, 3, generator=draw)
    g.ndata["label"] = torch.arange(NUM_NODES) % 5
    g.edata["feat"] = torch.randn(4000, generator=draw)
    return g


def assert_right(store: dgl_mgpu.GlobalStore, g: dgl.DGLGraph, dtype: torch.dtype) -> None:
    ids = torch.arange(NUM_NODES, device=store.device).flip(0)
    g = g.to(store.device)
    expected = rounded(g.ndata["feat"], dtype)
    assert not torch.equal(expected, g.ndata["feat"])
    found = store.gather("feat", ids)
    assert found.dtype == g.ndata["feat"].dtype
    assert torch.equal(found, expected[ids])
    assert torch.equal(store.gather("feat", ids, dtype=torch.float64), expected[ids].double())
    for name in ("other", "label"):
        assert torch.equal(store.gather(name, ids), g.ndata[name][ids])
    storage = store.graph.get_node_storage("feat")
    assert storage.dtype == found.dtype and storage.view.dtype == dtype
    sampler = NeighborSampler([3, 3], prefetch_node_feats=["feat"], prefetch_edge_feats=["feat"])
    for inputs, _, blocks in DataLoader(store.graph, ids[::3], sampler, batch_size=50):
        assert torch.equal(blocks[0].srcdata["feat"], expected[inputs])
        edges = blocks[1].edata[dgl.EID]
        assert torch.equal(blocks[1].edata["feat"], g.edata["feat"][edges])

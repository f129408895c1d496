"""Random walks and PinSAGE's samplers on a store in GPU memory: the same as of one on the CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from dgl.sampling import PinSAGESampler, random_walk

import dgl_mgpu
from tests.store.test_random_walks import METAPATH, of_items_and_buyers, shop, walks_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_walks_are_those_of_a_store_on_the_cpu(idtype, share):
    whole = shop(idtype)
    g = of_items_and_buyers(whole)
    with (
        dgl_mgpu.GlobalStore.from_dgl(g, seed=3, device="cpu") as there,
        dgl_mgpu.GlobalStore.from_dgl(
            g, seed=3, device="cuda", graph_ratio=share, feature_ratio=share
        ) as here,
        dgl_mgpu.GlobalStore.from_dgl(whole, seed=3, device="cuda") as of_all,
    ):
        for found, expected in zip(walks_of(here.graph), walks_of(there.graph), strict=True):
            assert torch.equal(found.cpu(), expected)
        seeds = torch.arange(9, dtype=idtype)
        sampler = PinSAGESampler(here.graph, "item", "user", 2, 0.5, 10, 3)
        assert sampler(seeds.cuda()).device == sampler(seeds).device == here.device
        traces = random_walk(of_all.graph, seeds, metapath=METAPATH, restart_prob=0.2)[0]
        assert traces.device == of_all.device and torch.equal(traces[:, 0].cpu(), seeds)
        neighbors = of_all.graph.pinsage_neighbors(seeds, 10, 2, 3, METAPATH)
        assert neighbors.device == of_all.device and neighbors.in_degrees().max() == 3

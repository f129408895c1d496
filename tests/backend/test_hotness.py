from __future__ import annotations

import dgl
import numpy as np
import torch
from dgl.dataloading import DataLoader, NeighborSampler

import dgl_mgpu
from dgl_mgpu.backend.hotness import degree_hotness, presample_hotness
from dgl_mgpu.backend.store import _from_dgl
from tests.backend.test_graph import hetero_graph, power_law_graph


def graph_of(g):
    data = _from_dgl(g, None)
    return data.schema.num_nodes, data.schema.canonical_etypes, data.sources


def test_degree_hotness_counts_how_often_a_node_is_a_neighbour():
    g = power_law_graph()
    assert np.array_equal(degree_hotness(*graph_of(g))["_N"], g.out_degrees().numpy())
    h = hetero_graph()
    expected = h.out_degrees(etype="follows") + h.out_degrees(etype="buys")
    assert np.array_equal(degree_hotness(*graph_of(h))["user"], expected.numpy())


def test_presampling_counts_the_input_nodes_of_mini_batches():
    g = power_law_graph()
    seeds = torch.arange(0, 800, 4)
    counts = presample_hotness(*graph_of(g), seeds, [5, 5], 50, seed=0)["_N"]
    # What is not within two hops is never read.
    near = dgl.khop_in_subgraph(g, seeds, 2)[0].ndata[dgl.NID]
    assert counts[np.setdiff1d(np.arange(800), near)].sum() == 0
    # DGL's own sampler reads nodes as often.
    rng, theirs = np.random.default_rng(0), np.zeros(800)
    for _ in range(64):
        batch = seeds[torch.from_numpy(rng.choice(200, 50, False))]
        inputs, _, _ = NeighborSampler([5, 5]).sample_blocks(g, batch)
        theirs[inputs] += 1
    # Each is a sum of 64 zeros and ones; of 800 differences none is beyond 6 deviations.
    assert np.abs(counts - theirs).max() < 6 * (2 * 64 / 4) ** 0.5


def test_presampling_covers_every_node_type():
    counts = presample_hotness(
        *graph_of(hetero_graph()), {"user": torch.arange(10)}, [3, 3], 5, seed=0
    )
    assert counts["user"].sum() > 10
    assert counts["item"].sum() > 0


def test_a_store_keeps_what_mini_batches_read_where_it_is_near():
    g = power_law_graph()
    seeds = torch.arange(0, 800, 4)
    shares = {}
    for hotness in ("degree", "presample"):
        store = dgl_mgpu.GlobalStore.from_dgl(
            g, seeds=seeds, hotness=hotness, feature_ratio=0.3, batch_size=50, fanouts=[5, 5]
        )
        sampler = NeighborSampler([5, 5], prefetch_node_feats=["feat"])
        for _ in DataLoader(store.graph, seeds, sampler, batch_size=50):
            pass
        rows = store.graph.traffic.take().rows
        shares[hotness] = rows["feat", "device"] / sum(rows.values())
    assert shares["presample"] > shares["degree"] > 0.3

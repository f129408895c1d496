"""A store's graph in DGL's own DataLoader and samplers, against the DGLGraph it was made from."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import subprocess
import sys
from functools import partial

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import (
    DataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
)

import dgl_mgpu
from dgl_mgpu.errors import (
    ConfigError,
    IdOutOfRangeError,
    InvalidInputError,
    InvalidWeightError,
    PlanDoesNotFitError,
    RankFailedError,
    StoreClosedError,
    UnsupportedByStoreError,
)
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.ops.sample_future import SampleFuture
from dgl_mgpu.ops.view import EIDS, PAIRED
from dgl_mgpu.train.launch.launch import launch
from tests.environment import search_path

pytestmark = pytest.mark.usefixtures("in_shared_memory")


def power_law_graph(num_nodes: int = 800, num_edges: int = 8000, idtype=torch.int64):
    rng = np.random.default_rng(5)
    weights = rng.pareto(1.5, num_nodes) + 0.1
    src = rng.choice(num_nodes, num_edges, p=weights / weights.sum())
    dst = rng.integers(0, num_nodes, num_edges)
    g = dgl.graph((src, dst), num_nodes=num_nodes).astype(idtype)
    g.ndata["feat"] = torch.from_numpy(rng.standard_normal((num_nodes, 6))).float()
    g.ndata["label"] = torch.arange(num_nodes) % 7
    g.edata["w"] = torch.from_numpy(rng.random(num_edges)).float() + 0.01
    g.edata["mask"] = torch.from_numpy(rng.random(num_edges) < 0.5)
    return g


def hetero_graph():
    rng = np.random.default_rng(6)

    def pairs(a, b, n):
        return torch.from_numpy(rng.integers(0, a, n)), torch.from_numpy(rng.integers(0, b, n))

    g = dgl.heterograph(
        {
            ("user", "follows", "user"): pairs(50, 50, 300),
            ("user", "buys", "item"): pairs(50, 30, 200),
            ("item", "bought-by", "user"): pairs(30, 50, 200),
        },
        {"user": 50, "item": 30},
    )
    for ntype in g.ntypes:
        g.nodes[ntype].data["feat"] = torch.randn(g.num_nodes(ntype), 4)
    g.edges["buys"].data["price"] = torch.rand(200)
    return g


def batches(graph, ids, sampler, **options):
    options = {"batch_size": 64} | options
    return list(DataLoader(graph, ids, sampler, **options))


def assert_blocks_are_in_graph(g, blocks):
    """Every sampled edge is the edge of its id, and features are the graph's."""
    for block in blocks:
        src, dst = block.edges()
        eids = block.edata[dgl.EID]
        true_src, true_dst = g.find_edges(eids)
        assert torch.equal(block.srcdata[dgl.NID][src.long()], true_src)
        assert torch.equal(block.dstdata[dgl.NID][dst.long()], true_dst)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("memory", ["auto", "8KiB"])
def test_full_neighbours_equal_dgls(idtype, memory, tmp_path):
    g = power_law_graph(idtype=idtype)
    store = dgl_mgpu.GlobalStore.from_dgl(
        g,
        gpu_memory=memory,
        host_memory="60KiB" if memory != "auto" else "auto",
        disk_path=tmp_path,
    )
    if memory != "auto":  # every kind of memory takes part
        used = {tier.memory for table in store.plan.tables.values() for tier in table.tiers}
        assert used == {"gpu", "host", "disk"}
    ids = torch.arange(0, 800, 3, dtype=idtype)
    # DGL's fused sampler, its default, loses nodes of int32 graphs from the second batch on.
    sampler = MultiLayerFullNeighborSampler(
        2,
        prefetch_node_feats=["feat"],
        prefetch_labels=["label"],
        prefetch_edge_feats=["w"],
        fused=False,
    )
    for ours, theirs in zip(
        batches(store.graph, ids, sampler), batches(g, ids, sampler), strict=True
    ):
        assert torch.equal(ours[1], theirs[1])
        assert set(ours[0].tolist()) == set(theirs[0].tolist())
        for block, reference in zip(ours[2], theirs[2], strict=True):
            assert block.idtype == idtype
            assert sorted(block.edata[dgl.EID].tolist()) == sorted(
                reference.edata[dgl.EID].tolist()
            )
            assert torch.equal(block.edata["w"], g.edata["w"][block.edata[dgl.EID].long()])
        assert_blocks_are_in_graph(g, ours[2])
        assert torch.equal(ours[2][0].srcdata["feat"], g.ndata["feat"][ours[0].long()])
        assert torch.equal(ours[2][-1].dstdata["label"], g.ndata["label"][ours[1].long()])


@pytest.mark.parametrize("kept", ["no ids", "ids in order", "ids of their own"])
def test_graphs_given_in_csc(kept):
    indptr, indices, _ = power_law_graph().adj_tensors("csc")
    eids = {
        "no ids": torch.tensor([], dtype=torch.int64),
        "ids in order": torch.arange(len(indices)),
        "ids of their own": torch.randperm(len(indices)),
    }[kept]
    g = dgl.graph(("csc", (indptr, indices, eids)))
    store = dgl_mgpu.GlobalStore.from_dgl(g, graph_ratio=0.4)
    view = store.graph.view()
    assert len(view.tiers) > 1
    assert (view.pointers[:, EIDS] == PAIRED).all() == (kept != "ids of their own")
    ids = torch.arange(0, 800, 3)
    for _, _, blocks in batches(store.graph, ids, NeighborSampler([5, 5])):
        assert_blocks_are_in_graph(g, blocks)


def test_sampling_respects_fanout_mask_and_replacement():
    g = power_law_graph()
    graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
    ids = torch.arange(800)
    degrees = g.in_degrees()
    for options, expected in (
        ({}, degrees.clamp(max=4)),
        ({"replace": True}, torch.where(degrees > 0, 4, 0)),
    ):
        _, _, (block,) = next(
            iter(DataLoader(graph, ids, NeighborSampler([4], **options), batch_size=800))
        )
        assert torch.equal(block.in_degrees(), expected)
        assert_blocks_are_in_graph(g, [block])
    masked = NeighborSampler([-1], mask="mask")
    _, _, (block,) = next(iter(DataLoader(graph, ids, masked, batch_size=800)))
    chosen = block.edata[dgl.EID]
    assert sorted(chosen.tolist()) == g.edata["mask"].nonzero().flatten().tolist()


def test_excluded_edges_stay_out():
    g = power_law_graph()
    graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
    excluded = torch.arange(0, 8000, 2)
    frontier = graph.sample_neighbors(torch.arange(800), -1, exclude_edges=excluded)
    assert sorted(frontier.edata[dgl.EID].tolist()) == list(range(1, 8000, 2))


def test_heterogeneous_graph():
    g = hetero_graph()
    graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
    assert graph.ntypes == g.ntypes
    assert graph.canonical_etypes == g.canonical_etypes
    assert graph.num_edges("buys") == 200
    ids = {"user": torch.arange(20), "item": torch.arange(10)}
    sampler = NeighborSampler(
        [3, 2],
        prefetch_node_feats={"user": ["feat"], "item": ["feat"]},
        prefetch_edge_feats={("user", "buys", "item"): ["price"]},
    )
    for inputs, _, blocks in batches(graph, ids, sampler, batch_size=8):
        for ntype, nodes in inputs.items():
            assert torch.equal(
                blocks[0].srcnodes[ntype].data["feat"], g.nodes[ntype].data["feat"][nodes]
            )
        for block in blocks:
            for etype in g.canonical_etypes:
                src, dst = block.edges(etype=etype)
                eids = block.edges[etype].data[dgl.EID]
                true_src, true_dst = g.find_edges(eids, etype=etype)
                assert torch.equal(block.srcnodes[etype[0]].data[dgl.NID][src], true_src)
                assert torch.equal(block.dstnodes[etype[2]].data[dgl.NID][dst], true_dst)
    frontier = graph.sample_neighbors(
        {"user": torch.arange(50), "item": torch.arange(30)},
        {"follows": -1, "buys": 0, "bought-by": 1},
    )
    assert frontier.num_edges("follows") == 300
    assert frontier.num_edges("buys") == 0
    assert frontier.in_degrees(etype="bought-by").max() == 1


def sampled_edges(graph, seed, ids, **options):
    """Edge ids of every block of every batch of two epochs.

    Batches are sorted: with several workers DGL gives each a stretch of the epoch, and hands
    their batches out in turn.
    """
    torch.manual_seed(seed)
    loader = DataLoader(graph, ids, NeighborSampler([4, 4]), batch_size=64, **options)
    return [
        sorted([block.edata[dgl.EID].tolist() for block in blocks] for _, _, blocks in loader)
        for _ in range(2)
    ]


def test_samples_depend_on_the_seed_alone(tmp_path):
    g = power_law_graph()
    ids = torch.arange(0, 800, 2)
    reference = sampled_edges(dgl_mgpu.GlobalStore.from_dgl(g, seed=1).graph, 0, ids)
    assert reference[0] != reference[1]  # epochs differ
    for options, loader_options in (
        ({}, {}),
        ({"gpu_memory": "8KiB", "host_memory": "60KiB", "disk_path": tmp_path}, {}),
        ({"policy": "host"}, {}),
        ({}, {"num_workers": 1}),
        ({}, {"num_workers": 3}),
        ({}, {"num_workers": 2, "persistent_workers": True}),
    ):
        graph = dgl_mgpu.GlobalStore.from_dgl(g, seed=1, **options).graph
        assert sampled_edges(graph, 7, ids, **loader_options) == reference
    other = sampled_edges(dgl_mgpu.GlobalStore.from_dgl(g, seed=2).graph, 0, ids)
    assert other != reference


SPAWN_SCRIPT = """
import dgl_mgpu
import sys
import torch
from functools import partial
from tests.store.test_graph import power_law_graph, sampled_edges

if __name__ == "__main__":
    make = partial(dgl_mgpu.GlobalStore.from_dgl, power_law_graph(), seed=1, device="cpu")
    ids = torch.arange(0, 800, 2)
    plain = sampled_edges(make().graph, 0, ids)
    graph = make().graph
    options = {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True}
    sys.exit(sampled_edges(graph, 0, ids, **options) != plain)
"""


def test_a_store_reaches_spawned_workers(tmp_path):
    (tmp_path / "script.py").write_text(SPAWN_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": search_path()}
    subprocess.run([sys.executable, tmp_path / "script.py"], check=True, env=environment)


def test_hops_of_a_batch_are_drawn_independently():
    # One node whose every neighbour has the same neighbours: all hops see the same seeds.
    n = 40
    src, dst = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    g = dgl.graph((src.flatten(), dst.flatten()))
    graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
    seeds = torch.arange(n)
    first = graph.sample_neighbors(seeds, 5).edata[dgl.EID]
    second = graph.sample_neighbors(seeds, 5).edata[dgl.EID]
    shared = len(set(first.tolist()) & set(second.tolist()))
    # 200 of 1600 edges each time: 25 are shared on average, with deviation below 5.
    assert shared < 25 + 6 * 5


def test_edges_to_leave_out_are_ids():
    graph = dgl_mgpu.GlobalStore.from_dgl(power_law_graph()).graph
    for edges in (torch.tensor([1.0]), torch.tensor([True]), torch.tensor([[1], [2]])):
        with pytest.raises(InvalidInputError, match="edge ids"):
            graph.sample_neighbors(torch.arange(5), 3, exclude_edges=edges)
    assert 7 not in graph.sample_neighbors(torch.arange(800), -1, exclude_edges=7).edata[dgl.EID]
    with pytest.raises(InvalidInputError, match="fanout is True"):
        graph.sample_neighbors(torch.arange(5), True)
    assert graph.sample_neighbors(3, 2).num_edges() <= 2  # one node, as in DGL


def test_a_block_is_no_graph_to_store():
    g = power_law_graph()
    with pytest.raises(InvalidInputError, match="a block"):
        dgl_mgpu.GlobalStore.from_dgl(dgl.to_block(g))


def test_sampled_edges_are_uniform():
    g = power_law_graph()
    graph = dgl_mgpu.GlobalStore.from_dgl(g, seed=3).graph
    node = int(g.in_degrees().argmax())
    degree = int(g.in_degrees(node))
    assert degree > 12
    draws, fanout = 4000, 5
    counts = torch.zeros(8000)
    for epoch in range(draws):
        graph.set_epoch(epoch)
        eids = graph.sample_neighbors(torch.tensor([node]), fanout).edata[dgl.EID]
        counts[eids] += 1
    counts = counts[g.in_edges(node, form="eid")]
    expected = draws * fanout / degree
    share = fanout / degree
    # Each count is a binomial; their normalised sum of squares is near its degrees of freedom.
    statistic = float(((counts - expected) ** 2 / (expected * (1 - share))).sum())
    freedom = degree - 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def test_traffic_counts_every_row_once(tmp_path):
    g = power_law_graph()
    store = dgl_mgpu.GlobalStore.from_dgl(g, feature_ratio=0.3)
    rows = store.gather("feat", torch.arange(800))
    assert torch.equal(rows, g.ndata["feat"])
    traffic = store.graph.traffic.take()
    assert sum(traffic.rows.values()) == 800
    assert {memory for _, memory in traffic.rows} == {"device", "host"}
    assert sum(traffic.nbytes.values()) == 800 * 6 * 4
    assert not store.graph.traffic.take().rows


def test_bad_ids_are_refused():
    store = dgl_mgpu.GlobalStore.from_dgl(power_law_graph())
    for ids, error in (
        (torch.tensor([0, 800]), IdOutOfRangeError),
        (torch.tensor([-1]), IdOutOfRangeError),
        (torch.tensor([0.0]), InvalidInputError),
        (torch.tensor([[1], [2]]), InvalidInputError),
    ):
        with pytest.raises(error):
            store.gather("feat", ids)
        with pytest.raises(error):
            store.graph.sample_neighbors(ids, 3)
        with pytest.raises(error):
            store.graph.sample_blocks(ids, [3])
        with pytest.raises(error):
            next(iter(DataLoader(store.graph, ids, NeighborSampler([3]), batch_size=2)))
    mask = torch.zeros(800, dtype=torch.bool)
    with pytest.raises(InvalidInputError, match="nonzero"):
        next(iter(DataLoader(store.graph, mask, NeighborSampler([3]), batch_size=8)))
    narrow = dgl_mgpu.GlobalStore.from_dgl(power_law_graph(idtype=torch.int32))
    with pytest.raises(IdOutOfRangeError):
        narrow.graph.sample_blocks(torch.tensor([2**32 + 5]), [3])


def test_a_batch_that_comes_again_is_sampled_the_same():
    graph = dgl_mgpu.GlobalStore.from_dgl(power_law_graph()).graph
    seeds = torch.arange(50)

    def eids():
        graph.set_epoch(0)
        (_, _, blocks) = next(
            iter(DataLoader(graph, seeds, NeighborSampler([4, 4]), batch_size=50))
        )
        return [block.edata[dgl.EID].tolist() for block in blocks]

    assert eids() == eids()
    first, second = graph.sample_blocks(seeds, [4, 4])[2], graph.sample_blocks(seeds, [4, 4])[2]
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.edata[dgl.EID], other.edata[dgl.EID])


def test_blocks_are_those_of_sampling_hop_by_hop():
    g = power_law_graph()
    graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
    seeds = torch.arange(0, 800, 9)
    for _, blocks in zip(range(2), [graph.sample_blocks(seeds, [4, 4])[2]] * 2, strict=True):
        graph.set_epoch(0)  # forgets the hop
        nodes = seeds
        for block in reversed(blocks):
            frontier = graph.sample_neighbors(nodes, 4)
            reference = dgl.to_block(frontier, nodes)
            expected = frontier.edata[dgl.EID][reference.edata[dgl.EID]]
            assert sorted(block.edata[dgl.EID].tolist()) == sorted(expected.tolist())
            assert torch.equal(block.dstdata[dgl.NID], nodes)
            nodes = block.srcdata[dgl.NID]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_uniform_blocks_are_those_that_are_made_for_graphs_of_all_types(idtype):
    """They are made in another way, of as few steps as may be."""
    graph = dgl_mgpu.GlobalStore.from_dgl(power_law_graph(idtype=idtype)).graph
    all_seeds = torch.arange(0, 800, 9), torch.tensor([7]), torch.arange(3)[:0]
    with tensor_backed_graphs():
        for seeds, fanouts, replace in itertools.product(
            all_seeds, ([4, 3], (2,), [-1, 0, 2], []), (False, True)
        ):
            seeds, options = seeds.to(idtype), {"replace": replace}
            inputs, outputs, blocks = graph.sample_blocks(seeds, fanouts, **options)
            hops = graph.sample_hops_async(seeds, fanouts, **options).result()
            expected = graph.blocks_of(hops, seeds)
            assert outputs is seeds and torch.equal(inputs, expected[0])
            for block, other in zip(blocks, expected[2], strict=True):
                assert (block.ntypes, block.canonical_etypes) == (
                    other.ntypes,
                    other.canonical_etypes,
                )
                for one, two in zip(
                    block.adj_tensors("csc"), other.adj_tensors("csc"), strict=True
                ):
                    assert torch.equal(one, two)
                for frames in (lambda b: b.srcdata, lambda b: b.dstdata, lambda b: b.edata):
                    assert frames(block).keys() == frames(other).keys()
                    for name, column in frames(block).items():
                        assert torch.equal(column, frames(other)[name])


def test_uniform_sampling_takes_what_it_can_and_says_what_is_wrong():
    store = dgl_mgpu.GlobalStore.from_dgl(power_law_graph())
    graph, seeds = store.graph, torch.arange(9)
    with tensor_backed_graphs():
        expected = graph.sample_blocks(seeds, [3])[2][0].edata[dgl.EID]
        for fanouts in ([{"_E": 3}], [3.0], [torch.tensor(3)], [np.int64(3)]):
            found = graph.sample_blocks(seeds.int().long(), fanouts)[2][0]
            assert torch.equal(found.edata[dgl.EID], expected)
        for odd, error in (
            (torch.tensor([0, 800]), IdOutOfRangeError),
            (torch.tensor([-1]), IdOutOfRangeError),
            (torch.tensor([[1], [2]]), InvalidInputError),
            (torch.tensor([0.5]), InvalidInputError),
        ):
            with pytest.raises(error):
                graph.sample_blocks(odd, [3])
        for fanouts in ([-2], [2.5], [True], ["3"]):
            with pytest.raises((InvalidInputError, TypeError)):
                graph.sample_blocks(seeds, fanouts)
        # Plans stay where their addresses are.
        copied = pickle.loads(pickle.dumps(graph))
        assert torch.equal(copied.sample_blocks(seeds, [3])[2][0].edata[dgl.EID], expected)
        future = graph.sample_blocks_async(seeds, [3])
        store.close()
        with pytest.raises(StoreClosedError):
            future.result()
        with pytest.raises(StoreClosedError):
            graph.sample_blocks(seeds, [3])


def test_weights_of_shape_edges_by_one_are_a_vector():
    # Every node has eight edges in, the last four of which may be drawn.
    g = dgl.graph((torch.randint(50, (400,)), torch.arange(400) % 50))
    g.edata["w"] = (torch.rand(400) + 0.1) * (torch.arange(400) >= 200)
    samples = []
    for shape in ((400,), (400, 1), (400, 1, 1)):
        g.edata["w"] = g.edata["w"].reshape(shape)
        graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
        _, _, (block,) = graph.sample_blocks(torch.arange(20), [3], "w")
        samples.append(block.edata[dgl.EID])
    assert all(torch.equal(eids, samples[0]) for eids in samples) and (samples[0] >= 200).all()


def test_features_without_bytes_are_refused_by_name():
    g = dgl.rand_graph(50, 400)
    g.ndata["nothing"] = torch.zeros(50, 0)
    with pytest.raises(InvalidInputError, match=r"'nothing' has shape \(50, 0\)"):
        dgl_mgpu.GlobalStore.from_dgl(g)
    assert dgl_mgpu.GlobalStore.from_dgl(dgl.graph([], num_nodes=0)).graph.num_nodes() == 0


@pytest.mark.parametrize("prob", [None, "price"])
def test_heterogeneous_blocks_are_those_of_sampling_hop_by_hop(prob):
    g = hetero_graph()
    graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
    seeds = {"user": torch.arange(0, 50, 9), "item": torch.arange(4)}
    fanouts = [{"follows": 2, "buys": 3, "bought-by": 0}, 2]
    inputs, _, blocks = graph.sample_blocks(seeds, fanouts, prob)
    graph.set_epoch(0)  # forgets the hop
    nodes = seeds
    for block, fanout in zip(reversed(blocks), reversed(fanouts), strict=True):
        frontier = graph.sample_neighbors(nodes, fanout, prob=prob)
        reference = dgl.to_block(frontier, nodes)
        for etype in g.canonical_etypes:
            eids = frontier.edges[etype].data[dgl.EID][reference.edges[etype].data[dgl.EID]]
            assert sorted(block.edges[etype].data[dgl.EID].tolist()) == sorted(eids.tolist())
            src, dst = block.edges(etype=etype)
            true_src, true_dst = g.find_edges(block.edges[etype].data[dgl.EID], etype=etype)
            assert torch.equal(block.srcnodes[etype[0]].data[dgl.NID][src], true_src)
            assert torch.equal(block.dstnodes[etype[2]].data[dgl.NID][dst], true_dst)
        for ntype in g.ntypes:
            assert torch.equal(block.dstnodes[ntype].data[dgl.NID], nodes[ntype])
        nodes = block.srcdata[dgl.NID]
    assert all(torch.equal(inputs[ntype], nodes[ntype]) for ntype in g.ntypes)


@pytest.mark.parametrize(
    "use",
    [
        lambda graph: graph.out_degrees(),
        lambda graph: graph.subgraph([1, 2]),
        lambda graph: next(
            iter(DataLoader(graph, torch.arange(4), dgl.dataloading.LaborSampler([3])))
        ),
        lambda graph: next(
            iter(DataLoader(graph, torch.arange(4), dgl.dataloading.ShaDowKHopSampler([3])))
        ),
    ],
)
def test_what_a_store_does_not_have_is_said(use):
    graph = dgl_mgpu.GlobalStore.from_dgl(power_law_graph()).graph
    with pytest.raises(UnsupportedByStoreError, match="NeighborSampler"):
        use(graph)
    assert not hasattr(graph, "out_degrees")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = graph.nonsense


def test_what_spares_a_graph_the_host_is_the_store_s_own_affair():
    graph = dgl_mgpu.GlobalStore.from_dgl(power_law_graph(), seed=1).graph
    read = partial(DataLoader, graph, torch.arange(40), NeighborSampler([3]), batch_size=10)
    graph.set_epoch(0)
    for found, expected in zip(read(use_uva=True), read(), strict=True):
        assert torch.equal(found[0], expected[0])
    with pytest.raises(UnsupportedByStoreError, match="leave gpu_cache out"):
        read(gpu_cache={"node": {"feat": 10}})


def test_a_store_is_closed_at_the_end_of_its_block():
    with pytest.raises(KeyError), dgl_mgpu.GlobalStore.from_dgl(power_law_graph()) as store:
        store.gather("feat", torch.arange(3))
        raise KeyError
    with pytest.raises(StoreClosedError):
        store.gather("feat", torch.arange(3))


def test_odd_arguments_are_refused():
    g = power_law_graph()
    make = dgl_mgpu.GlobalStore.from_dgl
    for bad in ({"topology": 3}, {"fanouts": 3}, {"batch_size": 0}):
        with pytest.raises(ConfigError):
            make(g, **bad)
    for seed in (-1, 1.5):
        with pytest.raises(InvalidInputError, match="seed"):
            make(g, seed=seed)
    with pytest.raises(InvalidInputError, match="DGLGraph"):
        make("graph")
    store = make(g)
    assert torch.equal(store.gather("feat", [3, 5]), g.ndata["feat"][[3, 5]])
    with pytest.raises(InvalidInputError):
        store.graph.sample_neighbors(torch.arange(3), 2.7)
    assert store.graph.sample_neighbors([], 2).num_edges() == 0


def _odd_arguments_on_one_rank() -> None:
    is_odd = dist.get_rank() == 1
    for odd, error in ({"gpu_memroy": "1GiB"}, ConfigError), ({"seed": -1}, InvalidInputError):
        with pytest.raises(error if is_odd else RankFailedError, match=next(iter(odd))):
            dgl_mgpu.GlobalStore.from_dgl(power_law_graph(), **odd if is_odd else {})


@pytest.mark.usefixtures("forked_ranks")
def test_odd_arguments_on_one_rank_are_told_on_all():
    launch(_odd_arguments_on_one_rank, 2)


def test_bad_weights_are_refused_before_work_starts():
    for spoil, message in (
        (lambda w, g: w.index_fill_(0, torch.tensor([17]), float("nan")), "(?i)nan"),
        (lambda w, g: w.index_fill_(0, torch.tensor([17]), -1.0), "negative|-1"),
        (lambda w, g: w.index_fill_(0, g.in_edges(5, form="eid"), 0.0), "node 5 have weight 0"),
    ):
        g = power_law_graph()
        spoil(g.edata["w"], g)
        graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
        for workers in (0, 2):
            loader = DataLoader(
                graph, torch.arange(10), NeighborSampler([3], prob="w"), num_workers=workers
            )
            with pytest.raises(InvalidWeightError, match=message):
                iter(loader)


def test_bad_options_are_refused():
    g = power_law_graph()
    make = dgl_mgpu.GlobalStore.from_dgl
    with pytest.raises(ConfigError, match=r"gpu_memroy.*did you mean 'gpu_memory'"):
        make(g, gpu_memroy="1GiB")
    with pytest.raises(ConfigError, match=r"cuda:0.*torch\.cuda\.set_device"):
        make(g, device=torch.device("cuda:0"))
    with pytest.raises(ConfigError, match="no such folder"):
        make(g, disk_path="/no/such/folder")
    with pytest.raises(InvalidInputError, match="from_dgl"):
        dgl_mgpu.GlobalStore.from_dataset(g)
    with pytest.raises(ConfigError, match="not a size"):
        make(g, gpu_memory="plenty")
    with pytest.raises(ConfigError, match=r"16 bytes, without a unit; .*like 16GiB"):
        make(g, gpu_memory=16)
    with pytest.raises(ConfigError, match=r"0\.5 bytes, without a unit"):
        make(g, gpu_memory=0.5)
    with pytest.raises(ConfigError, match=r"1\.5"):
        make(g, graph_ratio=1.5)
    for wrong in ({"batch_size": "many"}, {"batch_size": 2.5}, {"fanouts": [5, -2]}):
        with pytest.raises(ConfigError, match="no mini-batch"):
            make(g, **wrong)
    with pytest.raises(ConfigError):
        make(g, policy="best")
    with pytest.raises(PlanDoesNotFitError) as caught:
        make(g, gpu_memory="1KiB", host_memory="1KiB")
    assert caught.value.needed > caught.value.available
    with pytest.raises(InvalidInputError, match="first rank"):
        make(None)


def test_a_store_is_no_graph_and_says_which_is():
    g = power_law_graph()
    with dgl_mgpu.GlobalStore.from_dgl(g, device=torch.device("cpu")) as store:
        with pytest.raises(UnsupportedByStoreError, match=r"store\.graph"):
            next(iter(DataLoader(store, torch.arange(9), NeighborSampler([2]))))
        with pytest.raises(UnsupportedByStoreError, match=r"store\.graph"):
            store.ndata["feat"]
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = store.nothing
        assert "node/_N/feat" in repr(store) and "num_nodes" in repr(store)
    assert "closed" in repr(store)


@pytest.mark.parametrize("seeds", [{"a": [1, 2]}, {"a": [1], "z": [3, 0]}, {"z": [2, 3, 1]}])
@pytest.mark.parametrize("etypes", [1, 2])
def test_types_of_nodes_without_edges_are_in_blocks(etypes, seeds):
    edges = {("a", "r", "a"): ([0, 2], [1, 1]), ("a", "s", "b"): ([0], [1])}
    g = dgl.heterograph(dict([*edges.items()][:etypes]), {"a": 3, "b": 2, "z": 4})
    g.nodes["z"].data["x"] = torch.arange(4.0)
    seeds = {ntype: torch.tensor(ids) for ntype, ids in seeds.items()}
    # DGL's sampler of all hops at once loses such nodes.
    sampler = NeighborSampler([-1, -1], prefetch_node_feats={"z": ["x"]}, fused=False)
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        (expected,) = DataLoader(g, seeds, sampler, batch_size=3)
        (found,) = DataLoader(store.graph, seeds, sampler, batch_size=3)
    assert found[0].keys() == expected[0].keys()
    for ntype, nodes in expected[0].items():
        assert sorted(found[0][ntype].tolist()) == sorted(nodes.tolist())
    for ours, theirs in zip(found[2], expected[2], strict=True):
        assert (ours.srctypes, ours.dsttypes) == (theirs.srctypes, theirs.dsttypes)
        for ntype in g.ntypes:
            assert ours.num_src_nodes(ntype) == theirs.num_src_nodes(ntype)
            assert ours.num_dst_nodes(ntype) == theirs.num_dst_nodes(ntype)
    x = found[2][0].srcnodes["z"].data["x"]
    assert x.tolist() == [float(node) for node in found[0]["z"]]


def test_a_rank_of_torchrun_that_has_joined_no_job_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("multiprocessing.parent_process", lambda: None)
    g = power_law_graph()
    for use in (dgl_mgpu.GlobalStore.from_dgl, dgl_mgpu.partition_graph):
        with pytest.raises(InvalidInputError, match=r"init_process_group\(\) first"):
            use(g)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "a rank")
    dgl_mgpu.GlobalStore.from_dgl(g).close()


def test_missing_features_and_types_name_what_is_there():
    graph = dgl_mgpu.GlobalStore.from_dgl(hetero_graph()).graph
    with pytest.raises(InvalidInputError, match="did you mean 'feat'"):
        graph.get_node_storage("feet", "user")
    with pytest.raises(InvalidInputError, match="as a dict by type"):
        graph.get_node_storage("feat")
    with pytest.raises(InvalidInputError, match="user"):
        graph.get_node_storage("feat", "usr")
    with pytest.raises(InvalidInputError, match="buys"):
        graph.get_edge_storage("price", "sells")
    with pytest.raises(InvalidInputError, match="in-edges"):
        graph.sample_neighbors({"user": torch.arange(3)}, 2, edge_dir="out")
    with pytest.raises(InvalidInputError, match="fanout"):
        graph.sample_neighbors({"user": torch.arange(3)}, {"follows": 2})


def test_types_and_features_of_odd_names_are_not_mistaken_for_each_other():
    edges = {
        ("a", "r", "a:b"): ([0], [1]),
        ("a:r", "x", "b"): ([0], [0]),
        ("a", "r:x", "b"): ([1, 0], [0, 1]),
        ("a/b", "q", "a/b"): ([0], [0]),
    }
    g = dgl.heterograph(edges, dict.fromkeys(("a", "b", "a:b", "a:r", "a/b"), 2))
    g.nodes["a"].data["b/c"], g.nodes["a/b"].data["c"] = torch.zeros(2), torch.ones(2)
    store = dgl_mgpu.GlobalStore.from_dgl(g, embeddings={"a/b": {"b/c": 1}})
    for etype in g.canonical_etypes:
        assert store.graph.num_edges(etype) == g.num_edges(etype)
    with store.count_accesses() as accesses:
        assert store.gather("b/c", torch.arange(2), "a").tolist() == [0, 0]
        assert store.gather("c", torch.arange(1), "a/b").tolist() == [1]
    assert {ntype: each.tolist() for ntype, each in accesses.counts().items() if each.any()} == {
        "a": [1, 1], "a/b": [1, 0]
    }  # fmt: skip
    assert store.graph.has_feature("b/c")
    assert not store.graph.has_feature("b")
    with pytest.raises(InvalidInputError, match=r"holds \['b/c'\]; did you mean 'b/c'"):
        store.graph.get_node_storage("b/d", "a")


def test_features_of_a_relation_without_edges():
    g = dgl.heterograph(
        {("a", "none", "b"): ([], []), ("a", "some", "b"): ([0, 1], [1, 0])},
        num_nodes_dict={"a": 3, "b": 2},
    )
    for etype in ("none", "some"):
        g.edges[etype].data["w"] = torch.randn(g.num_edges(etype), 4)
    graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
    for etype, ids in (("none", []), ("some", [1, 0])):
        rows = torch.tensor(ids, dtype=torch.int64)
        found = graph.get_edge_storage("w", etype).fetch(rows, "cpu")
        assert torch.equal(found, g.edges[etype].data["w"][rows])


@pytest.mark.parametrize(
    ("old", "new", "arguments"),
    [
        ("begin_blocks", "sample_blocks_async", ([2, 2],)),
        ("begin_hops", "sample_hops_async", ([2, 2],)),
        ("begin_pinsage_blocks", "pinsage_blocks_async", (1, 3, 2, 2)),
    ],
)
def test_old_names_of_methods_that_start_samples(old, new, arguments):
    g = dgl.rand_graph(30, 90)
    with dgl_mgpu.GlobalStore.from_dgl(g, device="cpu") as store:
        future = getattr(store.graph, new)(torch.arange(5), *arguments)
        assert isinstance(future, SampleFuture)
        with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
            renamed = getattr(store.graph, old)(torch.arange(5), *arguments)
        assert len(renamed.result()) == len(future.result())


def test_the_old_name_of_start_epoch():
    with dgl_mgpu.GlobalStore.from_dgl(dgl.rand_graph(9, 9), device="cpu") as store:
        copied = store.graph.for_pass()
        store.graph.set_epoch(7)
        with pytest.warns(DeprecationWarning, match="begin_epoch is now start_epoch"):
            copied.begin_epoch(store.graph)
        assert copied._batch_keys.epoch == 7

"""One store over the machines of a job: its samples, rows and degrees against one machine."""

from __future__ import annotations

from functools import partial
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler, as_edge_prediction_sampler
from dgl.dataloading.negative_sampler import PerSourceUniform

from dgl_mgpu import GlobalStore
from dgl_mgpu.errors import (
    InvalidInputError,
    InvalidWeightError,
    RankFailedError,
)
from tests.ranks import RankProcesses, machines_on_gpus_too, on_machines
from tests.store.span_graphs import (
    EDGES,
    NODES,
    assert_same_batches,
    batches,
    emulated_gpus,
    equal,
    of_two_types,
    power_law,
)


def _as_one_machine(ratio: float | str, **options: Any) -> int:
    g = power_law()
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    seeds = torch.randperm(NODES, generator=draw)[:40]
    with GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=ratio, **options) as store:
        assert store.graph.num_edges() == EDGES and store.graph.num_nodes() == NODES
        features = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
        for fanouts, others in (
            ([4, 3], {}), ([3, 2, 5], {"replace": True}), ([-1, 5], {"replace": True}), ([20], {}),
        ):  # fmt: skip
            sampler = NeighborSampler(fanouts, **features, **others)
            assert_same_batches(g, store, sampler, seeds)
        frontier = store.graph.sample_neighbors(seeds.to(store.device), -1)
        in_edges = g.in_edges(seeds, form="eid")
        eids = frontier.edata[dgl.EID].cpu()
        assert torch.equal(eids.sort().values, in_edges.sort().values)
        assert equal(frontier.edata["w"], g.edata["w"][eids])
        ids = torch.randint(NODES, (50 * (rank % 2),), generator=draw)  # none on some ranks
        there = ids.to(store.device)
        assert equal(store.gather("feat", there), g.ndata["feat"][ids])
        assert equal(store.gather("label", there.int()), g.ndata["label"][ids])
        assert equal(store.gather("number", there).cpu().long(), ids)
        for dtype in torch.float64, torch.float16:
            rows = store.gather("feat", there, dtype=dtype)
            assert equal(rows, g.ndata["feat"][ids].to(dtype))
        assert equal(store.graph.ndata["feat"][:], g.ndata["feat"])
        assert ratio == "auto" or store.graph.traffic.take().nbytes["feat", "remote"] > 0
        return store.plan.tables["node/_N/feat"].tiers[-1].stop  # rows that are here


@machines_on_gpus_too
@pytest.mark.parametrize(
    ("ratio", "least", "most"), [(0, 0.75, 1.25), (0.1, 0.8, 1.6), ("auto", 3, 3)]
)
def test_machines_are_as_one(
    ranks: RankProcesses, ratio: float | str, least: float, most: float
) -> None:
    kept = ranks.run(on_machines, "abc", _as_one_machine, ratio)
    share = NODES / ranks.size
    for rows in kept:
        assert min(least * share, NODES) <= rows <= most * share
    assert sum(kept) >= NODES


@pytest.mark.parametrize("ranks", ["machines"], indirect=True)
def test_machines_whose_gpus_have_little_memory_are_as_one(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", partial(_as_one_machine, 0.1, gpu_memory=20_000))


def _with_little_memory() -> int:
    # Beside its part a machine has room for some replicas; of features, as hops are few.
    batches = {"batch_size": 16, "fanouts": [5]}
    return _as_one_machine("auto", gpu_memory=1024, host_memory=110_000, **batches)


def test_replicas_take_the_memory_that_there_is(ranks: RankProcesses) -> None:
    assert all(
        NODES / 3 < rows < NODES for rows in ranks.run(on_machines, "abc", _with_little_memory)
    )


def test_two_machines_of_two_ranks_are_as_one(four_ranks: RankProcesses) -> None:
    kept = four_ranks.run(on_machines, "aabb", _as_one_machine, 0.1)
    assert kept[0] == kept[1] and kept[2] == kept[3]


def _by_kernels() -> None:
    g, rank = power_law(), dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    seeds = torch.randperm(NODES, generator=draw)
    with (
        GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=0.1) as store,
        emulated_gpus(store) as driver,
    ):
        for options in {}, {"replace": True}:
            sampler = NeighborSampler([3, 4], prefetch_node_feats=["feat"], **options)
            assert_same_batches(g, store, sampler, seeds[: 35 + rank])
        # None on a rank; then far more than there is room for.
        for count in 20 * rank, 200:
            _, _, blocks = store.graph.sample_blocks(seeds[:count], [3, 4])
            assert blocks[-1].num_dst_nodes() == count
            for block, fanout in zip(blocks, [3, 4], strict=True):
                degrees = g.in_degrees(block.dstdata[dgl.NID])
                assert torch.equal(block.in_degrees(), degrees.clamp(max=fanout))
                in_edges = g.find_edges(block.edata[dgl.EID])
                ids = block.srcdata[dgl.NID], block.dstdata[dgl.NID]
                for of_block, end, expected in zip(ids, block.edges(), in_edges, strict=True):
                    assert torch.equal(of_block[end], expected)
        # None anywhere, of more neighbors than there is memory for.
        _, _, (block,) = store.graph.sample_blocks(seeds[:0], [1 << 40])
        assert block.num_src_nodes() == 0
        launched = {kernel.source for kernel in driver.launched}
        assert launched >= {"sample.cu", "answers.cu", "requests.cu", "unique.cu"}


def test_kernels_sample_as_on_one_machine(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _by_kernels)


def _of_a_type_without_edges() -> None:
    user = torch.arange(40)
    g = dgl.heterograph(
        {("user", "follows", "user"): (user, user.flip(0))}, {"user": 40, "item": 9}
    )
    seeds = {"item": torch.arange(9)}
    if dist.get_rank():
        seeds["user"] = user[:5]
    with GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store, emulated_gpus(store):
        inputs, _, (block,) = store.graph.sample_blocks(seeds, [2])
        assert len(inputs["item"]) == 9
        assert block.num_edges() == len(seeds.get("user", ()))


def test_kernels_sample_where_a_rank_has_seeds_of_another_type_alone(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _of_a_type_without_edges)


def _of_two_types_as_one() -> None:
    g = of_two_types()
    item = torch.arange(dist.get_rank(), 70, 7, dtype=torch.int32)
    seeds = {"user": torch.arange(8, dtype=torch.int32), "item": item}
    with GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=0.2) as store:
        features = {"user": ["feat"], "item": ["feat"]}
        sampler = NeighborSampler([3, 2], prefetch_node_feats=features)
        assert_same_batches(g, store, sampler, seeds)
        excluded = {"buys": torch.arange(0, 400, 3, dtype=torch.int32)}
        excluded, seeds = (
            {key: ids.to(store.device) for key, ids in of.items()} for of in (excluded, seeds)
        )
        found = store.graph.sample_blocks(seeds, [2, 2], exclude_edges=excluded)[2][1]
        assert not (found.edges["buys"].data[dgl.EID] % 3 == 0).any()


@machines_on_gpus_too
def test_several_types_are_as_on_one_machine(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _of_two_types_as_one)


def _by_weight() -> None:
    g, rank = power_law(), dist.get_rank()
    draw = torch.Generator().manual_seed(2)
    g.edata["weight"] = torch.rand(EDGES, generator=draw)
    g.edata["mask"] = torch.rand(EDGES, generator=draw) < 0.6
    bad = g.edata["weight"].clone()
    node = int(g.in_degrees().argmax())  # with edges, which one machine owns
    bad[g.in_edges(node, form="eid")] = 0
    g.edata["bad"] = bad
    seeds = torch.randperm(NODES, generator=draw)[rank : 100 + rank]
    with GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=0.05) as store:
        for options in {"prob": "weight"}, {"prob": "weight", "replace": True}, {"mask": "mask"}:
            sampler = NeighborSampler([4, 3], prefetch_node_feats=["feat"], **options)
            assert_same_batches(g, store, sampler, seeds)
        there = seeds.to(store.device)
        found = store.graph.sample_neighbors(there, 3, prob="mask")
        assert g.edata["mask"][found.edata[dgl.EID].cpu()].all()
        # Of a rank's own seeds, whose in-edges are another machine's to sample.
        with pytest.raises((InvalidWeightError, RankFailedError), match=f"node {node} have weight"):
            store.graph.sample_neighbors(torch.tensor([node], device=store.device), 3, prob="bad")
        with pytest.raises((InvalidWeightError, RankFailedError), match=f"node {node} have weight"):
            batches(store.graph, seeds, NeighborSampler([3], prob="bad"))
        with pytest.raises(InvalidInputError, match="the same in the same order"):
            store.graph.sample_neighbors(there, 3, prob="weight" if rank else "mask")
        assert equal(store.gather("feat", there), g.ndata["feat"][seeds])


@machines_on_gpus_too
def test_samples_by_weight_are_as_on_one_machine(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _by_weight)


def _of_edges() -> None:
    g, rank = power_law(), dist.get_rank()
    seeds = torch.arange(rank, EDGES, 50)
    sampler = as_edge_prediction_sampler(
        NeighborSampler([4, 3], prefetch_node_feats=["feat"]),
        exclude="self",
        negative_sampler=PerSourceUniform(2),
    )
    found = []
    for of_span in {"span": "machine", "device": "cpu"}, {"span": "job", "replica_ratio": 0.1}:
        options = {"seed": 5, "edges": True, **of_span}
        with GlobalStore.from_dgl(g, **options) as store:
            torch.manual_seed(rank)
            found.append(batches(store.graph, seeds, sampler))
            for _, positive, _, blocks in found[-1]:
                eids = positive.edata[dgl.EID].cpu()
                nodes = positive.ndata[dgl.NID]
                for end, expected in zip(positive.edges(), g.find_edges(eids), strict=True):
                    assert equal(nodes[end], expected)
                for block in blocks:  # without the edges that are learned
                    assert not torch.isin(block.edata[dgl.EID].cpu(), eids).any()
                inputs = blocks[0].srcdata[dgl.NID].cpu()
                assert equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])
            # Of the generators of the CPU and of a GPU are other negatives.
            comparable = store.device.type == "cpu"
    assert len(found[0]) == len(found[1]) > 3
    for alone, together in zip(*found, strict=True):
        for one, other in zip(alone[1:3], together[1:3], strict=True):
            assert not comparable or all(map(torch.equal, one.edges(), other.edges()))
        assert not comparable or torch.equal(alone[0], together[0])


@machines_on_gpus_too
def test_mini_batches_of_edges_are_as_on_one_machine(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _of_edges)


def _hop_by_hop() -> None:
    """By calls for one hop each, of which a rank counts its own by their seeds."""
    g, rank = power_law(), dist.get_rank()
    with (
        GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=0.1) as store,
        GlobalStore.from_dgl(g, seed=5, device="cpu") as whole,
    ):
        for seeds in torch.arange(8 * rank), torch.arange(4), torch.arange(4) + rank:
            nodes = seeds  # none on the first rank, at first
            for fanout in 3, 4:
                found, expected = (
                    of.graph.sample_neighbors(nodes.to(of.device), fanout) for of in (store, whole)
                )
                assert equal(found.edata[dgl.EID], expected.edata[dgl.EID])
                nodes = torch.cat([nodes, expected.edges()[0]])


@machines_on_gpus_too
def test_hops_that_ranks_count_differently_are_as_on_one_machine(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _hop_by_hop)


def _degrees() -> None:
    rank = dist.get_rank()
    for g in (power_law(), of_two_types()):
        with GlobalStore.from_dgl(g, span="job", replica_ratio=0.1) as store:
            for etype in g.canonical_etypes:
                degrees = g.in_degrees(etype=etype).to(g.idtype)
                asked = torch.arange(rank, 40, 7, dtype=g.idtype)[: 5 * rank]
                found = store.graph.in_degrees(asked.to(store.device), etype=etype)
                assert found.dtype == g.idtype and equal(found, degrees[asked.long()])
                assert equal(store.graph.in_degrees(etype=etype), degrees)
                assert store.graph.in_degrees(9, etype=etype) == int(degrees[9])
                outgoing = g.out_degrees(etype=etype).to(g.idtype)
                assert equal(store.graph.count_degrees("out", etype), outgoing)
                assert equal(store.graph.count_degrees("in", etype), degrees)


@machines_on_gpus_too
def test_degrees_are_those_of_the_whole_graph(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _degrees)


def _odd_ends() -> dgl.DGLGraph:
    """With nodes without edges, edges from nodes to themselves, and edges that are there twice."""
    draw = torch.Generator().manual_seed(3)
    sources, targets = torch.randint(30, (2, 90), generator=draw)
    loops = torch.arange(0, 30, 3)
    g = dgl.graph(
        (torch.cat([sources, sources[:40], loops]), torch.cat([targets, targets[:40], loops])),
        num_nodes=50,
    )
    g.ndata["feat"] = torch.randn(50, 3, generator=draw)
    return g


def _few_nodes() -> dgl.DGLGraph:
    """Fewer than there are machines, of which some own none."""
    g = dgl.graph((torch.tensor([0, 1, 1]), torch.tensor([1, 1, 1])))
    g.ndata["feat"] = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    return g


def _edges_of_one_machine() -> dgl.DGLGraph:
    """All in-edges are those of two nodes."""
    g = dgl.graph((torch.arange(60) % 20, torch.arange(60) % 2), num_nodes=300)
    g.ndata["feat"] = torch.arange(600.0).view(300, 2)
    return g


def _odd_as_one_machine(ratio: float, idtype: torch.dtype) -> None:
    rank = dist.get_rank()
    for make in _odd_ends, _few_nodes, _edges_of_one_machine:
        g = make().astype(idtype)
        count = g.num_nodes()
        seeds = torch.arange(count, dtype=idtype).roll(rank)[: max(count - rank, 1)][-30:]
        with GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=ratio) as store:
            for fanouts in [3, 2], [-1, -1], [0, 3], [3, 0]:
                sampler = NeighborSampler(fanouts, prefetch_node_feats=["feat"])
                assert_same_batches(g, store, sampler, seeds)
            assert equal(store.graph.in_degrees(), g.in_degrees().to(idtype))
            # No seeds, or no layers.
            for none, fanouts in (seeds[:0], [2, 2]), (seeds, []):
                inputs, _, blocks = store.graph.sample_blocks(none, fanouts)
                assert equal(inputs, none) and len(blocks) == len(fanouts)


@pytest.mark.parametrize(
    ("ratio", "idtype"), [(0.0, torch.int32), (0.3, torch.int64), (1.0, torch.int32)]
)
def test_odd_graphs_are_as_on_one_machine(
    ranks: RankProcesses, ratio: float, idtype: torch.dtype
) -> None:
    ranks.run(on_machines, "abc", _odd_as_one_machine, ratio, idtype)


def _small_types() -> None:
    """A type of one node, one of none, and edge types without edges."""
    draw, none = torch.Generator().manual_seed(3), torch.empty(0, dtype=torch.int64)
    g = dgl.heterograph(
        {
            ("user", "buys", "item"): (torch.randint(40, (80,), generator=draw), [0] * 80),
            ("item", "bought", "user"): ([0] * 30, torch.randint(40, (30,), generator=draw)),
            ("user", "follows", "user"): (none, none),
            ("user", "reads", "page"): (none, none),
        },
        {"user": 40, "item": 1, "page": 0},
    )
    for ntype in g.ntypes:
        g.nodes[ntype].data["feat"] = torch.randn(g.num_nodes(ntype), 2, generator=draw)
    with GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=0) as store:
        seeds = {"user": torch.arange(5), "item": torch.arange(1)}
        features = {ntype: ["feat"] for ntype in g.ntypes}
        for fanouts in [3, 2], [-1]:
            sampler = NeighborSampler(fanouts, prefetch_node_feats=features)
            assert_same_batches(g, store, sampler, seeds)
        for etype in g.canonical_etypes:
            assert equal(store.graph.in_degrees(etype=etype), g.in_degrees(etype=etype))
        for ntype in g.ntypes:
            rows = store.gather("feat", torch.arange(g.num_nodes(ntype)), ntype)
            assert equal(rows, g.nodes[ntype].data["feat"])
        # A rank has seeds of one type alone, or none at all.
        own = seeds | {"page": none}
        found = {ntype: own[ntype] for ntype in g.ntypes[: dist.get_rank()]}
        assert store.graph.sample_blocks(found, [2, 2])[2][1].num_dst_nodes() == sum(
            map(len, found.values())
        )


def test_small_types_are_as_on_one_machine(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _small_types)


def _shuffled() -> None:
    g, every = power_law(), []
    for options in {"span": "machine", "device": "cpu"}, {"span": "job", "replica_ratio": 0.1}:
        with GlobalStore.from_dgl(g, seed=3, **options) as store:
            sampler = NeighborSampler([3, 3], prefetch_node_feats=["feat"])
            seeds = torch.arange(100, device=store.device)
            loader = dgl.dataloading.DataLoader(
                store.graph, seeds, sampler, batch_size=16, shuffle=True, device=store.device
            )
            np.random.seed(7 + dist.get_rank())  # by which DGL shuffles
            every.append(
                [
                    (inputs, outputs, blocks[0].edata[dgl.EID], blocks[0].srcdata["feat"])
                    for _ in range(2)
                    for inputs, outputs, blocks in loader
                ]
            )
    for batch, other in zip(*every, strict=True):
        assert all(map(equal, batch, other))
    assert not equal(every[0][0][1], every[0][7][1])  # another order in the second pass


@machines_on_gpus_too
def test_shuffled_batches_are_as_on_one_machine(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _shuffled)

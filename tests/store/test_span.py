"""One store over the machines of a job: as a store of one machine, and as DGL."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler, as_edge_prediction_sampler
from dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform

import dgl_mgpu
from dgl_mgpu import GlobalStore
from dgl_mgpu.errors import (
    CheckpointError,
    ConfigError,
    IdOutOfRangeError,
    InvalidInputError,
    InvalidWeightError,
    PlanDoesNotFitError,
    RankFailedError,
    UnsupportedByStoreError,
)
from dgl_mgpu.graph.errors import UnknownFeatureError
from dgl_mgpu.ops import SampleFuture, SampleKey, device
from dgl_mgpu.sampling import dataloading
from dgl_mgpu.sampling.loader_batches import FrameKey
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.minibatch.run import make_trainer
from tests.kernels.emulator import EmulatedDriver
from tests.ranks import RankProcesses, on_gpus_too, on_machines
from tests.sampling.side_streams import HostStream
from tests.store.unread_ids import unread
from tests.train.jobs import SMALL

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


def _batches(graph: StoreGraph, seeds: Any, sampler: Any) -> list[tuple]:
    graph.set_epoch(1)
    on_device = (
        seeds.to(graph.device)
        if isinstance(seeds, torch.Tensor)
        else {ntype: ids.to(graph.device) for ntype, ids in seeds.items()}
    )
    return list(
        dgl.dataloading.DataLoader(graph, on_device, sampler, batch_size=16, device=graph.device)
    )


def _assert_same_batches(g: dgl.DGLGraph, spanning: GlobalStore, sampler: Any, seeds: Any) -> None:
    """As a store of one machine on the CPU makes them; each rank has seeds of its own, or none."""
    with GlobalStore.from_dgl(g, seed=5, device="cpu") as whole:
        expected = _batches(whole.graph, seeds, sampler)
        found = _batches(spanning.graph, seeds, sampler)
        assert len(found) == len(expected) > 0
        for (inputs, outputs, blocks), (other_inputs, other_outputs, others) in zip(
            found, expected, strict=True
        ):
            assert _equal(inputs, other_inputs) and _equal(outputs, other_outputs)
            for block, other in zip(blocks, others, strict=True):
                assert block.device.type == spanning.device.type
                for etype in g.canonical_etypes:
                    for ends in zip(
                        block.edges(etype=etype), other.edges(etype=etype), strict=True
                    ):
                        assert _equal(*ends)
                    eids = block.edges[etype].data[dgl.EID]
                    assert _equal(eids, other.edges[etype].data[dgl.EID])
                for ntype in g.ntypes:
                    ids = block.srcnodes[ntype].data[dgl.NID]
                    assert _equal(ids, other.srcnodes[ntype].data[dgl.NID])
            for ntype in g.ntypes:
                for nodes in blocks[0].srcnodes[ntype].data, blocks[-1].dstnodes[ntype].data:
                    ids = nodes[dgl.NID].cpu().long()
                    # Features that were not prefetched are asked for now, by all ranks in one
                    # order, which that of a set of names is not: each process has its own.
                    for name in "feat", "label":
                        if name in nodes:
                            assert _equal(nodes[name], g.nodes[ntype].data[name][ids])
                assert "feat" in blocks[0].srcnodes[ntype].data


def _equal(rows: Any, others: Any) -> bool:
    """Whether tensors, or those of dicts, are alike, wherever they are."""
    if isinstance(rows, torch.Tensor):
        return torch.equal(rows.cpu(), others.cpu())
    return rows.keys() == others.keys() and all(_equal(rows[key], others[key]) for key in rows)


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
            _assert_same_batches(g, store, sampler, seeds)
        frontier = store.graph.sample_neighbors(seeds.to(store.device), -1)
        in_edges = g.in_edges(seeds, form="eid")
        eids = frontier.edata[dgl.EID].cpu()
        assert torch.equal(eids.sort().values, in_edges.sort().values)
        assert _equal(frontier.edata["w"], g.edata["w"][eids])
        ids = torch.randint(NODES, (50 * (rank % 2),), generator=draw)  # none on some ranks
        there = ids.to(store.device)
        assert _equal(store.gather("feat", there), g.ndata["feat"][ids])
        assert _equal(store.gather("label", there.int()), g.ndata["label"][ids])
        assert _equal(store.gather("number", there).cpu().long(), ids)
        for dtype in torch.float64, torch.float16:
            rows = store.gather("feat", there, dtype=dtype)
            assert _equal(rows, g.ndata["feat"][ids].to(dtype))
        assert _equal(store.graph.ndata["feat"][:], g.ndata["feat"])
        assert ratio == "auto" or store.graph.traffic.take().nbytes["feat", "remote"] > 0
        return store.plan.tables["node/_N/feat"].tiers[-1].stop  # rows that are here


@on_gpus_too
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


@pytest.mark.parametrize("ranks", ["cuda"], indirect=True)
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


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.close()


@contextlib.contextmanager
def _emulated_gpus(store: GlobalStore) -> Iterator[EmulatedDriver]:
    """Sample over machines by the kernels for GPUs, which an emulator runs."""
    driver = EmulatedDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "driver", driver)
        patch.setattr(store.graph._structure.others, "_have_gpus", True)
        yield driver


def _by_kernels() -> None:
    g, rank = power_law(), dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    seeds = torch.randperm(NODES, generator=draw)
    with (
        GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=0.1) as store,
        _emulated_gpus(store) as driver,
    ):
        for options in {}, {"replace": True}:
            sampler = NeighborSampler([3, 4], prefetch_node_feats=["feat"], **options)
            _assert_same_batches(g, store, sampler, seeds[: 35 + rank])
        # None on a rank; then far more than there is room for.
        for count in 20 * rank, 200:
            _, _, blocks = store.graph.sample_blocks(seeds[:count], [3, 4])
            assert blocks[-1].num_dst_nodes() == count
            for block in blocks:
                in_edges = g.find_edges(block.edata[dgl.EID])
                ids = block.srcdata[dgl.NID], block.dstdata[dgl.NID]
                for of_block, end, expected in zip(ids, block.edges(), in_edges, strict=True):
                    assert torch.equal(of_block[end], expected)
        # None anywhere, of more neighbors than there is memory for.
        _, _, (block,) = store.graph.sample_blocks(seeds[:0], [1 << 40])
        assert block.num_src_nodes() == 0
        launched = {kernel.source for kernel in driver.launched}
        assert launched >= {"sample.cu", "answers.cu", "requests.cu", "unique.cu"}


def _started_with_bad_seeds() -> None:
    """A batch is started before the features of another one are gathered, which are not its own."""
    g, rank, seeds = power_law(), dist.get_rank(), torch.arange(20)
    (etype,) = g.canonical_etypes
    with (
        GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=0.1) as store,
        _emulated_gpus(store),
    ):
        structure = store.graph._structure

        def start(nodes: torch.Tensor) -> SampleFuture:
            assert structure.others is not None
            arguments = structure.views(), nodes, [{etype: 2}], SampleKey(0)
            return structure.others.sample_hops_async(*arguments, replace=False, one_by_one=list)

        (expected,) = start(seeds).result()
        for bad, error in (
            (torch.tensor([NODES]), IdOutOfRangeError),  # which a kernel finds
            (torch.tensor([0.5]), InvalidInputError),  # for which nothing can be asked
        ):
            fails = pytest.raises(error if rank == 1 else RankFailedError)
            batch = None
            with fails if rank == 1 and error is InvalidInputError else contextlib.nullcontext():
                batch = start(bad if rank == 1 else seeds)
            assert torch.equal(store.gather("feat", seeds), g.ndata["feat"][seeds])
            for _ in range(2 if batch else 0):
                with fails:
                    batch.result()
        # What was wrong is over.
        (found,) = start(seeds).result()
        assert all(map(torch.equal, found.edges[etype], expected.edges[etype]))


def test_bad_seeds_of_a_batch_are_told_with_that_batch(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _started_with_bad_seeds)


def _of_a_type_without_edges() -> None:
    user = torch.arange(40)
    g = dgl.heterograph(
        {("user", "follows", "user"): (user, user.flip(0))}, {"user": 40, "item": 9}
    )
    seeds = {"item": torch.arange(9)}
    if dist.get_rank():
        seeds["user"] = user[:5]
    with GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store, _emulated_gpus(store):
        inputs, _, (block,) = store.graph.sample_blocks(seeds, [2])
        assert len(inputs["item"]) == 9
        assert block.num_edges() == len(seeds.get("user", ()))


def test_kernels_sample_where_a_rank_has_seeds_of_another_type_alone(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _of_a_type_without_edges)


def test_kernels_sample_as_on_one_machine(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _by_kernels)


def test_two_machines_of_two_ranks_are_as_one(four_ranks: RankProcesses) -> None:
    kept = four_ranks.run(on_machines, "aabb", _as_one_machine, 0.1)
    assert kept[0] == kept[1] and kept[2] == kept[3]


def _of_two_types_as_one() -> None:
    g = of_two_types()
    item = torch.arange(dist.get_rank(), 70, 7, dtype=torch.int32)
    seeds = {"user": torch.arange(8, dtype=torch.int32), "item": item}
    with GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=0.2) as store:
        features = {"user": ["feat"], "item": ["feat"]}
        sampler = NeighborSampler([3, 2], prefetch_node_feats=features)
        _assert_same_batches(g, store, sampler, seeds)
        excluded = {"buys": torch.arange(0, 400, 3, dtype=torch.int32)}
        excluded, seeds = (
            {key: ids.to(store.device) for key, ids in of.items()} for of in (excluded, seeds)
        )
        found = store.graph.sample_blocks(seeds, [2, 2], exclude_edges=excluded)[2][1]
        assert not (found.edges["buys"].data[dgl.EID] % 3 == 0).any()


@on_gpus_too
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
            _assert_same_batches(g, store, sampler, seeds)
        there = seeds.to(store.device)
        found = store.graph.sample_neighbors(there, 3, prob="mask")
        assert g.edata["mask"][found.edata[dgl.EID].cpu()].all()
        # Of a rank's own seeds, whose in-edges are another machine's to sample.
        with pytest.raises((InvalidWeightError, RankFailedError), match=f"node {node} have weight"):
            store.graph.sample_neighbors(torch.tensor([node], device=store.device), 3, prob="bad")
        with pytest.raises((InvalidWeightError, RankFailedError), match=f"node {node} have weight"):
            _batches(store.graph, seeds, NeighborSampler([3], prob="bad"))
        with pytest.raises(InvalidInputError, match="the same in the same order"):
            store.graph.sample_neighbors(there, 3, prob="weight" if rank else "mask")
        assert _equal(store.gather("feat", there), g.ndata["feat"][seeds])


@on_gpus_too
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
            found.append(_batches(store.graph, seeds, sampler))
            for _, positive, _, blocks in found[-1]:
                eids = positive.edata[dgl.EID].cpu()
                nodes = positive.ndata[dgl.NID]
                for end, expected in zip(positive.edges(), g.find_edges(eids), strict=True):
                    assert _equal(nodes[end], expected)
                for block in blocks:  # without the edges that are learned
                    assert not torch.isin(block.edata[dgl.EID].cpu(), eids).any()
                inputs = blocks[0].srcdata[dgl.NID].cpu()
                assert _equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])
            # Of the generators of the CPU and of a GPU are other negatives.
            comparable = store.device.type == "cpu"
    assert len(found[0]) == len(found[1]) > 3
    for alone, together in zip(*found, strict=True):
        for one, other in zip(alone[1:3], together[1:3], strict=True):
            assert not comparable or all(map(torch.equal, one.edges(), other.edges()))
        assert not comparable or torch.equal(alone[0], together[0])


@on_gpus_too
def test_mini_batches_of_edges_are_as_on_one_machine(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _of_edges)


def _in_narrow_types() -> None:
    g = power_law()
    options = {"feature_dtypes": {"feat": "float8_e5m2"}, "span": "job", "replica_ratio": 0.1}
    with GlobalStore.from_dgl(g, **options) as store:
        rounded = g.ndata["feat"].to(torch.float8_e5m2).float()
        every = torch.arange(NODES, device=store.device)
        assert _equal(store.gather("feat", every), rounded)
        sent = store.graph.traffic.take().nbytes["feat", "remote"]
        assert 0 < sent < NODES * WIDTH


@on_gpus_too
def test_rows_are_sent_in_the_type_that_they_are_kept_in(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _in_narrow_types)


def _written(ratio: float) -> None:
    g, rank, size = power_law(), dist.get_rank(), dist.get_world_size()
    with GlobalStore.from_dgl(g, span="job", replica_ratio=ratio) as store:
        every = torch.arange(NODES, device=store.device)
        expected = g.ndata["feat"].clone()
        draw = torch.Generator().manual_seed(7)
        for _ in range(2):
            # Of all ranks; some have none, and the last of those for a node counts.
            changes = [
                (torch.randint(NODES, (80 * number,), generator=draw), number)
                for number in range(size)
            ]
            rows = torch.randn(NODES, WIDTH, generator=draw)
            for ids, number in changes:
                expected[ids] = rows[ids] + number
            mine = changes[rank][0]
            store.graph.ndata["feat"][mine.to(store.device)] = rows[mine].to(store.device) + rank
            assert _equal(store.gather("feat", every), expected)
        store.graph.ndata["feat"] = rows
        assert _equal(store.gather("feat", every), rows)
        weights = torch.rand(EDGES, 2, generator=draw)
        store.graph.edata["w"] = weights
        assert _equal(store.graph.edata["w"][:], weights)
        is_wrong = rank == size - 1
        bad = every[:1] + NODES if is_wrong else every[:1]
        with pytest.raises(IdOutOfRangeError if is_wrong else RankFailedError):
            store.graph.ndata["feat"][bad] = rows[:1]
        assert _equal(store.gather("feat", every), rows)


@on_gpus_too
@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_rows_are_written_on_all_machines(ranks: RankProcesses, ratio: float) -> None:
    ranks.run(on_machines, "abc", _written, ratio)


def _learned(path: str) -> None:
    g, rank, size = power_law(), dist.get_rank(), dist.get_world_size()
    spec = {"emb": dgl_mgpu.EmbeddingSpec(6, optimizer="adam")}
    options = {"seed": 5, "span": "job", "replica_ratio": 0.3, "embeddings": spec}
    with GlobalStore.from_dgl(g, **options) as store:
        every, embedding = torch.arange(NODES, device=store.device), store.embedding("emb")
        weight = torch.nn.Parameter(embedding(every).detach().cpu().double())
        assert weight.unique().numel() > NODES
        expected = torch.optim.SparseAdam([weight], lr=0.1)
        optimizer = dgl_mgpu.SparseAdam([embedding], lr=0.1, over_ranks="sum")
        draw = torch.Generator().manual_seed(3)
        for _ in range(4):
            batches = [torch.randint(NODES, (30 * n,), generator=draw) for n in range(size)]
            factors = torch.randn(NODES, 6, generator=draw)
            mine = batches[rank]
            (embedding(mine.to(store.device)) * factors[mine].to(store.device)).sum().backward()
            optimizer.step()
            ids = torch.cat(batches)
            gradients = factors[ids].double()
            weight.grad = torch.sparse_coo_tensor(ids[None], gradients, weight.shape).coalesce()
            expected.step()
            found = embedding(every).detach()
            assert torch.allclose(found.cpu().double(), weight.detach(), atol=1e-5)
        embedding.save(path)
        if rank == 0:
            with np.load(path) as saved:
                assert np.array_equal(saved["rows"], found.cpu().numpy())
        mine = every[rank::size]
        embedding.write(mine, torch.zeros(len(mine), 6, device=store.device))
        assert not embedding(every).any()
        embedding.load(path)
        assert torch.equal(embedding(every), found)
        with pytest.raises(CheckpointError if rank == 0 else RankFailedError, match="save rows to"):
            embedding.save(f"{path}/below-a-file")
        assert torch.equal(embedding(every), found)
    with GlobalStore.from_dgl(g, **options | {"span": "machine"}) as store:
        embedding = store.embedding("emb")
        embedding.load(path)  # as any store has written it
        assert torch.equal(embedding(every), found) and embedding.steps == 4


@on_gpus_too
def test_rows_are_learned_on_all_machines(ranks: RankProcesses, tmp_path: Path) -> None:
    ranks.run(on_machines, "abc", _learned, str(tmp_path / "rows.npz"))


def _sent(ratio: float) -> tuple[int, int, float]:
    """Bytes of rows that others sent, those of all reads, and the modelled share of these."""
    g = power_law()
    options = {"batch_size": 16, "fanouts": [10, 10]}
    with GlobalStore.from_dgl(g, span="job", replica_ratio=ratio, **options) as store:
        seeds = torch.arange(dist.get_rank(), NODES, 3)
        asked = 0
        for inputs, _, blocks in _batches(store.graph, seeds, NeighborSampler([10, 10])):
            assert len(blocks[0].srcdata["feat"]) == len(inputs)
            asked += len(inputs)
        sent = store.graph.traffic.take().nbytes["feat", "remote"]
        assert store.plan.share is not None
        return sent, asked * WIDTH * 4, store.plan.share.remote_reads["node/_N/feat"]


@on_gpus_too
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
                assert _equal(found.edata[dgl.EID], expected.edata[dgl.EID])
                nodes = torch.cat([nodes, expected.edges()[0]])


@on_gpus_too
def test_hops_that_ranks_count_differently_are_as_on_one_machine(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _hop_by_hop)


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
        expected = _batches(whole.graph, seeds, sampler)
        patch.setattr(dataloading, "side_stream_of", lambda device: side_stream)
        if by_kernels:
            stack.enter_context(_emulated_gpus(store))
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
        with store, _emulated_gpus(store):
            _assert_same_batches(g, store, sampler, seeds)


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


def _chosen(little: str) -> tuple[bool, int]:
    """With little memory on the machines of these ranks."""
    g = power_law()
    memory = 250_000 if str(dist.get_rank()) in little else "auto"
    options = {"batch_size": 16, "fanouts": [5], "gpu_memory": 1024}
    with GlobalStore.from_dgl(
        g, seed=5, span="auto", edges=True, host_memory=memory, **options
    ) as store:
        seeds = torch.arange(dist.get_rank(), NODES, 20)
        sampler = NeighborSampler([5, 5], prefetch_node_feats=["feat"])
        _assert_same_batches(g, store, sampler, seeds)
        sources, _ = store.graph.find_edges(seeds.to(store.device))
        assert _equal(sources, g.find_edges(seeds)[0])
        assert (store.plan.share is not None) == store.graph.spans_machines
        return store.graph.spans_machines, store.plan.num_gpus


@on_gpus_too
def test_the_machine_with_least_memory_decides(ranks: RankProcesses) -> None:
    assert {spans for spans, _ in ranks.run(on_machines, "abc", _chosen, "")} == {False}
    assert {spans for spans, _ in ranks.run(on_machines, "abc", _chosen, "1")} == {True}


def _degrees() -> None:
    rank = dist.get_rank()
    for g in (power_law(), of_two_types()):
        with GlobalStore.from_dgl(g, span="job", replica_ratio=0.1) as store:
            for etype in g.canonical_etypes:
                degrees = g.in_degrees(etype=etype).to(g.idtype)
                asked = torch.arange(rank, 40, 7, dtype=g.idtype)[: 5 * rank]
                found = store.graph.in_degrees(asked.to(store.device), etype=etype)
                assert found.dtype == g.idtype and _equal(found, degrees[asked.long()])
                assert _equal(store.graph.in_degrees(etype=etype), degrees)
                assert store.graph.in_degrees(9, etype=etype) == int(degrees[9])
                outgoing = g.out_degrees(etype=etype).to(g.idtype)
                assert _equal(store.graph.count_degrees("out", etype), outgoing)
                assert _equal(store.graph.count_degrees("in", etype), degrees)


@on_gpus_too
def test_degrees_are_those_of_the_whole_graph(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _degrees)


def _refused() -> None:
    g = power_law()
    error = pytest.raises(UnsupportedByStoreError, match="the job have one copy of the data")
    with GlobalStore.from_dgl(g, span="job", replica_ratio=0, edges=True) as store:
        nodes, graph = torch.arange(5), store.graph
        with error:
            graph.pinsage_neighbors(nodes, 2, 2, 2)
        with error:
            graph.has_edges_between(nodes, nodes)
        with error:
            graph.view()
        with error:
            _ = graph.get_node_storage("feat").view
        for options in {"num_workers": 1}, {"use_prefetch_thread": True}:
            loader = dgl.dataloading.DataLoader(graph, nodes, NeighborSampler([2]), **options)
            with pytest.raises(UnsupportedByStoreError, match="num_workers=0 and use_prefetch"):
                iter(loader)
        pairs = as_edge_prediction_sampler(NeighborSampler([2]), negative_sampler=GlobalUniform(1))
        with error:
            list(dgl.dataloading.DataLoader(graph, nodes, pairs))
        with pytest.raises(UnsupportedByStoreError, match="in another process"):
            pickle.dumps(store.graph.get_node_storage("feat"))
    with (
        GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store,
        pytest.raises(UnsupportedByStoreError, match="with edges=True"),
    ):
        store.graph.find_edges(nodes)
    with pytest.raises(UnsupportedByStoreError, match="GraphBolt's samplers read the edges"):
        GlobalStore.from_graphbolt(None, span="job")
    with pytest.raises(ConfigError, match=r"store\.span is none of machine, job"):
        GlobalStore.from_dgl(g, span="jobs")
    with pytest.raises(ConfigError, match="not in"):
        GlobalStore.from_dgl(g, span="job", replica_ratio=1.5)


def test_what_is_not_served_is_told(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _refused)


def _wrong_on_one_rank(by_kernels: bool = False) -> None:
    rank, g = dist.get_rank(), power_law()
    with (
        GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store,
        _emulated_gpus(store) if by_kernels else contextlib.nullcontext(),
    ):
        good = torch.arange(5, device=store.device)
        for wrong, error in ([NODES], IdOutOfRangeError), ([0.5], InvalidInputError):
            ids = torch.tensor(wrong, device=store.device) if rank == 1 else good
            ids = unread(ids) if by_kernels else ids
            raised = error if rank == 1 else RankFailedError
            # What only a kernel sees of ids on a GPU is told by the round that asks for them.
            on_gpus = by_kernels or store.device.type == "cuda"
            at_once = not (on_gpus and error is IdOutOfRangeError)
            with pytest.raises(raised, match="cannot gather rows of 'feat': "):
                store.gather("feat", ids)
            of_hop = "neighbors" if at_once else "a hop: 3 neighbors"
            with pytest.raises(raised, match=f"cannot sample {of_hop}: "):
                store.graph.sample_neighbors(ids, 3)
            of_hops = "neighbors" if at_once else "hops of 3 neighbors"
            with pytest.raises(raised, match=f"cannot sample {of_hops}: "):
                _batches(store.graph, ids, NeighborSampler([3]))
            of_degrees = "count in-edges" if at_once else "gather in-degrees of"
            with pytest.raises(raised, match=f"cannot {of_degrees}"):
                store.graph.in_degrees(ids)
        with pytest.raises(
            UnknownFeatureError if rank == 1 else RankFailedError, match="'unknown'"
        ):
            store.gather("unknown" if rank == 1 else "feat", good)
        with pytest.raises(InvalidInputError if rank == 1 else RankFailedError, match="edge type"):
            store.graph.in_degrees(etype="unknown" if rank == 1 else None)
        with pytest.raises(InvalidInputError, match="the same in the same order"):
            store.gather("label" if rank == 1 else "feat", good)
        # What was wrong is over.
        assert _equal(store.gather("feat", good), g.ndata["feat"][:5])


@on_gpus_too
def test_what_is_wrong_on_one_rank_is_told_on_all(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _wrong_on_one_rank)


def test_what_kernels_find_wrong_on_one_rank_is_told_on_all(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _wrong_on_one_rank, True)


def _no_room(*_: Any, **__: Any) -> None:
    raise MemoryError("there is no room")


def _has_no_room(name: str) -> None:
    rank, g = dist.get_rank(), power_law()
    with GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(f"dgl_mgpu.store.remote.{name}", _no_room)
            with pytest.raises(
                MemoryError if rank == 1 else RankFailedError, match="there is no room"
            ):
                _batches(store.graph, torch.arange(50), NeighborSampler([3]))
                store.gather("feat", torch.arange(NODES))
        with pytest.raises(RankFailedError, match="there is no room"):
            store.gather("feat", torch.arange(5))


@pytest.mark.parametrize("name", ["gather_rows", "sample_neighbors"])
def test_a_rank_without_room_is_told_of_on_all(ranks: RankProcesses, name: str) -> None:
    ranks.run(on_machines, "abc", _has_no_room, name)


def _unlike_machines(change: str) -> None:
    g, options = power_law(), {"replica_ratio": 0.1}
    if dist.get_rank() == 1:
        if change == "edges":
            g = dgl.graph(g.edges()[::-1], num_nodes=NODES)
            g.ndata.update(power_law().ndata)
            g.edata.update(power_law().edata)
        elif change == "nodes":
            g.ndata["feat"] = g.ndata["feat"][:, :3]
        elif change == "more":
            g.ndata["more"] = torch.zeros(NODES)
        else:
            options[change] = 0.2
    with pytest.raises(InvalidInputError, match="pass the same data and options on every machine"):
        GlobalStore.from_dgl(g, span="job", **options)


@pytest.mark.parametrize("change", ["edges", "nodes", "more", "replica_ratio"])
def test_machines_ask_for_the_same_store(ranks: RankProcesses, change: str) -> None:
    ranks.run(on_machines, "abc", _unlike_machines, change)


def _does_not_fit() -> None:
    with pytest.raises(PlanDoesNotFitError if dist.get_rank() == 1 else RankFailedError):
        memory = 1024 if dist.get_rank() == 1 else "auto"
        GlobalStore.from_dgl(power_law(), span="job", host_memory=memory, gpu_memory=memory)


def test_a_part_that_does_not_fit_ends_all(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _does_not_fit)


def _numbers_of_ranks() -> None:
    with pytest.raises(ConfigError, match=r"the machines have \[\d, \d\] ranks"):
        GlobalStore.from_dgl(power_law(), span="job")


def test_machines_have_as_many_ranks(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "aab", _numbers_of_ranks)


def _on_one_machine() -> None:
    with GlobalStore.from_dgl(power_law(), span="job", replica_ratio=0) as store:
        assert not store.graph.spans_machines
        store.graph.view()


def test_one_machine_has_all(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "aaa", _on_one_machine)


def _trained(span: str, data: str, *overrides: str) -> list[tuple[float, ...]]:
    options = f"store.span={span}", "store.replica_ratio=0.1", "store.device=auto"
    config = compose([data, *SMALL, *overrides, *options])
    trainer = make_trainer(config)
    for _ in range(2):
        for _ in trainer.run_epoch(last=True):
            pass
    test = trainer.test()
    trainer.store.close()
    return [(r.loss, r.train_accuracy, r.valid_accuracy, test) for r in trainer.reports]


def _trained_alike(data: str, *overrides: str) -> None:
    found, expected = (_trained(span, data, *overrides) for span in ("job", "machine"))
    # GPUs add gradients up in any order.
    on_gpu = torch.cuda.is_available()
    for epoch, other in zip(found, expected, strict=True):
        assert epoch == (pytest.approx(other, rel=2e-3, abs=2e-2) if on_gpu else other)


# The last round of training and validation has no batch for some ranks.
@on_gpus_too
@pytest.mark.parametrize("model", ["model=graphsage", "model=rgcn", "model.inputs=learned"])
def test_training_is_as_with_a_copy_on_each_machine(
    ranks: RankProcesses, data: str, model: str
) -> None:
    options = data, model, "trainer.batch_size=80", f"trainer.ranks={ranks.size}"
    ranks.run(on_machines, "abc", _trained_alike, *options)


def _refused_in_training(data: str, *overrides: str) -> None:
    with pytest.raises(UnsupportedByStoreError, match="span"):
        _trained("job", data, *overrides)


@pytest.mark.parametrize("other", ["task=link_prediction", "model=pinsage"])
def test_training_that_machines_do_not_serve_raises(
    ranks: RankProcesses, data: str, other: str
) -> None:
    ranks.run(on_machines, "abc", _refused_in_training, data, "trainer.ranks=3", other)

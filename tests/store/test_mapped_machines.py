"""Stores over machines that NVLink joins: rows and edges are read directly, as on one machine.

GPUs are not there (fake_gpu.py), or all on one machine (ranks_as_machines.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler

from benchmarks.ranks_as_machines import DescriptorMemory
from dgl_mgpu import GlobalStore, SparseAdam
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.ops import GraphView
from dgl_mgpu.ops.view import STOP
from tests.ranks import RankProcesses, machines_on_gpus_too, on_machines
from tests.store.memory.fake_gpu import FakeRuntime
from tests.store.memory.gpu_runtimes import CountingRuntime
from tests.store.span_graphs import NODES, assert_same_batches, equal, of_two_types, power_law
from tests.store.test_partitioned import _as_one_machine as parts_as_one_machine
from tests.store.test_partitioned import _partition, with_weights

#: Of each table, so that some of it is in the host's memory.
_PART_ON_GPUS = {"graph_ratio": 0.5, "feature_ratio": 0.5}


@contextlib.contextmanager
def _joined(**options: Any) -> Iterator[FakeRuntime | CountingRuntime]:
    """This rank's GPU, whose memory ranks of all machines can map; ``options`` are a fake's."""
    with pytest.MonkeyPatch.context() as patch:
        runtime: FakeRuntime | CountingRuntime
        if torch.cuda.is_available():
            patch.setattr(cuda_runtime, "FabricMemory", DescriptorMemory)
            runtime = CountingRuntime()
        else:
            rank, ranks = dist.get_rank(), Communicator.of_this_machine()
            options["joined"] = rank in options.get("joined", range(dist.get_world_size()))
            runtime = FakeRuntime(rank, ranks.size, ranks.rank, **options)
            runtime.gpus = lambda: [f"fake-{gpu}" for gpu in range(ranks.size)]  # type: ignore[method-assign]
        patch.setattr(cuda_runtime, "find_runtime", lambda: runtime)
        yield runtime


def _store(g: dgl.DGLGraph, **options: Any) -> GlobalStore:
    options = {"span": "job", "device": "cuda", "sms": 0, "replica_ratio": 0.1} | options
    return GlobalStore.from_dgl(g, seed=5, **options)


def _as_one_machine(options: dict[str, Any], reads_all: bool) -> None:
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    with _joined() as runtime:
        for g in power_law(), of_two_types():
            ntypes, sizes = g.ntypes, {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
            seeds: Any = {n: torch.randperm(sizes[n], generator=draw).to(g.idtype) for n in ntypes}
            with _store(g, **options) as store:
                assert store.graph.spans_machines is not reads_all
                for ntype in ntypes:
                    every = torch.arange(sizes[ntype], device=store.device)
                    rows = store.gather("feat", every, ntype)
                    assert equal(rows, g.nodes[ntype].data["feat"])
                read = store.graph.traffic.take().rows
                kinds = {memory for _, memory in read}
                assert "peer" in kinds and ("remote" in kinds) is not reads_all
                asks_for_edges = store.graph._structure.others_with_edges is not None
                assert asks_for_edges is ("graph_ratio" in options)
                assert sum(read.values()) == sum(sizes.values())
                features: Any = ["feat"] if len(ntypes) == 1 else {of: ["feat"] for of in ntypes}
                for replace in False, True:
                    sampler = NeighborSampler([4, 3], replace=replace, prefetch_node_feats=features)
                    some = seeds if len(ntypes) > 1 else seeds[ntypes[0]][:50]
                    assert_same_batches(g, store, sampler, some)
        assert runtime.is_empty


@machines_on_gpus_too
@pytest.mark.parametrize(
    ("options", "reads_all"),
    [
        ({}, True),
        ({"replica_ratio": 0.0}, True),
        ({"feature_ratio": 0.5}, False),
        (_PART_ON_GPUS, False),
    ],
    ids=["replicas", "none", "features in the host's memory", "and edges"],
)
def test_machines_are_as_one(
    ranks: RankProcesses, options: dict[str, Any], reads_all: bool
) -> None:
    ranks.run(on_machines, "abc", _as_one_machine, options, reads_all)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.close()


@pytest.mark.parametrize("options", [{}, _PART_ON_GPUS])
def test_machines_of_two_ranks_are_as_one(
    four_ranks: RankProcesses, options: dict[str, Any]
) -> None:
    four_ranks.run(on_machines, "aabb", _as_one_machine, options, options != _PART_ON_GPUS)


def _most_positions() -> int:
    g = power_law()
    options = {"replica_ratio": 0.8, "feature_ratio": 0.25, "graph_ratio": 0.25}
    with _joined() as runtime, _store(g, **options) as store:
        assert store.graph.spans_machines
        every = torch.arange(NODES, device=store.device)
        assert equal(store.gather("feat", every), g.ndata["feat"])
        most = 0
        for name, table in store._store.tables.items():
            view, num_positions = table.view, int(table.view.tiers[-1, STOP])
            if name.startswith("node"):
                most = max(most, num_positions)
            # Kernels count on it where they put rows in order.
            in_order = view.ordered_from if isinstance(view, GraphView) else view.host_start >= 0
            assert not in_order or num_positions <= view.num_rows
        store.close()
    assert runtime.is_empty
    return most


@machines_on_gpus_too
def test_replicas_that_nobody_reads(ranks: RankProcesses) -> None:
    assert max(ranks.run(on_machines, "abc", _most_positions)) > NODES


def _by_target(sources: torch.Tensor, targets: torch.Tensor, sizes: dict[str, int]) -> dgl.DGLGraph:
    """Edges whose ids are in the order in which a store keeps edges, to the last type of nodes."""
    types = list(sizes)
    ends = sources, targets.sort()[0]
    return dgl.heterograph({(types[0], "to", types[-1]): ends}, sizes)


def _finds_edges(ratio: float) -> None:
    draw = torch.Generator().manual_seed(3)
    hot = 60 * torch.rand(900, generator=draw) ** 3
    for g in (
        _by_target(hot.long(), torch.randint(60, (900,), generator=draw), {"user": 60}),
        # One machine has all edges.
        _by_target(hot.long(), torch.zeros(900).long(), {"user": 60, "country": 1}),
    ):
        with _joined() as runtime, _store(g, replica_ratio=ratio) as store:
            assert not store.graph.spans_machines
            eids = torch.arange(g.num_edges(), device=store.device)
            for found, expected in zip(store.graph.find_edges(eids), g.edges(), strict=True):
                assert equal(found, expected)
            assert equal(store.graph.in_degrees(), g.in_degrees())
            store.close()
        assert runtime.is_empty


# With some replicas machines map more edges than there are.
@machines_on_gpus_too
@pytest.mark.parametrize("ratio", [0.0, 0.2])
def test_edges_are_found_by_their_ids(ranks: RankProcesses, ratio: float) -> None:
    ranks.run(on_machines, "abc", _finds_edges, ratio)


def _parts_as_one_machine(path: str, g: dgl.DGLGraph) -> None:
    with _joined() as runtime:
        parts_as_one_machine(path, g, 0.2)
    assert runtime.is_empty


@machines_on_gpus_too
def test_parts_are_as_one(ranks: RankProcesses, tmp_path: Path) -> None:
    path, g = _partition(with_weights(power_law()), tmp_path, ranks.size)
    ranks.run(on_machines, "abc", _parts_as_one_machine, path, g)


def _written(options: dict[str, Any]) -> None:
    g, rank = power_law(), dist.get_rank()
    draw = torch.Generator().manual_seed(3)
    with _joined() as runtime, _store(g, embeddings={"emb": 4}, **options) as store:
        every, expected = torch.arange(NODES, device=store.device), g.ndata["feat"].clone()
        for number in range(dist.get_world_size()):
            ids = torch.randint(NODES, (60 * number,), generator=draw)
            rows = torch.randn(len(ids), *expected.shape[1:], generator=draw)
            for at, row in zip(ids, rows, strict=True):
                expected[at] = row
            if number == rank:
                mine = ids, rows
        store.graph.ndata["feat"][mine[0].to(store.device)] = mine[1].to(store.device)
        assert equal(store.gather("feat", every), expected)
        embedding = store.embedding("emb")
        optimizer = SparseAdam([embedding], lr=0.1)
        reference = torch.nn.Embedding(NODES, 4, sparse=True)
        with torch.no_grad():
            reference.weight.copy_(embedding(every))
        theirs = torch.optim.SparseAdam(reference.parameters(), lr=0.1)
        for _ in range(3):
            batches = [torch.randint(NODES, (50,), generator=draw) for _ in range(3)]
            (embedding(batches[rank].to(store.device)) ** 2).sum().backward()
            optimizer.step()
            theirs.zero_grad()
            size = dist.get_world_size()
            sum((reference(ids) ** 2).sum() / size for ids in batches[:size]).backward()
            theirs.step()
        with torch.no_grad():
            assert torch.allclose(embedding(every).cpu(), reference.weight, atol=1e-5)
    assert runtime.is_empty


@machines_on_gpus_too
@pytest.mark.parametrize("options", [{}, _PART_ON_GPUS], ids=["GPUs", "and the host"])
def test_rows_are_written_and_learned(ranks: RankProcesses, options: dict[str, Any]) -> None:
    ranks.run(on_machines, "abc", _written, options)


def _not_mapped(options: dict[str, Any]) -> None:
    g = power_law()
    with _joined(**options) as runtime, _store(g) as store:
        assert store.graph.spans_machines and not runtime.opened
        every = torch.arange(NODES, device=store.device)
        assert equal(store.gather("feat", every), g.ndata["feat"])
        memories = {memory for _, memory in store.graph.traffic.take().rows}
        assert memories == {"device", "remote"}
        store.close()
    assert runtime.is_empty


@pytest.mark.parametrize(
    "options",
    [
        {"joined": []},
        {"joined": [0, 2]},
        {"refused": [(1, 2)]},
        {"unshared": [2]},
        {"misread": True},
    ],
)
def test_what_one_rank_cannot_read_is_asked_for(
    ranks: RankProcesses, options: dict[str, Any]
) -> None:
    ranks.run(on_machines, "abc", _not_mapped, options)

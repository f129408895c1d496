"""Tables with rows on disk in a store on GPUs, real or not (fake_gpu.py)."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dgl
import numpy as np
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import ConfigError, DeviceMemoryError, IdOutOfRangeError, InvalidInputError
from dgl_mgpu.machine import preset
from dgl_mgpu.ops import count_tiers, device, gather_rows
from dgl_mgpu.ops.view import RowView
from dgl_mgpu.store import planning
from dgl_mgpu.store.memory import Blueprint, FeatureSource, TopologySource, build, staging
from dgl_mgpu.store.memory.staging import StagedRows
from dgl_mgpu.store.planning import StoreOptions
from dgl_mgpu.store.row_updates import write_rows
from dgl_mgpu.train.launch.launch import launch
from tests.kernels.cuda_views import on_device
from tests.ops.views import LAYOUTS, row_view
from tests.store.memory.fake_gpu import FakeRuntime
from tests.store.memory.gpu_runtimes import KINDS, make_runtime
from tests.store.memory.layouts import four_tiers, plan_of, single
from tests.store.memory.test_gpu_store import power_law_graph

ROWS = 1009
FEATURES = {
    "wide": torch.randn(ROWS, 50, generator=torch.Generator().manual_seed(1)),
    "half": torch.arange(3 * ROWS).view(ROWS, 3).to(torch.bfloat16),
    "label": torch.arange(ROWS) * 3,
    "none": torch.empty(ROWS, 0),
}
ORDER = np.random.default_rng(2).permutation(ROWS)


def make_blueprint(num_ranks: int, folder: Path, staging_memory: int, tiers=None) -> Blueprint:
    tiers = tiers or four_tiers(ROWS, num_ranks)
    return Blueprint(
        {name: FeatureSource(rows, "node") for name, rows in FEATURES.items()},
        {"node": ORDER},
        plan_of(num_ranks, {name: tiers for name in FEATURES}),
        folder,
        staging_memory,
    )


def some_ids(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, ROWS, count))


def files_in(folder: Path) -> int:
    """Nameless files of this process there."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.islink(link))


@pytest.fixture(autouse=True)
def _restored(monkeypatch) -> None:
    """A single rank's work runs in this process; what it replaces is put back."""
    monkeypatch.setattr(staging, "_CHUNK_BYTES", staging._CHUNK_BYTES)
    monkeypatch.setattr(cuda_runtime, "find_runtime", cuda_runtime.find_runtime)


def _gathers_everything(kind: str, folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    staging._CHUNK_BYTES = 1000
    for memory in (0, 5_000, 1 << 20):
        runtime = make_runtime(kind, ranks)
        blueprint = make_blueprint(ranks.size, folder, memory)
        store = build(blueprint if ranks.rank == 0 else None, ranks, runtime)
        assert files_in(folder)
        # Only what is in memory is registered; there is nothing of the disk's.
        segments = [table._segments[-1] for table in store.tables.values()]
        assert all(segment.address not in runtime.registered for segment in segments)
        for turn in range(3):
            ids = torch.cat([some_ids(700, turn), torch.arange(ROWS), some_ids(5, turn)])
            there = ids.to(store.device)
            for name, rows in FEATURES.items():
                view = store.tables[name].view
                assert torch.equal(gather_rows(view, there).cpu(), rows[ids])
                wanted = gather_rows(view, there, dtype=torch.float64)
                assert torch.equal(wanted.cpu(), rows[ids].double())
        view = store.tables["wide"].view
        on_disk = int(count_tiers(view, torch.arange(ROWS, device=store.device))[-1])
        assert on_disk == ROWS // 5
        assert gather_rows(view, there[:0]).shape == (0, 50)
        store.close()
        assert runtime.is_empty


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_gathers_the_sources_rows(tmp_path, num_ranks, kind):
    launch(_gathers_everything, num_ranks, kind, tmp_path)


@pytest.fixture(params=KINDS)
def where(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cpu" if request.param == "fake" else "cuda")


def staged(rows: torch.Tensor, nbytes: int, where: torch.device):
    """A view whose last tier is on disk, what reads that, and whether each row is there."""
    view = row_view(rows, LAYOUTS["three tiers"], np.random.default_rng(0))
    start, stop, _, last = view.tiers[-1].tolist()
    every = RowView(view.tiers, view.pointers, len(rows), view.row_shape, view.dtype)
    reader = StagedRows(every, stop - start, nbytes, where)
    there = on_device(view, where)
    pointers = there.pointers.clone()
    pointers[last] = 0
    owner = (view.owner, there.owner)
    there = dataclasses.replace(there, pointers=pointers, owner=owner, disk=reader)
    return there, reader, view.position >= start


def test_the_cache_serves_what_was_read_and_no_more_is_read(where, monkeypatch):
    rows = FEATURES["wide"]
    view, reader, on_disk = staged(rows, 1 << 20, where)
    read = []
    original = reader._read

    def counting(out, places, wanted):
        read.append(len(wanted))
        original(out, places, wanted)

    monkeypatch.setattr(reader, "_read", counting)
    ids = some_ids(300, 0)
    for _ in range(2):
        assert torch.equal(gather_rows(view, ids.to(where)).cpu(), rows[ids])
    assert read == [on_disk[ids].sum()]
    held = (reader.tags.cpu() >= 0).nonzero().flatten()
    assert len(held) == len(ids[on_disk[ids]].unique())
    # What is changed in the cache shows: rows came from there.
    reader.cache.zero_()
    gathered = gather_rows(view, ids.to(where)).cpu()
    assert not gathered[on_disk[ids]].any()
    assert torch.equal(gathered[~on_disk[ids]], rows[ids][~on_disk[ids]])


@pytest.mark.parametrize("nbytes", [0, 300, 3_000, 30_000])
def test_rows_that_share_slots(where, monkeypatch, nbytes):
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 999)
    rows = FEATURES["half"]
    view, reader, _ = staged(rows, nbytes, where)
    assert reader.tags.nbytes + reader.cache.nbytes <= max(nbytes, 8 + 2 * view.row_bytes)
    for seed in range(20):
        ids = some_ids(100, seed)
        there = ids.to(where)
        assert torch.equal(gather_rows(view, there).cpu(), rows[ids])
        wanted = gather_rows(view, there, dtype=torch.float32)
        assert torch.equal(wanted.cpu(), rows[ids].float())


def test_threads_share_a_cache(where, monkeypatch):
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 500)
    rows = FEATURES["wide"]
    view, _, _ = staged(rows, 4_000, where)

    def gather(seed: int) -> None:
        stream = torch.cuda.Stream() if where.type == "cuda" else None
        for turn in range(20):
            ids = some_ids(50, 100 * seed + turn)
            with torch.cuda.stream(stream):
                assert torch.equal(gather_rows(view, ids.to(where)).cpu(), rows[ids])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(gather, range(4)))  # raises what a thread's assertions raise


def test_a_failed_read_leaves_no_tags_of_rows_that_did_not_come(where, monkeypatch):
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 2_000)
    rows = FEATURES["wide"]
    view, reader, _ = staged(rows, 1 << 20, where)
    ids = some_ids(500, 0)
    keep, calls = reader._cache_rows, []

    def fails(positions, read):
        calls.append(len(positions))
        if len(calls) == 3:
            reader.tags[positions % len(reader.tags)] = positions
            raise MemoryError("no room")
        keep(positions, read)

    monkeypatch.setattr(reader, "_cache_rows", fails)
    with pytest.raises(MemoryError):
        gather_rows(view, ids.to(where))
    monkeypatch.setattr(reader, "_cache_rows", keep)
    assert torch.equal(gather_rows(view, ids.to(where)).cpu(), rows[ids])


def test_a_bad_id(where):
    view, _, _ = staged(FEATURES["wide"], 1000, where)
    with pytest.raises(IdOutOfRangeError, match=f"id {ROWS}"):
        gather_rows(view, torch.tensor([3, ROWS, 4], device=where))
        device.raise_faults(view.tiers.device, wait=True)


def _writes(folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    store = build(make_blueprint(1, folder, 1000), ranks, FakeRuntime(0, 1))
    with pytest.raises(InvalidInputError, match="on disk"):
        write_rows(store.tables["label"], torch.tensor([1]), torch.tensor([1]))
    store.close()


def test_rows_on_disk_are_not_written(tmp_path):
    launch(_writes, 1, tmp_path)


def test_the_cache_counts_as_the_stores(tmp_path):
    every = [single(0, ROWS, "disk", 1)]
    with pytest.raises(DeviceMemoryError) as caught:
        build(
            make_blueprint(1, tmp_path, 1 << 20, every),
            Communicator(),
            FakeRuntime(0, 1, memory=1 << 19),
        )
    assert (1 << 20) - 10 < caught.value.needed <= 1 << 20
    assert not files_in(tmp_path)


def test_the_cache_takes_no_more_than_the_stores_share(tmp_path, monkeypatch):
    runtime = FakeRuntime(0, 1)
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: runtime)
    g = power_law_graph()
    store = dgl_mgpu.GlobalStore.from_dgl(
        g, disk_path=tmp_path, gpu_memory="20KiB", host_memory="110KiB", staging_memory="1MiB"
    )
    views = [table.view for table in store._store.tables.values()]
    caches = [view.disk for view in views if isinstance(view, RowView) and view.disk]
    assert caches
    held = sum(each.tags.nbytes + each.cache.nbytes for each in caches)
    orders = {view.position.data_ptr(): view.position.nbytes for view in views}
    assert runtime.used + sum(orders.values()) + held <= 20 << 10
    for name, rows in g.ndata.items():
        assert torch.equal(store.gather(name, torch.arange(g.num_nodes())), rows)
    store.close()


def _trains(kind: str, folder: str) -> None:
    ranks = Communicator.of_this_machine()
    runtime = make_runtime(kind, ranks)
    cuda_runtime.find_runtime = lambda: runtime
    g = power_law_graph()
    limits = {"gpu_memory": "100KiB", "host_memory": "64KiB", "staging_memory": "16KiB"}
    store = dgl_mgpu.GlobalStore.from_dgl(
        g if ranks.rank == 0 else None, disk_path=folder, **limits
    )
    memories = {tier.memory for table in store.plan.tables.values() for tier in table.tiers}
    assert "disk" in memories and "gpu" in memories
    if kind == "fake":
        held = runtime.used + 4 * g.num_nodes() + (16 << 10)
        assert held <= (100 << 10) + 128 * 40
    every = torch.arange(g.num_nodes())
    for _ in range(2):
        for name, rows in g.ndata.items():
            assert torch.equal(store.gather(name, every), rows)
            wanted = store.gather(name, every, dtype=torch.float16)
            assert torch.equal(wanted, rows.half())
    taken = store.graph.traffic.take()
    on_disk = sum(
        tier.num_rows
        for name, table in store.plan.tables.items()
        for tier in table.tiers
        if tier.memory == "disk"
    )
    assert sum(taken.rows[key] for key in taken.rows if key[1] == "disk") == 4 * on_disk
    loader = dgl.dataloading.DataLoader(
        store.graph,
        every[:200],
        dgl.dataloading.NeighborSampler([3, 3], prefetch_node_feats=["feat"]),
        batch_size=64,
    )
    for inputs, _, blocks in loader:
        assert torch.equal(blocks[0].srcdata["feat"].cpu(), g.ndata["feat"][inputs.cpu()])
    store.close()
    assert runtime.is_empty


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dgl_reads_features_from_disk(tmp_path, num_ranks, kind):
    launch(_trains, num_ranks, kind, str(tmp_path))


def graph_and_features(folder: Path, **limits):
    g = power_law_graph()
    graph, feat = (
        TopologySource(
            *(part.numpy() for part in g.adj_tensors("csc")[:2]), None, 600, torch.int64
        ),
        FeatureSource(g.ndata["feat"], "node"),
    )
    options = StoreOptions(disk_path=folder, staging_memory="4KiB", **limits)
    hot = {"node": g.out_degrees().numpy()}
    return planning.make_blueprint(
        {"graph": dataclasses.replace(graph, position="node"), "feat": feat},
        hot,
        preset("hgx-h200", 2),
        options,
        on_gpus=True,
    ).plan


@pytest.mark.parametrize("host_memory", ["70KiB", "110KiB", "0"])
def test_topology_stays_in_memory_however_little_there_is(tmp_path, host_memory):
    gpu_memory = "80KiB" if host_memory == "0" else "30KiB"
    plan = graph_and_features(tmp_path, gpu_memory=gpu_memory, host_memory=host_memory)
    plan.validate(preset("hgx-h200", 2))
    assert all(tier.memory != "disk" for tier in plan.tables["graph"].tiers)
    assert any(tier.memory == "disk" for tier in plan.tables["feat"].tiers)


def test_topology_that_does_not_fit(tmp_path):
    with pytest.raises(ConfigError, match=r"topology.*store\.device=cpu"):
        graph_and_features(tmp_path, gpu_memory="20KiB", host_memory="20KiB")


@pytest.mark.parametrize("size", ["auto", "much", "-1"])
def test_staging_memory_that_is_no_size(size):
    with pytest.raises(ConfigError, match="staging_memory"):
        dgl_mgpu.GlobalStore.from_dgl(power_law_graph(20, 30), staging_memory=size)

"""The store against plain indexing, for one rank and for several."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import InvalidInputError, RankFailedError, SharedMemoryError, StoreClosedError
from dgl_mgpu.ops import SampleKey, gather_rows, sample_neighbors
from dgl_mgpu.placement import order_by_hotness
from dgl_mgpu.store.memory import Blueprint, FeatureSource, TopologySource, build
from dgl_mgpu.store.memory import format as format_module
from dgl_mgpu.store.memory.format import CSCWriter, EdgeIds
from dgl_mgpu.store.memory.segment import SHARED_MEMORY
from dgl_mgpu.train.launch.launch import launch
from tests.store.memory.layouts import four_tiers, partitioned, plan_of, single

ROWS = 1009


def random_csc(rng: np.random.Generator, rows: int = ROWS, edges: int = 9000):
    degrees = rng.multinomial(edges, rng.dirichlet(np.full(rows, 0.3)))
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, rng.integers(0, rows, edges)


def make_blueprint(num_ranks: int, tiers, disk_path: Path, idtype=torch.int64) -> Blueprint:
    rng = np.random.default_rng(3)
    indptr, indices = random_csc(rng)
    eids = rng.permutation(len(indices))
    np_id = np.int32 if idtype == torch.int32 else np.int64
    sources = {
        "features": FeatureSource(rng.standard_normal((ROWS, 7)).astype(np.float32), "node"),
        "half": FeatureSource(torch.randn(ROWS, 3).to(torch.bfloat16), "node"),
        "label": FeatureSource(rng.integers(0, 5, ROWS), "node"),
        "graph": TopologySource(
            indptr, indices.astype(np_id), eids.astype(np_id), ROWS, idtype, "node"
        ),
    }
    hot = np.bincount(indices, minlength=ROWS)
    return Blueprint(
        sources,
        {"node": order_by_hotness(hot).order},
        plan_of(num_ranks, {name: tiers for name in sources}),
        disk_path,
    )


def assert_equal_to_sources(store, blueprint: Blueprint) -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, ROWS, 5000))
    for name in ("features", "half", "label"):
        rows = torch.as_tensor(blueprint.sources[name].rows)
        assert torch.equal(gather_rows(store.tables[name].view, ids), rows[ids])
    graph = blueprint.sources["graph"]
    every = torch.arange(ROWS, dtype=graph.idtype)
    sampled = sample_neighbors(store.tables["graph"].view, every, -1, SampleKey(0))
    assert np.array_equal(sampled.indptr, graph.indptr)
    assert np.array_equal(sampled.neighbors, graph.indices)
    assert np.array_equal(sampled.eids, graph.eids)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_every_tier_returns_the_source_rows(tmp_path, idtype):
    blueprint = make_blueprint(1, four_tiers(ROWS, 1), tmp_path, idtype)
    assert_equal_to_sources(build(blueprint, Communicator()), blueprint)


class _Written:
    """A segment that knows how much was written at a time."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.full(nbytes, 0xA5, np.uint8)
        self.most = 0

    def write(self, offset: int, data: np.ndarray) -> None:
        self.bytes[offset : offset + data.nbytes] = data.reshape(-1).view(np.uint8)
        self.most = max(self.most, data.nbytes)


@pytest.mark.parametrize("edge_ids", EdgeIds)
def test_of_a_hub_no_more_is_copied_at_a_time_than_of_others(monkeypatch, edge_ids):
    degrees = np.array([3, 0, 5000, 1, 257, 256, 0])
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    source = TopologySource(
        indptr, np.arange(indptr[-1]) % 7, np.arange(indptr[-1])[::-1], 7, torch.int64
    )
    writer = CSCWriter(source, np.array([2, 4, 0, 6, 5, 1, 3]), edge_ids)
    written = []
    for chunk in (1 << 20, 8 * 256):
        monkeypatch.setattr(format_module, "_CHUNK_BYTES", chunk)
        monkeypatch.setattr(format_module, "_CHUNK_EDGES", chunk // 8)
        written.append(_Written(writer.nbytes(range(7))))
        writer.fill(written[-1], range(7))
    assert np.array_equal(written[0].bytes, written[1].bytes)
    assert written[0].most > written[1].most == 8 * 256


def test_ids_need_no_map_where_rows_lie_in_one_tier(tmp_path):
    blueprint = make_blueprint(1, [partitioned(0, ROWS, 1)], tmp_path)
    store = build(blueprint, Communicator())
    assert all(len(table.view.position) == 0 for table in store.tables.values())
    assert_equal_to_sources(store, blueprint)


def test_edge_ids_are_not_stored_where_they_are_places(tmp_path):
    indptr, indices = random_csc(np.random.default_rng(1))
    for parts, kept in ((1, False), (2, True)):
        tiers = [partitioned(0, ROWS, 1)] if parts == 1 else four_tiers(ROWS, 1)
        source = TopologySource(indptr, indices, None, ROWS, torch.int64)
        blueprint = Blueprint({"g": source}, {}, plan_of(1, {"g": tiers}), tmp_path)
        view = build(blueprint, Communicator()).tables["g"].view
        assert bool(view.pointers[:, 2].any()) == kept
        every = torch.arange(ROWS)
        eids = sample_neighbors(view, every, -1, SampleKey(0)).eids
        assert torch.equal(eids, torch.arange(len(indices)))


def _read_label(table, answers) -> None:
    answers.put(gather_rows(table.view, torch.arange(ROWS)).tolist())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_table_reaches_a_worker_process(tmp_path, method):
    blueprint = make_blueprint(1, four_tiers(ROWS, 1), tmp_path)
    table = build(blueprint, Communicator()).tables["label"]
    context = mp.get_context(method)
    answers = context.Queue()
    process = context.Process(target=_read_label, args=(table, answers))
    process.start()
    found = answers.get()
    process.join()
    assert found == blueprint.sources["label"].rows.tolist()


def _rank_reads_everything(folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    blueprint = make_blueprint(ranks.size, four_tiers(ROWS, ranks.size), folder)
    torch.manual_seed(0)
    store = build(blueprint if ranks.rank == 0 else None, ranks)
    reference = ranks.broadcast_from_rank0(
        "share the reference",
        lambda: {
            name: torch.as_tensor(blueprint.sources[name].rows)
            for name in ("features", "half", "label")
        },
    )
    for name, rows in reference.items():
        assert torch.equal(gather_rows(store.tables[name].view, torch.arange(ROWS)), rows)
    expected = []
    for tier in store.plan.tables["features"].tiers:
        for part in range(tier.parts):
            on_gpu = "device" if tier.parts == 1 or part == ranks.rank else "peer"
            expected.append(on_gpu if tier.memory == "gpu" else tier.memory)
    assert store.tables["features"].memories == expected


def test_a_closed_table_does_not_reach_a_worker(tmp_path):
    table = build(make_blueprint(1, four_tiers(ROWS, 1), tmp_path), Communicator()).tables["label"]
    table.close()
    with pytest.raises(StoreClosedError):
        pickle.dumps(table)


def test_several_ranks_read_one_copy(tmp_path):
    launch(_rank_reads_everything, 3, tmp_path)


def _rank_one_fails(folder: Path) -> None:
    ranks = Communicator.of_this_machine()

    def step() -> None:
        if ranks.rank == 1:
            raise ValueError("no luck")

    ranks.run_all("try", step)


def test_a_failure_on_one_rank_is_told_on_all(tmp_path):
    with pytest.raises(RankFailedError, match="no luck"):
        launch(_rank_one_fails, 2, tmp_path)


def test_plan_for_other_data_or_ranks_is_refused(tmp_path):
    blueprint = make_blueprint(1, [partitioned(0, ROWS, 1)], tmp_path)
    short = plan_of(1, {name: [partitioned(0, ROWS - 1, 1)] for name in blueprint.sources})
    with pytest.raises(InvalidInputError, match="covers 1008"):
        build(Blueprint(blueprint.sources, blueprint.orders, short), Communicator())
    two = plan_of(2, {name: [partitioned(0, ROWS, 2)] for name in blueprint.sources})
    with pytest.raises(InvalidInputError, match="the plan is for 2 ranks"):
        build(Blueprint(blueprint.sources, blueprint.orders, two), Communicator())
    disk = plan_of(1, {name: [single(0, ROWS, "disk", 1)] for name in blueprint.sources})
    with pytest.raises(InvalidInputError, match="disk_path"):
        build(Blueprint(blueprint.sources, blueprint.orders, disk), Communicator())


def test_no_room_is_told_before_anything_is_made(tmp_path, monkeypatch):
    blueprint = make_blueprint(1, [partitioned(0, ROWS, 1)], tmp_path)

    class Full:
        f_bavail = 1
        f_frsize = 4096
        f_flag = 0

    monkeypatch.setattr(os, "statvfs", lambda folder: Full)
    monkeypatch.setattr(os, "open", None)  # nothing may be created
    with pytest.raises(SharedMemoryError, match=f"in {SHARED_MEMORY}"):
        build(blueprint, Communicator())


def test_no_data_on_the_first_rank():
    with pytest.raises(InvalidInputError, match="first rank"):
        build(None, Communicator())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, i: (p[:-1], i), "indices"),
        (lambda p, i: (p[::-1].copy(), i), "start with 0"),
        (lambda p, i: (p, np.where(np.arange(len(i)) == 5, -1, i)), "source node -1"),
        (lambda p, i: (p, np.where(np.arange(len(i)) == 5, ROWS, i)), f"source node {ROWS}"),
        (lambda p, i: (np.concatenate([p[:3], p[2:1:-1] - 1, p[4:]]), i), "decreases"),
    ],
)
def test_malformed_topology(change, message):
    indptr, indices = random_csc(np.random.default_rng(2), edges=90000)
    with pytest.raises(InvalidInputError, match=message):
        TopologySource(*change(indptr, indices), None, ROWS, torch.int64)


def test_sources_say_what_is_wrong_with_them():
    with pytest.raises(InvalidInputError, match="first dimension"):
        FeatureSource(torch.tensor(3.0))
    swapped = np.dtype(np.float32).newbyteorder()
    for rows in (np.zeros((3, 2), swapped), np.array(["a", "b"]), np.array([None])):
        with pytest.raises(InvalidInputError, match=r"rows have dtype .*machine's byte order"):
            _ = FeatureSource(rows).dtype
    indptr, indices = random_csc(np.random.default_rng(2))
    with pytest.raises(InvalidInputError, match="float32"):
        TopologySource(indptr, indices, None, ROWS, torch.float32)
    with pytest.raises(InvalidInputError, match="one id for each edge"):
        TopologySource(indptr, indices, indices[:-1], ROWS, torch.int64)


def _rank_counts_memory(folder: Path, num_rows: int) -> None:
    ranks = Communicator.of_this_machine()
    blueprint = None
    if ranks.rank == 0:
        rows = np.ones((num_rows, 64), np.float32)
        plan = plan_of(ranks.size, {"f": [partitioned(0, num_rows, ranks.size)]})
        blueprint = Blueprint({"f": FeatureSource(rows)}, {}, plan)
    store = build(blueprint, ranks)
    del blueprint
    if ranks.rank == 0:
        del rows
    total = gather_rows(store.tables["f"].view, torch.arange(num_rows)).sum()
    assert total == num_rows * 64
    dist.barrier()
    (folder / f"{ranks.rank}").write_text(str(_share_of_shared_memory()))
    dist.barrier()


def _share_of_shared_memory() -> int:
    """Bytes of /dev/shm that this process has in memory, shared ones divided by their sharers."""
    share, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:  # the first line of a mapping
            counts = "/dev/shm/" in line
        elif counts and line.startswith("Pss:"):
            share += int(line.split()[1]) * 1024
    return share


def test_four_ranks_hold_the_data_once(tmp_path):
    num_rows = 400_000
    launch(_rank_counts_memory, 4, tmp_path, num_rows)
    held = sum(int((tmp_path / f"{rank}").read_text()) for rank in range(4))
    data = num_rows * 64 * 4
    # The kernel rounds a process's share of each mapping down to whole KiB.
    assert data - 64 * 1024 <= held <= 1.1 * data

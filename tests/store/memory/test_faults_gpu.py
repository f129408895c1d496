"""What ranks are told when a store on GPUs fails under them, and what is left then.

Where real GPUs do not matter, also without them (fake_gpu.py).
"""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import (
    IdOutOfRangeError,
    PeerAccessError,
    RankFailedError,
    SharedMemoryError,
)
from dgl_mgpu.ops import (
    SampleKey,
    device,
    gather_rows,
    negative_destinations,
    pinsage_neighbors,
    random_walk,
    sample_blocks,
    sample_neighbors,
)
from dgl_mgpu.placement import HOST
from dgl_mgpu.store.memory import Blueprint, FeatureSource, Store, build
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.utils import timeouts
from tests.store.memory.gpu_runtimes import KINDS, make_runtime, mapped_segments
from tests.store.memory.layouts import partitioned, plan_of
from tests.store.memory.test_gpu_store import power_law_graph, three_tiers
from tests.store.memory.test_tables import ROWS, make_blueprint

pytestmark = pytest.mark.filterwarnings("ignore:the given NumPy array is not writable")

MAX_SECONDS = 30.0
NUM_ROWS = 20_000


@pytest.fixture
def patient_launch(monkeypatch):
    """Ranks that survive another's end have their time to look around."""
    monkeypatch.setattr(timeouts, "REPORTS", 2 * MAX_SECONDS)
    return launch


def numbered(ranks: Communicator) -> Blueprint | None:
    """Rows that hold their number, dealt out over all ranks."""
    if ranks.rank != 0:
        return None
    rows = np.repeat(np.arange(NUM_ROWS, dtype=np.float32)[:, None], 16, axis=1)
    tiers = [partitioned(0, NUM_ROWS, ranks.size)]
    return Blueprint({"f": FeatureSource(rows)}, {}, plan_of(ranks.size, {"f": tiers}))


def gathered(store: Store, seed: int = 0) -> None:
    """Gather random rows, which are right."""
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, NUM_ROWS, 5000))
    rows = gather_rows(store.tables["f"].view, ids.to(store.device))
    assert torch.equal(rows.cpu(), ids.float()[:, None].expand(-1, 16))


def builds_and_reads(ranks: Communicator, runtime) -> None:
    """A store, of which nothing is left."""
    store = build(numbered(ranks), ranks, runtime)
    gathered(store, ranks.rank)
    store.close()
    del store
    gc.collect()
    assert runtime.is_empty
    assert mapped_segments() == 0


def require_all_is_well(kind: str, runtime) -> None:
    """What this process held is given back, and it builds and reads a store of its own."""
    gc.collect()
    assert runtime.is_empty
    assert mapped_segments() == 0
    alone = Communicator()
    builds_and_reads(alone, make_runtime(kind, alone))


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _one_dies_while_it_is_built(kind: str, dying: int, at: str, folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    runtime = make_runtime(kind, ranks)
    builds_and_reads(ranks, runtime)  # so that all is loaded
    if ranks.rank == dying:
        setattr(runtime, at, die)
    begin = time.monotonic()
    # Whoever is about to map the dead rank's memory may find it gone before word comes.
    found_gone = RankFailedError, SharedMemoryError, PeerAccessError
    with pytest.raises(found_gone, match=r"gone|ended|map another rank"):
        build(numbered(ranks), ranks, runtime)
    assert time.monotonic() - begin < MAX_SECONDS
    require_all_is_well(kind, runtime)
    (folder / f"{ranks.rank}").touch()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dying", "at"), [(0, "upload"), (2, "upload"), (1, "open")])
def test_a_rank_killed_while_a_store_is_built(kind, dying, at, tmp_path, patient_launch):
    with pytest.raises(RankFailedError, match=f"rank {dying}: it was killed by SIGKILL"):
        patient_launch(_one_dies_while_it_is_built, 3, kind, dying, at, tmp_path)
    survivors = {path.name for path in tmp_path.iterdir()}
    assert survivors == {"0", "1", "2"} - {f"{dying}"}


def _one_dies_while_all_gather(kind: str, dying: int, folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    runtime = make_runtime(kind, ranks)
    store = build(numbered(ranks), ranks, runtime)
    gathered(store, ranks.rank)
    ranks.all_gather(None)
    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="gone"):
        for turn in range(10_000):
            if ranks.rank == dying and turn == 30:
                die()
            # The memory of a rank that was killed stays until the last has unmapped it.
            gathered(store, turn)
            if turn % 10 == 9:
                ranks.all_gather(None)
    assert time.monotonic() - begin < MAX_SECONDS
    store.close()
    del store
    require_all_is_well(kind, runtime)
    (folder / f"{ranks.rank}").touch()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_killed_while_others_gather(kind, dying, tmp_path, patient_launch):
    with pytest.raises(RankFailedError, match=f"rank {dying}: it was killed by SIGKILL"):
        patient_launch(_one_dies_while_all_gather, 3, kind, dying, tmp_path)
    survivors = {path.name for path in tmp_path.iterdir()}
    assert survivors == {"0", "1", "2"} - {f"{dying}"}


def _one_dies_and_nobody_asks(kind: str) -> None:
    ranks = Communicator.of_this_machine()
    if kind == "cuda":
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
    ranks.all_gather(None)
    if ranks.rank == 1:
        die()
    if kind == "cuda":  # a kernel that waits for the one that is gone
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
    time.sleep(10 * MAX_SECONDS)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_hear_of_nothing_are_ended(kind):
    if kind == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1: it was killed by SIGKILL"):
        launch(_one_dies_and_nobody_asks, 2, kind)
    assert time.monotonic() - begin < 2 * MAX_SECONDS  # with the time that ranks take to begin


def _cannot_map_what_the_plan_has_it_read(kind: str) -> None:
    ranks = Communicator.of_this_machine()
    blind = 1
    runtime = make_runtime(kind, ranks, blind=ranks.rank == blind)
    error = PeerAccessError if ranks.rank == blind else RankFailedError
    with pytest.raises(error, match="map" if ranks.rank == blind else "PeerAccessError"):
        build(numbered(ranks), ranks, runtime)
    require_all_is_well(kind, runtime)
    ranks.all_gather(None)  # the ranks still talk to each other
    builds_and_reads(ranks, make_runtime(kind, ranks))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_maps_no_others_memory_as_its_plan_says(kind):
    launch(_cannot_map_what_the_plan_has_it_read, 3, kind)


def _is_planned_without(kind: str) -> None:
    ranks = Communicator.of_this_machine()
    blind = 1
    runtime = make_runtime(kind, ranks, blind=ranks.rank == blind)
    cuda_runtime.find_runtime = lambda: runtime
    g = power_law_graph()
    store = dgl_mgpu.GlobalStore.from_dgl(g if ranks.rank == 0 else None, gpu_memory=90_000)
    every = torch.arange(g.num_nodes())
    for name, rows in g.ndata.items():
        assert torch.equal(store.gather(name, every.to(store.device)).cpu(), rows)
    tiers = [tier for table in store.plan.tables.values() for tier in table.tiers]
    assert any(tier.memory == "gpu" for tier in tiers)
    for tier in tiers:
        if tier.memory == "gpu":
            assert set(tier.source[blind]) <= {blind, HOST}
    store.close()
    assert runtime.is_empty


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_maps_no_others_memory_is_planned_for(kind):
    launch(_is_planned_without, 3, kind)


def _asks_for_what_is_not_there() -> None:
    ranks = Communicator.of_this_machine()
    runtime = make_runtime("cuda", ranks)
    torch.manual_seed(0)
    blueprint = make_blueprint(ranks.size, three_tiers(ranks.size), Path("/none"))
    store = build(blueprint if ranks.rank == 0 else None, ranks, runtime)
    view, graph = store.tables["features"].view, store.tables["graph"].view
    rows = torch.as_tensor(blueprint.sources["features"].rows)
    key, good = SampleKey(0), torch.tensor([0, ROWS - 1, 1], device=store.device)

    def operators(ids: torch.Tensor) -> list:
        return [
            lambda: sample_neighbors(graph, ids, 3, key),
            lambda: sample_neighbors(graph, ids, -1, key),
            lambda: sample_blocks(graph, ids, [3, 3], key),
            lambda: random_walk(graph, ids, 4, key),
            lambda: pinsage_neighbors(
                graph, ids, num_traversals=2, termination_prob=0.5, num_random_walks=2,
                num_neighbors=2, key=key,
            ),
            lambda: negative_destinations(graph, ids, 2, key),
        ]  # fmt: skip

    for bad in (-1, ROWS, 2**40):
        ids = torch.tensor([0, bad, 1], device=store.device)
        found = gather_rows(view, ids).cpu()  # it does not wait to hear of it
        assert torch.equal(found, torch.stack([rows[0], torch.zeros(7), rows[1]]))
        with pytest.raises(IdOutOfRangeError, match=f"id {bad} is not among the {ROWS} rows"):
            device.raise_faults(store.device, wait=True)
        gather_rows(view, ids)
        torch.cuda.synchronize()
        with pytest.raises(IdOutOfRangeError, match=f"id {bad} is not among the {ROWS} rows"):
            gather_rows(view, good)
        assert torch.equal(gather_rows(view, good).cpu(), rows[good.cpu()])
        for operator, right in zip(operators(ids), operators(good), strict=True):
            with pytest.raises(IdOutOfRangeError, match=f"id {bad}"):
                operator()
                device.raise_faults(store.device, wait=True)
            right()
            device.raise_faults(store.device, wait=True)
    ranks.all_gather(None)
    store.close()
    assert runtime.is_empty


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_an_id_that_is_no_row_is_told_and_the_gpu_is_still_of_use(kind, num_ranks):
    launch(_asks_for_what_is_not_there, num_ranks)

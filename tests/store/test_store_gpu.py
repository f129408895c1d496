"""The store on the GPUs of this machine; with one GPU, several ranks share it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.errors import DeviceMemoryError, RankFailedError
from dgl_mgpu.minibatch.launch import launch
from dgl_mgpu.ops import gather_rows
from dgl_mgpu.store import Blueprint, FeatureSource, Ranks, build
from dgl_mgpu.store.cuda import CudaRuntime
from dgl_mgpu.store.links import prove_access
from tests.store.layouts import partitioned, plan_of
from tests.store.test_gpu_store import power_law_graph, three_tiers
from tests.store.test_store import ROWS, make_blueprint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)

RANKS = [1, 2, 4]


def _free_bytes(ranks: Ranks) -> int:
    """Of this rank's GPU, while no rank allocates or frees."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    ranks.together("come to rest", lambda: None)
    free = torch.cuda.mem_get_info()[0]
    ranks.together("measure", lambda: None)
    return free


def _check_rows(ranks: Ranks) -> None:
    torch.manual_seed(0)
    blueprint = make_blueprint(ranks.size, three_tiers(ranks.size), Path("/none"))
    store = build(blueprint if ranks.rank == 0 else None, ranks, CudaRuntime())
    assert store.device.type == "cuda"
    ids = torch.from_numpy(np.random.default_rng(ranks.rank).integers(0, ROWS, 5000)).cuda()
    for name in ("features", "half", "label"):
        view = store.tables[name].view
        assert view.tiers.is_cuda and view.pointers.is_cuda and view.position.is_cuda
        rows = torch.as_tensor(blueprint.sources[name].rows)
        assert torch.equal(gather_rows(view, ids).cpu(), rows[ids.cpu()])
    positions = {store.tables[name].view.position.data_ptr() for name in ("features", "label")}
    assert len(positions) == 1  # one map for all tables of an order
    store.close()


def _reads_and_frees() -> None:
    ranks = Ranks.of_this_machine()
    _check_rows(ranks)  # contexts and kernels are loaded at the first use, and stay
    before = _free_bytes(ranks)
    _check_rows(ranks)
    assert _free_bytes(ranks) == before


@pytest.mark.parametrize("num_ranks", RANKS)
def test_every_rank_gathers_the_sources_rows_and_closing_frees_all(num_ranks):
    launch(_reads_and_frees, num_ranks)


def _trains_from_dgl() -> None:
    ranks = Ranks.of_this_machine()
    g = power_law_graph()
    store = dgl_mgpu.GlobalStore.from_dgl(g if ranks.rank == 0 else None, gpu_memory=90_000)
    assert store.device == torch.device("cuda", torch.cuda.current_device())
    every = torch.arange(g.num_nodes())
    for name, rows in g.ndata.items():
        storage = store.graph.get_node_storage(name)
        assert torch.equal(storage.fetch(every, "cpu"), rows)
        on_gpu = storage.fetch(every.cuda(), store.device)
        assert on_gpu.device == store.device and torch.equal(on_gpu.cpu(), rows)
    traffic = store.graph.traffic.take()
    assert sum(traffic.rows.values()) == 4 * g.num_nodes()
    assert "device" in {memory for _, memory in traffic.rows}
    store.close()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_store_is_built_for_this_machine(num_ranks):
    launch(_trains_from_dgl, num_ranks)


def _proves() -> None:
    ranks = Ranks.of_this_machine()
    access = prove_access(CudaRuntime(), ranks)
    assert access[np.eye(ranks.size, dtype=bool)].all()
    devices = ranks.all_gather(torch.cuda.current_device())
    for reader, mine in enumerate(devices):
        for owner, other in enumerate(devices):
            expected = mine == other or torch.cuda.can_device_access_peer(mine, other)
            assert access[reader, owner] == expected


def test_access_is_proved():
    launch(_proves, 2)


def _runs_out_of_memory() -> None:
    ranks = Ranks.of_this_machine()
    _check_rows(ranks)  # contexts and kernels are loaded at the first use, and stay
    before = _free_bytes(ranks)
    total = torch.cuda.mem_get_info()[1]
    num_rows = total // (1 << 20) * ranks.size
    rows = np.broadcast_to(np.zeros(1, np.uint8), (num_rows, 1 << 20))
    blueprint = Blueprint(
        {"f": FeatureSource(rows)},
        {},
        plan_of(ranks.size, {"f": [partitioned(0, num_rows, ranks.size)]}),
    )
    with pytest.raises(DeviceMemoryError) as caught:
        build(blueprint if ranks.rank == 0 else None, ranks, CudaRuntime())
    assert caught.value.needed > caught.value.available > 0
    assert _free_bytes(ranks) == before
    _check_rows(ranks)  # the GPU is still of use


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_out_of_memory(num_ranks):
    launch(_runs_out_of_memory, num_ranks)


def _fails_half_way() -> None:
    ranks = Ranks.of_this_machine()
    _check_rows(ranks)  # contexts and kernels are loaded at the first use, and stay
    before = _free_bytes(ranks)
    runtime = CudaRuntime()
    if ranks.rank == ranks.size - 1:
        runtime.upload = _fail  # type: ignore[method-assign]
    rows = np.ones((100_000, 16), np.float32)
    blueprint = Blueprint(
        {"f": FeatureSource(rows)},
        {},
        plan_of(ranks.size, {"f": [partitioned(0, len(rows), ranks.size)]}),
    )
    with pytest.raises((RankFailedError, RuntimeError), match="on fire"):
        build(blueprint if ranks.rank == 0 else None, ranks, runtime)
    assert _free_bytes(ranks) == before


def _fail(address: int, data: np.ndarray) -> None:
    raise RuntimeError("the bus is on fire")


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_failure_half_way_leaves_nothing(num_ranks):
    launch(_fails_half_way, num_ranks)

"""The store on the GPUs of this machine; with one GPU, several ranks share it.

Other tests may run beside these on the same GPUs: what a store gives back is counted, by calls of
this process.  That the driver has all of it again is measured in test_gpu_memory.py.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.errors import DeviceMemoryError, RankFailedError
from dgl_mgpu.ops import gather_rows
from dgl_mgpu.placement import Tier
from dgl_mgpu.store.memory import Blueprint, FeatureSource, build
from dgl_mgpu.store.memory.machine import prove_access
from dgl_mgpu.train.launch.launch import launch
from tests.store.memory.gpu_runtimes import CountingRuntime, fail, mapped_segments
from tests.store.memory.layouts import partitioned, plan_of
from tests.store.memory.test_gpu_store import power_law_graph, three_tiers
from tests.store.memory.test_tables import ROWS, make_blueprint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)

RANKS = [1, 2, 4]


def reads_all_rows(ranks: Communicator, runtime: Runtime) -> None:
    torch.manual_seed(0)
    blueprint = make_blueprint(ranks.size, three_tiers(ranks.size), Path("/none"))
    store = build(blueprint if ranks.rank == 0 else None, ranks, runtime)
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


def asks_for_more_than_there_is(ranks: Communicator, runtime: Runtime) -> None:
    num_rows = torch.cuda.mem_get_info()[1] // (1 << 20) * ranks.size
    rows = np.broadcast_to(np.zeros(1, np.uint8), (num_rows, 1 << 20))
    blueprint = Blueprint(
        {"f": FeatureSource(rows)},
        {},
        plan_of(ranks.size, {"f": [partitioned(0, num_rows, ranks.size)]}),
    )
    with pytest.raises(DeviceMemoryError) as caught:
        build(blueprint if ranks.rank == 0 else None, ranks, runtime)
    assert caught.value.needed > caught.value.available > 0


def is_told_late_that_memory_is_short(ranks: Communicator, runtime: Runtime) -> None:
    """Another process takes the memory between the store's look at it and its allocation."""
    device_info = runtime.device_info()
    runtime.device_info = lambda: cuda_runtime.DeviceInfo(
        device_info.gpu, device_info.total * 2**8, device_info.total
    )  # type: ignore[method-assign]
    num_rows = (device_info.total >> 20) + 1
    last = ranks.size - 1  # the others have little to allocate
    rows = np.broadcast_to(np.zeros(1, np.uint8), (num_rows, 1 << 20))
    tier = Tier(0, num_rows, "gpu", 1, ((last,),), ((last,),) * ranks.size)
    blueprint = Blueprint({"f": FeatureSource(rows)}, {}, plan_of(ranks.size, {"f": [tier]}))
    with pytest.raises(DeviceMemoryError if ranks.rank == last else RankFailedError, match="free"):
        build(blueprint if ranks.rank == 0 else None, ranks, runtime)


def fails_half_way(ranks: Communicator, runtime: Runtime) -> None:
    if ranks.rank == ranks.size - 1:
        runtime.upload = fail  # type: ignore[method-assign]
    rows = np.ones((100_000, 16), np.float32)
    blueprint = Blueprint(
        {"f": FeatureSource(rows)},
        {},
        plan_of(ranks.size, {"f": [partitioned(0, len(rows), ranks.size)]}),
    )
    with pytest.raises((RankFailedError, RuntimeError), match="on fire"):
        build(blueprint if ranks.rank == 0 else None, ranks, runtime)


SCENARIOS = [
    reads_all_rows,
    asks_for_more_than_there_is,
    is_told_late_that_memory_is_short,
    fails_half_way,
]


def _holds_nothing_after(scenario: Callable[[Communicator, Runtime], None]) -> None:
    ranks = Communicator.of_this_machine()
    reads_all_rows(ranks, CountingRuntime())  # what kernels keep is allocated at the first use
    gc.collect()
    before = torch.cuda.memory_allocated(), mapped_segments()
    runtime = CountingRuntime()
    scenario(ranks, runtime)
    gc.collect()
    assert runtime.is_empty
    assert (torch.cuda.memory_allocated(), mapped_segments()) == before
    reads_all_rows(ranks, CountingRuntime())  # the GPU is still of use


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_is_held_after_a_store_that(scenario, num_ranks):
    launch(_holds_nothing_after, num_ranks, scenario)


def _trains_from_dgl() -> None:
    ranks = Communicator.of_this_machine()
    runtime = CountingRuntime()
    cuda_runtime.find_runtime = lambda: runtime  # of a process that ends after this
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
    assert runtime.is_empty


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_store_is_built_for_this_machine(num_ranks, monkeypatch):
    monkeypatch.setattr(
        cuda_runtime, "find_runtime", cuda_runtime.find_runtime
    )  # one rank runs here
    launch(_trains_from_dgl, num_ranks)


def _proves() -> None:
    ranks = Communicator.of_this_machine()
    runtime = CountingRuntime()
    access = prove_access(runtime, ranks)
    assert runtime.is_empty
    assert access[np.eye(ranks.size, dtype=bool)].all()
    devices = ranks.all_gather(torch.cuda.current_device())
    for reader, mine in enumerate(devices):
        for owner, other in enumerate(devices):
            expected = mine == other or torch.cuda.can_device_access_peer(mine, other)
            assert access[reader, owner] == expected


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_access_is_proved(num_ranks):
    launch(_proves, num_ranks)

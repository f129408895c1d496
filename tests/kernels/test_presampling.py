"""Pre-sampling and counting on a GPU: the kernels count what the CPU's operators count."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.ops import device
from dgl_mgpu.ops.blocks_cuda import _sample_hops
from dgl_mgpu.ops.etype_hops import _sample_etype_hops_cuda
from dgl_mgpu.ops.sample import _sample_neighbors_cuda
from dgl_mgpu.ops.unique import _append_unique_cuda
from dgl_mgpu.store.content import read_graph
from dgl_mgpu.store.hotness import presample_hotness
from tests.store.memory.fake_gpu import FakeRuntime
from tests.store.test_graph import hetero_graph, power_law_graph

GRAPHS = [
    (power_law_graph(idtype=torch.int32), torch.arange(0, 800, 4)),
    (hetero_graph(), {"user": torch.arange(10), "item": torch.arange(7)}),
]
#: What a mini-batch is sampled by, on a GPU.
OPERATORS = {
    "append_unique": _append_unique_cuda,
    "sample_etype_hops": _sample_etype_hops_cuda,
    "sample_hops": _sample_hops,
    "sample_neighbors": _sample_neighbors_cuda,
}
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)


@contextlib.contextmanager
def runtime_of(where: torch.device) -> Iterator[Runtime]:
    """A GPU; under the emulator, operators on CPU tensors launch kernels meanwhile."""
    if where.type == "cuda":
        yield Runtime()
        return
    with torch.library._scoped_library("dgl_mgpu", "IMPL") as library:
        for name, operator in OPERATORS.items():
            library.impl(name, operator, "CPU", allow_override=True)
        yield FakeRuntime(0, 1)


def presampled(g, seeds, fanouts, runtime: Runtime | None = None) -> dict[str, np.ndarray]:
    data = read_graph(g, None)
    graph = data.schema.num_nodes, data.schema.canonical_etypes, data.sources
    return presample_hotness(*graph, seeds, fanouts, 5, 0, runtime)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("fanouts", [[3, 4], [-1, 3]])
@pytest.mark.parametrize(("g", "seeds"), GRAPHS)
def test_the_gpu_counts_what_the_cpu_counts(where, g, seeds, fanouts, monkeypatch):
    monkeypatch.setattr("dgl_mgpu.store.hotness._BATCHES", 4)
    expected = presampled(g, seeds, fanouts)
    with runtime_of(where) as runtime:
        found = presampled(g, seeds, fanouts, runtime)
    if where.type == "cpu":
        assert device.driver.launched
    for ntype, counts in expected.items():
        assert counts.sum() and np.array_equal(found[ntype], counts)


@needs_gpu
@pytest.mark.alone
def test_presampling_gives_all_memory_back():
    runtime = Runtime()
    presampled(*GRAPHS[0], [3, 4], runtime)  # kernels are loaded at the first use, and stay
    runtime.synchronize()
    free = runtime.device_info().free
    presampled(*GRAPHS[0], [3, 4], runtime)
    assert runtime.device_info().free == free


@needs_gpu
def test_an_id_that_is_no_row_harms_no_counts():
    store = dgl_mgpu.GlobalStore.from_dgl(power_law_graph(), device="cuda")
    with store.count_accesses() as accesses:
        store.gather("feat", torch.tensor([3, 4, 3], device=store.device))
        store.gather("feat", torch.tensor([-1, 800, 2**40], device=store.device))
        with pytest.raises(IdOutOfRangeError):
            device.raise_faults(store.device, wait=True)
        store.gather("label", torch.tensor([5], device=store.device))
    assert accesses.counts()["_N"][2:7].tolist() == [0, 2, 1, 1, 0]
    store.close()

"""Device code that sees the store: the accessors and the random numbers, against the CPU's.

Runs where CuPy sees a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.ops.cpu import kernel
from dgl_mgpu.ops.philox import philox
from dgl_mgpu.ops.view import PAIRED
from dgl_mgpu.utils.resources import resource_folder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SOURCE = r"""
#include "ggms.cuh"
using namespace dgl_mgpu;

extern "C" __global__ void draws(const uint64* nodes, int n, uint32 block, uint32 stream,
                                 uint64 key, uint64* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const Draws both = philox(nodes[i], block, stream, key);
  out[2 * i] = both.first;
  out[2 * i + 1] = both.second;
}

extern "C" __global__ void degrees(const int64* tiers, int num_tiers, const int* position,
                                   const int64* pointers, const int64* nodes, int n, int64* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const Graph<int, int> graph{{tiers, num_tiers, position}, pointers};
  out[i] = graph.NumNeighbor(nodes[i]);
}

extern "C" __global__ void neighbors(const int64* tiers, int num_tiers, const int* position,
                                     const int64* pointers, const int64* nodes, int n,
                                     const int64* starts, int* sources, int* eids) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const Graph<int, int> graph{{tiers, num_tiers, position}, pointers};
  const auto span = graph.Find(nodes[i]);
  for (int64 j = 0; j < span.size(); ++j) {
    sources[starts[i] + j] = graph.Neighbors(nodes[i])[j];
    eids[starts[i] + j] = span.edge(j);
  }
}

extern "C" __global__ void rows(const int64* tiers, int num_tiers, const int* position,
                                const int64* pointers, int64 row_bytes, const int64* nodes, int n,
                                int width, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const FeatureTable<int> table{{tiers, num_tiers, position}, pointers, row_bytes};
  const float* row = table.Features<float>(nodes[i]);
  for (int j = 0; j < width; ++j) out[i * width + j] = row[j];
}
"""


@pytest.fixture(scope="module")
def module():
    cupy = pytest.importorskip("cupy")
    options = ("-std=c++17", f"-I{resource_folder('kernels')}")
    return cupy.RawModule(code=SOURCE, options=options)


def launch(module, name: str, count: int, *arguments) -> None:
    import cupy

    values = [
        a.data_ptr() if isinstance(a, torch.Tensor) else (0 if a is None else a) for a in arguments
    ]
    module.get_function(name)(((count + 127) // 128,), (128,), tuple(values))
    cupy.cuda.runtime.deviceSynchronize()


@kernel
def _cpu_draws(nodes, block, stream, key, out):
    for i in range(len(nodes)):
        out[2 * i], out[2 * i + 1] = philox(nodes[i], block, stream, key)


def test_philox_is_the_cpus_bit_for_bit(module):
    rng = np.random.default_rng(0)
    nodes = rng.integers(0, 2**63, 1000)
    for block, stream, key in ((0, 0, 1), (5, 0, 2**63 + 12345), (2**31, 2**31 + 7, 0)):
        expected = np.zeros(2000, np.uint64)
        _cpu_draws(nodes, block, stream, np.uint64(key).view(np.int64), expected)
        out = torch.full((2000,), -1, dtype=torch.int64, device="cuda")
        launch(
            module, "draws", 1000, torch.from_numpy(nodes).cuda(), np.int32(1000),
            np.uint32(block), np.uint32(stream), np.uint64(key), out,
        )  # fmt: skip
        assert np.array_equal(out.cpu().numpy().view(np.uint64), expected)


class Layout:
    """A replicated, a partitioned and a last tier over segments in GPU memory."""

    def __init__(self, num_rows: int) -> None:
        a, b = num_rows // 5, num_rows // 2
        self.tiers = [(0, a, 1, 0), (a, b, 3, 1), (b, num_rows, 2, 4)]
        self.order = np.random.default_rng(1).permutation(num_rows)
        position = np.empty(num_rows, np.int32)
        position[self.order] = np.arange(num_rows, dtype=np.int32)
        self.position = torch.from_numpy(position).cuda()
        self.tiers_cuda = torch.tensor(self.tiers, dtype=torch.int64, device="cuda")

    def parts(self):
        for start, stop, parts, _ in self.tiers:
            for part in range(parts):
                yield self.order[start + part : stop : parts]

    @property
    def head(self) -> tuple:
        return self.tiers_cuda, np.int32(len(self.tiers)), self.position


def test_features_finds_every_row(module):
    layout = Layout(1013)
    table = torch.randn(1013, 7)
    segments = [table[torch.from_numpy(ids)].cuda() for ids in layout.parts()]
    pointers = torch.tensor([s.data_ptr() for s in segments], device="cuda")
    nodes = torch.randint(0, 1013, (5000,))
    out = torch.full((5000, 7), float("nan"), device="cuda")
    launch(
        module, "rows", 5000, *layout.head, pointers, np.int64(28), nodes.cuda(),
        np.int32(5000), np.int32(7), out,
    )  # fmt: skip
    assert torch.equal(out.cpu(), table[nodes])


@pytest.mark.parametrize("edge_ids", ["stored", "paired", "places"])
def test_neighbors_finds_every_edge(module, edge_ids):
    rng = np.random.default_rng(2)
    degrees = rng.zipf(1.7, 1013).clip(max=300) - 1
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = rng.integers(0, 1013, indptr[-1]).astype(np.int32)
    eids = rng.permutation(len(indices)).astype(np.int32)
    layout = Layout(1013)
    if edge_ids != "stored":
        eids = np.arange(len(indices), dtype=np.int32)
    if edge_ids == "places":  # allowed where one segment holds all rows, in the order of their ids
        layout.tiers = [(0, 1013, 1, 0)]
        layout.order = np.arange(1013)
        layout.position = None
        layout.tiers_cuda = torch.tensor(layout.tiers, dtype=torch.int64, device="cuda")
    segments, pointers = [], []
    for ids in layout.parts():
        local = np.concatenate([[0], np.cumsum(degrees[ids])]).astype(np.int64)
        if edge_ids == "paired":
            local = np.stack([local, np.append(indptr[ids], 0)], axis=1)
        places = np.concatenate([np.arange(indptr[i], indptr[i + 1]) for i in ids])
        arrays = [torch.from_numpy(x).cuda() for x in (local, indices[places], eids[places])]
        segments.append(arrays)
        third = {"stored": arrays[2].data_ptr(), "paired": PAIRED, "places": 0}[edge_ids]
        pointers.append([*(a.data_ptr() for a in arrays[:2]), third])
    table = torch.tensor(pointers, dtype=torch.int64, device="cuda")
    nodes = torch.arange(1013, device="cuda")
    found = torch.full((1013,), -1, dtype=torch.int64, device="cuda")
    launch(module, "degrees", 1013, *layout.head, table, nodes, np.int32(1013), found)
    assert np.array_equal(found.cpu().numpy(), degrees)
    sources = torch.full((len(indices),), -1, dtype=torch.int32, device="cuda")
    ids = torch.full((len(indices),), -1, dtype=torch.int32, device="cuda")
    starts = torch.from_numpy(indptr[:-1].astype(np.int64)).cuda()
    launch(
        module, "neighbors", 1013, *layout.head, table, nodes, np.int32(1013), starts, sources, ids
    )
    assert np.array_equal(sources.cpu().numpy(), indices)
    assert np.array_equal(ids.cpu().numpy(), eids)

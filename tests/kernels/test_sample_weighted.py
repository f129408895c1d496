"""Weighted and temporal neighbour sampling as CUDA kernels: bit for bit the CPU's results."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidWeightError
from dgl_mgpu.ops import EdgeTimes, RowView, SampleKey, sample_neighbors
from dgl_mgpu.ops import sample_weighted_cuda as cuda
from dgl_mgpu.ops.device import source_text
from dgl_mgpu.ops.philox import exponential
from dgl_mgpu.ops.sample_weighted import weighting
from dgl_mgpu.ops.view import GraphView
from tests.kernels.cuda_views import on_device
from tests.ops.test_sample import GRAPHS, batches
from tests.ops.test_sample_weighted import DTYPES, TIME_DTYPES, random_times, random_weights
from tests.ops.views import LAYOUTS, Graph, power_law_graph, row_view

KEY = SampleKey(seed=3, epoch=1, batch=4, hop=2)
#: Degrees on both sides of what a warp's lanes, a warp and a block's shared memory hold.
HUBS = Graph.of_lists([[node] * n for node, n in enumerate([0, 5000, 31, 32, 33, 1024, 1025])])


def sample(
    where: torch.device,
    view: GraphView,
    seeds: torch.Tensor,
    fanout: int,
    replace: bool = False,
    weights: RowView | None = None,
    times: EdgeTimes | None = None,
) -> tuple[torch.Tensor, ...]:
    """By the CUDA implementation, on the device's copies of what lies on the CPU."""
    view, seeds = on_device(view, where, host_segments=True), seeds.to(where)
    if weights is not None:
        weights = on_device(weights, where, host_segments=True)
    if times is not None:
        edges = on_device(times.edges, where, host_segments=True)
        times = EdgeTimes(edges, times.until.to(where))
    return cuda._sample_neighbors_weighted(
        seeds, view.tiers, view.pointers, view.position, view.num_rows, view.idtype,
        *weighting(view, seeds, weights, times), fanout, replace, KEY.fold(),
    )  # fmt: skip


def agree(where: torch.device, view: GraphView, seeds: torch.Tensor, fanout: int, **kwargs) -> bool:
    found = sample(where, view, seeds, fanout, **kwargs)
    expected = sample_neighbors(view, seeds, fanout, KEY, **kwargs)
    return all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def check(where: torch.device, view: GraphView, weights: RowView) -> None:
    view, weights = on_device(view, where), on_device(weights, where)
    cuda._check_weights(
        view.tiers, view.pointers, view.position, view.num_rows, view.idtype,
        [weights.tiers, weights.pointers, weights.position], weights.dtype,
    )  # fmt: skip


EXPONENTIALS = r"""
namespace dgl_mgpu {
__global__ void exponentials(const uint64* draws, int64 count, double* out) {
  for (int64 i = threadIdx.x; i < count; i += blockDim.x) out[i] = exponential(draws[i]);
}
}  // namespace dgl_mgpu
"""


def test_exponential_is_the_cpus_bit_for_bit(emulated):
    """A fused operation shows in one of a thousand draws."""
    draws = np.random.default_rng(0).integers(0, 2**64, 20_000, np.uint64)
    draws[:2000] >>= np.arange(2000, dtype=np.uint64) % np.uint64(64)
    draws[:2] = 0, 2**64 - 1
    out = torch.empty(len(draws), dtype=torch.float64)
    text = source_text("exponential.cuh") + EXPONENTIALS
    given = torch.from_numpy(draws.view(np.int64))
    emulated.run(text, "dgl_mgpu::exponentials", 1, 64, given, len(draws), out)
    assert out.tolist() == [exponential(draw) for draw in draws]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("dtype", "fanout"), [*product(DTYPES, (5, 49)), *product([torch.float32], (0, 1, 200, -1))]
)
def test_graphs(where, dtype, fanout, replace):
    for number, graph in enumerate(GRAPHS.values()):
        weights = row_view(random_weights(graph, dtype))
        view = graph.view(idtype=(torch.int32, torch.int64)[number % 2])
        for seeds in batches(graph):
            assert agree(where, view, seeds[:70], fanout, replace=replace, weights=weights)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [3, 32, 33, 1024, 1025, -1])
def test_hubs(where, fanout, replace):
    seeds = torch.tensor([6, 1, 0, 2, 3, 4, 5, 6, 1])
    random = np.random.default_rng(7)
    for share in (0.95, 0.02):  # of edges that may be drawn
        mask = random.random(len(HUBS.indices)) < share
        mask[HUBS.indptr[1:-1]] = True
        # The larger the weights towards the end, the more often do edges come that are to be kept.
        for weights in (mask, mask * np.exp(np.arange(len(mask)) / 100)):
            rows = row_view(torch.from_numpy(weights))
            assert agree(where, HUBS.view(), seeds, fanout, replace=replace, weights=rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed_dtype", [torch.int32, torch.int64])
def test_tiers(where, layout, seed_dtype):
    graph = power_law_graph(100, 900, seed=5)
    seeds = torch.arange(100, dtype=seed_dtype)
    weights = random_weights(graph, torch.float32)
    weights[weights == 0] = 1e-20
    edges, until = random_times(graph, torch.float32, 100)
    for shuffle in (None, np.random.default_rng(0)):
        view = graph.view(LAYOUTS[layout], torch.int32, shuffle)
        rows = row_view(weights, LAYOUTS[layout], shuffle)
        times = EdgeTimes(row_view(edges, LAYOUTS[layout], shuffle), until)
        assert agree(where, view, seeds, 4, weights=rows)
        assert agree(where, view, seeds, 4, weights=rows, times=times)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("dtype", TIME_DTYPES)
def test_times(where, dtype, replace):
    for graph in (GRAPHS["power law"], GRAPHS["own edge ids"], HUBS):
        seeds = torch.arange(graph.num_rows).repeat(2)[:200]
        edges, until = random_times(graph, dtype, len(seeds))
        times = EdgeTimes(row_view(edges), until)
        mask = row_view(random_weights(graph, torch.uint8))
        for fanout in (4, 40, -1):
            assert agree(where, graph.view(), seeds, fanout, replace=replace, times=times)
            assert agree(
                where, graph.view(), seeds, fanout, replace=replace, times=times, weights=mask
            )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e-30])
@pytest.mark.parametrize("node", [1, 5])  # a block's and a warp's work
def test_bad_weights(where, node, bad):
    weights = torch.ones(len(HUBS.indices))
    first, last = (int(edge) for edge in HUBS.edge_ids(node)[[20, -1]])
    weights[[first, last]] = bad
    weights[HUBS.edge_ids(6)[3]] = bad
    message = f"edge {first} of node {node} has a weight that is NaN, infinite or negative"
    with pytest.raises(InvalidWeightError, match=message):
        sample(where, HUBS.view(), torch.tensor([2, node, 6]), 3, weights=row_view(weights))
    with pytest.raises(InvalidWeightError, match=message):
        check(where, HUBS.view(), row_view(weights))
    others = torch.tensor([2, 3])  # a node that nobody asks for is not looked at
    assert agree(where, HUBS.view(), others, 2, weights=row_view(weights))


@pytest.mark.parametrize("node", [1, 5])
def test_all_weights_zero(where, node):
    weights = torch.ones(len(HUBS.indices))
    weights[HUBS.edge_ids(node)] = 0
    message = f"all edges of node {node} have weight 0"
    with pytest.raises(InvalidWeightError, match=message):
        sample(where, HUBS.view(), torch.tensor([3, node]), 3, weights=row_view(weights))
    with pytest.raises(InvalidWeightError, match=message):
        check(where, HUBS.view(), row_view(weights))
    check(where, HUBS.view(), row_view(weights != 0))


def test_nodes_are_checked_in_groups(where, monkeypatch):
    monkeypatch.setattr(cuda, "CHECKED_TOGETHER", 30)
    graph = GRAPHS["power law"]
    weights = random_weights(graph, torch.float64)
    check(where, graph.view(), row_view(weights))
    node = 121
    weights[graph.edge_ids(node)[-1]] = -1
    with pytest.raises(InvalidWeightError, match=f"of node {node} "):
        check(where, graph.view(), row_view(weights))


def test_a_check_raises_what_a_gather_found(where):
    weights = row_view(torch.ones(len(HUBS.indices)))
    record = cuda.gpu.fault_record(on_device(weights, where).tiers.device)
    record.copy_(torch.tensor([1, 7, 5]))
    with pytest.raises(IdOutOfRangeError, match="id 7 is not among the 5 rows"):
        check(where, HUBS.view(), weights)


@pytest.mark.parametrize("bad", [-1, 200])
def test_a_seed_that_is_no_node(where, bad):
    weights = torch.full((3000,), -1.0)  # bad, too, but a seed that is no node comes first
    seeds = torch.tensor([5, 6, bad, 7, bad])
    with pytest.raises(IdOutOfRangeError, match=f"id {bad} at place 2"):
        sample(where, GRAPHS["power law"].view(), seeds, 3, weights=row_view(weights))


def test_weights_too_small_for_a_normal_float(where):
    graph = power_law_graph(100, 900, seed=5)
    weights = (torch.rand(900) + 0.5) * 1e-39
    assert weights.min() > 0 and weights.max() < torch.finfo(torch.float32).smallest_normal
    seeds = torch.arange(100)
    for replace in (False, True):
        assert agree(where, graph.view(), seeds, 4, replace=replace, weights=row_view(weights))

"""Functions of arrays on a GPU against those of DGL, or of torch, on the CPU."""

from __future__ import annotations

import dgl
import dgl.geometry
import pytest
import torch
from dgl import backend as F
from dgl import ndarray as nd
from dgl._ffi.streams import _dgl_get_stream, to_dgl_stream_handle
from dgl.partition import NDArrayPartition
from dgl.random import choice
from dgl.utils import Filter
from dgl.utils.checks import is_sorted_srcdst

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def with_gradients(function, *tensors):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape).to(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(found, expected, dtype):
    for ours, theirs in zip(found, expected, strict=True):
        scale = max(1.0, theirs.abs().max().item())
        tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * scale}
        torch.testing.assert_close(ours.cpu().double(), theirs, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [4, 100])
def test_products_by_type_are_those_of_the_cpu(dtype, width):
    torch.manual_seed(0)
    lengths = torch.tensor([3, 0, 500, 97])
    a, b = torch.randn(600, width).to(dtype), torch.randn(4, width, width).to(dtype)
    expected = with_gradients(
        lambda a, b: dgl.ops.segment_mm(a, b, lengths), a.double(), b.double()
    )
    found = with_gradients(lambda a, b: dgl.ops.segment_mm(a, b, lengths), a.cuda(), b.cuda())
    assert_same(found, expected, dtype)
    types = torch.randint(0, 4, (600,))
    expected = with_gradients(
        lambda a, b: dgl.ops.gather_mm(a, b, idx_b=types), a.double(), b.double()
    )
    there = types.cuda()
    found = with_gradients(lambda a, b: dgl.ops.gather_mm(a, b, idx_b=there), a.cuda(), b.cuda())
    assert_same(found, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("reducer", ["sum", "mean", "max", "min"])
def test_reductions_of_segments_are_those_of_the_cpu(reducer, dtype):
    torch.manual_seed(0)
    lengths, values = torch.tensor([3, 0, 500, 97]), torch.randn(600, 5).to(dtype)
    expected = with_gradients(
        lambda x: dgl.ops.segment_reduce(lengths, x, reducer), values.double()
    )
    there = lengths.cuda()
    found = with_gradients(lambda x: dgl.ops.segment_reduce(there, x, reducer), values.cuda())
    assert_same(found, expected, dtype)


@pytest.mark.parametrize("segments", [[200], [50, 150], [20] * 10], ids=str)
def test_neighbours_and_samples_of_points_are_those_of_the_cpu(segments):
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    knn = dgl.transforms.functional.knn
    expected = knn(5, x, segments).view(2, 200, 5).sort(2).values
    for algorithm in ("bruteforce", "bruteforce-sharemem", "nn-descent"):
        found = knn(5, x.cuda(), segments, algorithm=algorithm)
        assert torch.equal(found.cpu().view(2, 200, 5).sort(2).values, expected)
    points = x.view(4, 50, 3)
    sampled = dgl.geometry.farthest_point_sampler(points, 20, start_idx=7)
    found = dgl.geometry.farthest_point_sampler(points.cuda(), 20, start_idx=7)
    assert torch.equal(found.cpu(), sampled)


def test_matchings_are_of_two_neighbours_each():
    graph = dgl.to_bidirected(dgl.remove_self_loop(dgl.rand_graph(100, 400)))
    labels = dgl.geometry.neighbor_matching(graph.to("cuda"), relabel_idx=False).cpu()
    for label, count in zip(*labels.unique(return_counts=True), strict=True):
        nodes = (labels == label).nonzero()[:, 0]
        assert count <= 2 and nodes[0] == label
        assert count == 1 or graph.has_edges_between(*nodes)


def test_filters_orders_partitions_and_choices():
    ids, test = torch.tensor([3, 2, 9]).cuda(), torch.tensor([0, 2, 8, 9]).cuda()
    assert Filter(ids).find_included_indices(test).tolist() == [1, 3]
    assert Filter(ids).find_excluded_indices(test).tolist() == [0, 2]
    assert is_sorted_srcdst(ids.sort().values, ids) == (True, True)
    assert is_sorted_srcdst(ids, ids) == (False, False)
    partition = NDArrayPartition(10, 2)
    order, counts = partition.generate_permutation(torch.tensor([0, 2, 4, 5, 8, 8, 9]).cuda())
    assert order.is_cuda and order.tolist() == [0, 1, 2, 4, 5, 3, 6] and counts.tolist() == [5, 2]
    ranges = torch.tensor([0, 4, 10]).cuda()
    assert NDArrayPartition(10, 2, "range", ranges).map_to_local(ids).tolist() == [3, 2, 5]
    drawn = []
    for _ in range(2):
        dgl.seed(5)
        drawn.append(choice(100, 20, False, torch.rand(100, device="cuda") + 1))
    assert drawn[0].is_cuda and len(drawn[0].unique()) == 20


def test_arrays_of_dgl_that_share_memory_of_a_gpu_can_be_read():
    tensor = torch.arange(6, dtype=torch.int32, device="cuda").view(2, 3)
    array = nd.from_dlpack(F.zerocopy_to_dlpack(tensor))
    tensor[1] = 9
    assert array.ctx == nd.gpu(0) and array.dtype == "int32"
    assert array.asnumpy().tolist() == tensor.tolist()
    assert str(array) == str(tensor.cpu().numpy())


def test_the_current_stream_is_torchs():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert _dgl_get_stream(nd.gpu(0)).value == to_dgl_stream_handle(stream).value
    assert _dgl_get_stream(nd.gpu(0)).value != to_dgl_stream_handle(stream).value
    assert _dgl_get_stream(nd.cpu()).value is None

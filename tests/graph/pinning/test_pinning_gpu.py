"""Pinned memory of the host as the GPUs of this machine see it, and caches of it."""

from __future__ import annotations

import copy
import gc
import importlib.util
import pickle
from multiprocessing.reduction import ForkingPickler

import dgl
import numpy as np
import pytest
import torch
from dgl.cuda import GPUCache
from dgl.utils import (
    gather_pinned_tensor_rows,
    pin_memory_inplace,
    scatter_pinned_tensor_rows,
)

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.ops import device

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)


def test_torch_sees_that_memory_is_pinned_and_when_no_longer():
    tensor = torch.arange(100_000)
    assert not tensor.is_pinned()
    first, second = pin_memory_inplace(tensor), pin_memory_inplace(tensor[50:])
    assert tensor.is_pinned() and tensor[99_000:].is_pinned()
    first.unpin_memory_()
    assert tensor.is_pinned()
    del second
    gc.collect()
    assert not tensor.is_pinned()
    pin_memory_inplace(tensor)  # not kept
    assert not tensor.is_pinned()


def test_small_tensors_of_one_page_are_pinned_each():
    tensors = [torch.full((3,), n) for n in range(200)]
    held = [pin_memory_inplace(tensor) for tensor in tensors]
    ids = torch.tensor([2, 0], device="cuda")
    for number, tensor in enumerate(tensors):
        assert gather_pinned_tensor_rows(tensor, ids).tolist() == [number] * 2
    del held
    assert not any(tensor.is_pinned() for tensor in tensors)


def test_memory_that_others_pinned_or_share_is_pinned_too():
    by_torch = torch.randn(100, 4).pin_memory()
    with pytest.raises(dgl.DGLError):
        pin_memory_inplace(by_torch).unpin_memory_()
    assert by_torch.is_pinned()
    shared = torch.randn(1000, 4).share_memory_()
    array = np.zeros((1000, 4), np.float32)
    for tensor in (shared, torch.from_numpy(array), torch.from_numpy(array[10:])):
        held = pin_memory_inplace(tensor)
        ids = torch.randint(0, len(tensor), (50,), device="cuda")
        assert torch.equal(gather_pinned_tensor_rows(tensor, ids).cpu(), tensor[ids.cpu()])
        del held
        assert not tensor.is_pinned()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("row_shape", [(), (1,), (5,), (128,), (2, 3)], ids=str)
@pytest.mark.parametrize("skipped", [0, 1, 3])
@pytest.mark.parametrize("count", [0, 1, 300, 20_000])
def test_rows_are_gathered_and_scattered(row_shape, dtype, skipped, count):
    torch.manual_seed(0)
    whole = torch.randint(0, 2, (3000, *row_shape)).to(dtype)
    held = pin_memory_inplace(whole)
    part = whole[skipped:]
    ids = torch.randint(0, len(part), (count,), device="cuda", dtype=torch.int32)
    found = gather_pinned_tensor_rows(part, ids)
    assert found.is_cuda and found.dtype == dtype
    assert torch.equal(found.cpu(), part[ids.cpu().long()])
    places = torch.randperm(len(part))[:count].cuda()
    rows = torch.randint(0, 2, (len(places), *row_shape)).to(dtype).cuda()
    scatter_pinned_tensor_rows(part, places, rows)
    torch.cuda.synchronize()
    assert torch.equal(part[places.cpu()], rows.cpu())
    del held


def test_a_stream_of_ones_own_reads_the_same():
    tensor = torch.randn(5000, 7)
    held = pin_memory_inplace(tensor)
    ids = torch.randint(0, 5000, (9000,), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gather_pinned_tensor_rows(tensor, ids)
    stream.synchronize()
    assert torch.equal(found.cpu(), tensor[ids.cpu()])
    del held


def test_what_is_not_pinned_or_out_of_range_is_refused():
    tensor, ids = torch.randn(10, 3), torch.tensor([3, 10], device="cuda")
    with pytest.raises(InvalidInputError, match="not pinned"):
        gather_pinned_tensor_rows(tensor, ids)
    held = pin_memory_inplace(tensor)
    found = gather_pinned_tensor_rows(tensor, ids)
    with pytest.raises(IdOutOfRangeError, match="10"):
        device.raise_faults(ids.device, wait=True)
    assert found[1].tolist() == [0, 0, 0]
    with pytest.raises(InvalidInputError, match="cuda"):
        pin_memory_inplace(ids)
    del held


def sampled(graph: dgl.DGLGraph) -> list[int]:
    """Sources of all edges of node 2, sampled by a GPU."""
    found = dgl.sampling.sample_neighbors(graph, torch.tensor([2], device="cuda"), -1)
    assert found.device.type == "cuda"
    return sorted(found.edges()[0].tolist())


def test_graphs_that_share_memory_are_sampled_in_place_and_unpinned_together():
    graph = dgl.heterograph(
        {
            ("user", "follows", "user"): (torch.tensor([0, 1, 2, 1]), torch.tensor([2, 2, 0, 1])),
            ("user", "plays", "game"): (torch.tensor([2, 0]), torch.tensor([0, 1])),
        }
    )
    follows = graph["follows"]
    seeds = torch.tensor([2], device="cuda")
    with pytest.raises(dgl.DGLError, match="device cpu"):
        dgl.sampling.sample_neighbors(follows, seeds, -1)
    graph.pin_memory_()
    # None has the format yet by which edges are sampled.
    for shared in (
        follows,
        graph["follows"],
        follows.clone(),
        graph.edge_type_subgraph(["follows"]),
    ):
        assert shared.is_pinned() and sampled(shared) == [0, 1]
    assert sampled(dgl.reverse(follows)) == [0]
    del graph
    gc.collect()
    assert follows.is_pinned() and sampled(follows) == [0, 1]
    follows.unpin_memory_()
    assert not follows.is_pinned()


def test_graphs_of_tensors_in_pinned_memory_are_sampled_in_place():
    with tensor_backed_graphs():  # as all on the CPU are without DGL's binary
        graph = dgl.rand_graph(200, 3000)
        graph.ndata["x"] = torch.arange(200.0)[:, None]
        other = graph["_E"]
        seeds = torch.arange(50, device="cuda")
        with pytest.raises(dgl.DGLError, match="device cpu"):
            dgl.sampling.sample_neighbors(other, seeds, -1)
        graph.pin_memory_()
        for each in (graph, other, pickle.loads(pickle.dumps(graph))):
            assert each.is_pinned()
            found = dgl.sampling.sample_neighbors(each, seeds, -1)
            wanted = graph.in_degrees(torch.arange(50))
            assert found.device.type == "cuda"
            assert found.in_degrees(seeds).tolist() == wanted.tolist()
            assert graph.has_edges_between(*(end.cpu() for end in found.edges())).all()
        copied = dgl.DGLGraph(graph._graph.pin_memory(), graph.ntypes, graph.etypes)
        assert copied.is_pinned()
        sampler = dgl.dataloading.NeighborSampler([5, 5], prefetch_node_feats=["x"])
        where = {"device": torch.device("cuda"), "use_uva": True, "batch_size": 16}
        loader = dgl.dataloading.DataLoader(graph, seeds, sampler, **where)
        for inputs, _, blocks in loader:
            assert inputs.device.type == "cuda" and blocks[0].device.type == "cuda"
            assert blocks[0].srcdata["x"][:, 0].tolist() == inputs.tolist()
            nodes = blocks[0].srcdata[dgl.NID].cpu()
            source, target = (end.cpu() for end in blocks[0].edges())
            assert graph.has_edges_between(nodes[source], nodes[target]).all()
        graph.unpin_memory_()
        assert not graph.is_pinned() and not other.is_pinned()


def test_pickled_graphs_and_copies_are_pinned():
    graph = dgl.graph((torch.tensor([0, 1, 2]), torch.tensor([2, 2, 0])))
    graph.create_formats_()
    graph.pin_memory_()
    forked = ForkingPickler.loads(ForkingPickler.dumps(graph))
    for twin in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph), forked):
        assert twin.is_pinned() and sampled(twin) == [0, 1]
        twin.unpin_memory_()
        assert graph.is_pinned() and not twin.is_pinned()
    graph.unpin_memory_()
    copied = dgl.DGLGraph(graph._graph.pin_memory(), graph.ntypes, graph.etypes)
    assert copied.is_pinned() and not graph.is_pinned()
    assert copied.formats() == graph.formats() and sampled(copied) == [0, 1]


def test_a_cache_on_the_gpu_reads_what_is_pinned():
    torch.manual_seed(0)
    tensor = torch.randn(2000, 8)
    held = pin_memory_inplace(tensor)
    cache = GPUCache(500, 8)
    for _ in range(20):
        keys = (torch.rand(400, device="cuda") ** 3 * 2000).long()
        values, missing_index, missing_keys = cache.query(keys)
        rows = gather_pinned_tensor_rows(tensor, missing_keys)
        cache.replace(missing_keys, rows)
        values[missing_index] = rows
        assert torch.equal(values.cpu(), tensor[keys.cpu()])
    assert 0.1 < cache.miss_rate < 0.8
    with pytest.raises(InvalidInputError, match="cpu"):
        cache.query(torch.arange(3))
    del held


def test_a_cache_waits_for_the_gpu_no_more_than_it_has_to():
    """The sizes of what is missing are asked for; a replacement asks for nothing."""
    cache = GPUCache(500, 8)
    keys, rows = torch.arange(100, device="cuda"), torch.randn(100, 8, device="cuda")
    cache.replace(keys, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.replace(keys + 50, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")

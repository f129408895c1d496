"""A store and its loaders in several threads of a process."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import dgl.dataloading.dataloader
import pytest
import torch
from dgl.dataloading import DataLoader, NeighborSampler

import dgl_mgpu
from dgl_mgpu.ops import SampleKey
from dgl_mgpu.ops.blocks import sample_blocks_async
from dgl_mgpu.sampling import loader_batches
from tests.store.test_graph import power_law_graph

pytestmark = pytest.mark.usefixtures("in_shared_memory")


def test_what_is_being_sampled_keeps_its_memory_when_the_store_is_closed():
    key, seeds = SampleKey(0, 0, 0, 0), torch.arange(50)
    store = dgl_mgpu.GlobalStore.from_dgl(power_law_graph())
    expected = sample_blocks_async(store.graph.view(), seeds, [3, 3], key).result()
    future = sample_blocks_async(store.graph.view(), seeds, [3, 3], key)
    memory = weakref.ref(store.graph.view().owner[0][0])
    store.close()
    gc.collect()
    assert memory() is not None
    for one, other in zip(future.result(), expected, strict=True):
        assert torch.equal(one.eids, other.eids)
    del future
    gc.collect()
    assert memory() is None


def loader_of(workers: int) -> DataLoader:
    graph = dgl_mgpu.GlobalStore.from_dgl(power_law_graph()).graph
    sampler = NeighborSampler([3], prefetch_node_feats=["feat"])
    return DataLoader(graph, torch.arange(200), sampler, batch_size=25, num_workers=workers)


def nodes_of(passed: Iterator) -> list[int]:
    return [node for _, outputs, _ in passed for node in outputs.tolist()]


@pytest.mark.parametrize("workers", [0, 1])
def test_threads_that_share_a_pass_get_each_batch_once(monkeypatch, workers):
    @contextlib.contextmanager
    def slow(name: str) -> Iterator[None]:
        if name == "gather":
            time.sleep(0.02)  # another thread has its turn within this one's
        yield

    monkeypatch.setattr(loader_batches, "stage", slow)
    shared = iter(loader_of(workers))
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(nodes_of, shared) for _ in range(2)]
    assert sorted(node for each in found for node in each.result()) == list(range(200))


def test_threads_may_begin_passes_at_the_same_time(monkeypatch):
    # Which DGL calls while a pass begins.
    monkeypatch.setattr(dgl.dataloading.dataloader, "dgl_warning", lambda text: time.sleep(0.02))
    loader = loader_of(0)
    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(lambda: nodes_of(iter(loader))) for _ in range(3)]
    assert [each.result() for each in found] == [list(range(200))] * 3

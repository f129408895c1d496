"""Storages of a store on GPUs, by stand-ins for tensors there."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dgl_mgpu.data import Dataset
from dgl_mgpu.dgl.patches.storages.pytorch_tensor import _fetch_cuda
from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.ops import device
from dgl_mgpu.ops.view import RowView
from dgl_mgpu.store import feature_storage as storage
from dgl_mgpu.store.content import read_dataset
from dgl_mgpu.store.graph_structure import topology_table
from dgl_mgpu.store.hotness import presample_hotness
from dgl_mgpu.store.memory import TopologySource
from dgl_mgpu.store.memory.format import RowFormat

ETYPE = ("_N", "_E", "_N")
GPU = torch.device("cuda", 0)


class Gpu:
    """A driver whose current stream a test sets."""

    stream = 0

    def current_stream(self, where: torch.device) -> int:
        return self.stream

    def synchronize(self, where: torch.device) -> None:
        pass


class Counts:
    """Counts on a GPU, which belong to the stream they were made on."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._stream, self.values = gpu, gpu.stream, [0, 0]

    def add(self, *more: int) -> None:
        assert self._stream == self._gpu.stream, "nothing orders these"
        self.values = [a + b for a, b in zip(self.values, more, strict=True)]

    def tolist(self) -> list[int]:
        assert self._gpu.waited, "its stream was not waited for"
        return self.values


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    gpu = Gpu()
    gpu.waited = False
    monkeypatch.setattr(device, "driver", gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where: setattr(gpu, "waited", True))
    return gpu


@pytest.fixture
def table() -> SimpleNamespace:
    """Two segments of rows on a GPU."""
    one = torch.zeros(1, dtype=torch.int64)
    return _Table(
        device=GPU,
        view=RowView(one.view(1, 1), one.expand(2), 10, (2,), torch.float32),
        row_bytes=8,
        format=RowFormat(10, (2,), torch.float32, torch.float32),
        memories=["device", "host"],
    )


class _Table(SimpleNamespace):
    __hash__ = object.__hash__


def test_counts_of_different_streams_are_not_added_on_a_gpu(gpu, table, monkeypatch):
    def count_tiers(view, ids, counts):
        counts = counts or Counts(gpu)
        counts.add(1, ids)
        return counts

    monkeypatch.setattr(storage, "count_tiers", count_tiers)
    traffic = storage.Traffic()
    for stream, count in ((1, 10), (2, 20), (1, 30), (2, 40), (3, 50)):
        gpu.stream = stream
        traffic.add("feat", table, count, begin=0.0)
    taken = traffic.take()
    assert taken.rows == {("feat", "device"): 5, ("feat", "host"): 150}
    assert taken.nbytes["feat", "host"] == 8 * 150


def test_what_is_not_to_be_counted_is_watched_alone(table):
    traffic, seen = storage.Traffic(), []
    traffic.is_counting = False
    for copy in (traffic, pickle.loads(pickle.dumps(traffic))):
        copy.watchers.append(lambda table, ids: seen.append(ids))
        copy.add("feat", table, torch.arange(3), begin=0.0)
        assert not copy.take().rows and not copy.seconds
    assert len(seen) == 2


class Rows:
    """What is on a GPU, or comes from there."""

    def __init__(self, where: torch.device) -> None:
        self.device = where

    def to(self, where, non_blocking=False) -> Rows:
        return Rows(torch.device(where))


def test_a_bad_id_is_told_with_rows_that_come_to_the_host(gpu, table, monkeypatch):
    record = torch.zeros(3, dtype=torch.int64)
    monkeypatch.setitem(device._faults, GPU, device._Faults(record))

    def gather_rows(view, ids, out=None, dtype=None) -> Rows:
        record.copy_(torch.tensor([1, 12, 10]))
        return Rows(GPU)

    monkeypatch.setattr(storage, "gather_rows", gather_rows)
    monkeypatch.setattr(storage, "count_tiers", lambda view, ids, counts: Counts(gpu))
    rows = storage.TableStorage("feat", table, storage.Traffic())
    with pytest.raises(IdOutOfRangeError, match="id 12 is not among the 10 rows"):
        rows.fetch(Rows(torch.device("cpu")), "cpu")
    # What stays on the GPU is not waited for.
    assert rows.fetch(Rows(GPU), GPU).device == GPU


class _Edges:
    """Source nodes of more edges than an int32 counts, all of them the only node."""

    dtype = np.dtype(np.int32)

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def min(self) -> int:
        return 0

    max = min


class _Unchecked(Dataset):
    def __post_init__(self) -> None:
        """Its edges are no array."""


@pytest.mark.parametrize(("edges", "expected"), [(2**31, torch.int32), (2**31 + 1, torch.int64)])
def test_ids_are_long_where_edges_are_many(edges, expected):
    some = np.zeros(1, np.int64)
    data = read_dataset(
        _Unchecked(
            name="many edges",
            num_nodes=1,
            num_classes=1,
            indptr=np.array([0, edges]),
            indices=_Edges(edges),
            labels=some,
            train=some,
            valid=some,
            test=some,
        )
    )
    assert data.sources[topology_table(ETYPE)].idtype == expected


def test_long_ids_of_a_graph_given_in_short_ones_are_counted_right():
    """Hotness is sampled from the data as it lies."""
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 50, 400).astype(np.int32)
    indptr = np.arange(0, 401, 8)
    short, long = (
        presample_hotness(
            {"_N": 50},
            [ETYPE],
            {topology_table(ETYPE): TopologySource(indptr, kept, None, 50, torch.int64)},
            seeds=torch.arange(50),
            fanouts=(3, 2),
            batch_size=10,
            seed=0,
        )["_N"]
        for kept in (indices, indices.astype(np.int64))
    )
    assert long.any() and np.array_equal(short, long)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_rows_of_a_tensor_beside_them(id_dtype):
    """What DGL's storage of a tensor on a GPU fetches; here both are on the CPU."""
    ids = torch.tensor([4, 0, 4, 2], dtype=id_dtype)
    for rows in (torch.rand(5, 3), torch.rand(3, 5).t(), torch.rand(5), torch.rand(5, 2, 2).half()):
        assert torch.equal(_fetch_cuda(ids, rows, "cpu"), rows[ids.long()])
    assert _fetch_cuda(ids, torch.rand(5, 3), "meta").device.type == "meta"
    with pytest.raises(IdOutOfRangeError, match=r"pick rows: id 5 at place 1 .* 5 rows"):
        _fetch_cuda(torch.tensor([0, 5], dtype=id_dtype), torch.rand(5, 3), "cpu")


def test_rows_that_are_learned_have_gradients():
    rows = torch.rand(5, 3, requires_grad=True)
    ids = torch.tensor([4, 0, 4])
    _fetch_cuda(ids, rows, "cpu").sum().backward()
    assert torch.equal(rows.grad, torch.tensor([1.0, 0, 0, 0, 2])[:, None].expand(5, 3))
    with torch.no_grad():
        assert torch.equal(_fetch_cuda(ids, rows, "cpu"), rows[ids])

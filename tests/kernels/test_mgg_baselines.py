"""What the benchmarks compare remote reads with, the ranks' parts of a graph in one process."""

from __future__ import annotations

import contextlib

import pytest
import torch

from benchmarks.fullgraph import Shape, random_rows
from benchmarks.mgg_baselines import RemoteEntries, SeparateReads
from dgl_mgpu.distributed.exchange.collectives import Chunks
from dgl_mgpu.distributed.exchange.remote_reads import RemoteReads
from dgl_mgpu.distributed.local_part import cut
from dgl_mgpu.distributed.partition import Ownership
from dgl_mgpu.ops.spmm_remote import _spmm_remote_cuda
from tests.kernels.test_spmm_remote import Together

SHAPE = Shape(nodes=200, edges=6000, features=16, classes=2)


@pytest.fixture
def ranks(where, monkeypatch):
    """Each rank's remote reads, its rows, and the sums that they are to have."""
    if where.type == "cpu":
        monkeypatch.setattr(torch.ops.dgl_mgpu.spmm_remote, "default", _spmm_remote_cuda)
    indptr, indices = SHAPE.csc(where)
    dst = torch.repeat_interleave(torch.arange(200, dtype=torch.int32, device=where), indptr.diff())
    owned = Ownership(None, (0, 80, 200))
    whole = random_rows(torch.arange(200, device=where), 16)
    expected = torch.zeros_like(whole).index_add_(0, dst, whole[indices.long()])
    every = [whole[:80].clone(), whole[80:].clone()]
    parts = [cut(indices, dst, owned, owned, rank) for rank in range(2)]
    reads = [RemoteReads(Chunks(part, None, 1), Together(every)) for part in parts]
    return list(zip(reads, every, expected.split([80, 120]), strict=True))


def test_local_and_remote_sums_are_added_up(ranks):
    for reads, rows, expected in ranks:
        assert torch.allclose(SeparateReads(reads).sums(rows), expected)


class Stream:
    """Tells which streams it waited for."""

    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


def test_streams_side_by_side_wait_for_each_other(ranks, where, monkeypatch):
    if where.type == "cuda":
        aside = torch.cuda.Stream(where)
    else:
        aside, current = Stream(), Stream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    for reads, rows, expected in ranks:
        assert torch.allclose(SeparateReads(reads, aside).sums(rows), expected)
    if where.type == "cpu":
        assert aside.waited == [current] * 2 and current.waited == [aside] * 2


@pytest.mark.parametrize("partitioned", [False, True])
def test_all_entries_are_read_as_remote_ones(ranks, partitioned):
    for reads, rows, expected in ranks:
        sums = RemoteEntries(reads, partitioned)
        assert torch.allclose(sums.sums(rows), expected)
        degrees = reads.part.relation.csc().indptr.diff()
        assert degrees.max() > 4 * 32  # more than a warp takes at a time
        pairs = -(-degrees // 16) if partitioned else torch.ones_like(degrees)
        assert sums._pairs.total == pairs.sum()

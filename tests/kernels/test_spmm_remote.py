"""The CUDA kernels of sums of rows that lie in several memories, against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.distributed.exchange.collectives import Chunks
from dgl_mgpu.distributed.exchange.remote_reads import RemoteReads
from dgl_mgpu.distributed.local_part import cut
from dgl_mgpu.distributed.partition import ranges, shuffled
from dgl_mgpu.ops.spmm_remote import DTYPES, Pipeline, Sources, _spmm_remote_cuda, spmm_remote
from tests.distributed.graphs import edges
from tests.ops.test_spmm_remote import GRAPHS, case


@pytest.fixture
def kernels(where, monkeypatch):
    """A device on which the operator runs its kernels."""
    if where.type == "cpu":
        monkeypatch.setattr(torch.ops.dgl_mgpu.spmm_remote, "default", _spmm_remote_cuda)
    return where


@pytest.fixture
def check(kernels):
    """That the operator on a device gives what it is to."""
    where = kernels

    def call(given, **pipeline):
        # On a GPU all ranks' rows are in its memory, at addresses like those that they have here.
        parts = given.parts
        if where.type == "cuda":
            parts = [moved(part, given.sources.alignment, where) for part in given.parts]
        own = next(
            part
            for part, before in zip(parts, given.parts, strict=True)
            if before is given.sources.rows
        )
        bases = torch.tensor([part.data_ptr() for part in parts]).to(where)
        sources = Sources(own, bases, given.sources.starts.to(where), given.sources.alignment)
        entries = [
            type(each)(*(None if tensor is None else tensor.to(where) for tensor in each))
            for each in given[:2]
        ]
        found, again = (
            spmm_remote(*entries, sources, pipeline=Pipeline(**pipeline)) for _ in range(2)
        )
        assert torch.equal(found, again)  # no two runs differ
        given.assert_sums(found.cpu())

    return call


def moved(rows, alignment, where):
    """A copy of rows on a device, which begins no better aligned than said."""
    skipped = alignment // rows.element_size() if alignment < 64 else 0
    room = torch.empty(skipped + rows.numel(), dtype=rows.dtype, device=where)
    return room[skipped:].view(rows.shape).copy_(rows)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_graphs(check, name, id_dtype):
    check(case(name, 20, id_dtype=id_dtype))


@pytest.mark.parametrize(
    ("ps", "dist", "wpb", "num_weights"),
    [
        (1, 1, 1, 0),
        (1, 16, 3, 0),
        (3, 2, 2, 0),
        (3, 2, 2, 1),
        (7, 5, 2, 1),
        (32, 16, 2, 0),
        (32, 1, 16, 1),
    ],
)
def test_pipelines(check, ps, dist, wpb, num_weights):
    for name in ("hubs", "hub at the end", "many rows"):
        check(case(name, 20, num_weights=num_weights), ps=ps, dist=dist, wpb=wpb)


@pytest.mark.parametrize("width", [1, 3, 4, 9, 16, 28, 100, 130, 602])
def test_widths(check, width):
    check(case("many rows", width))


@pytest.mark.parametrize("width", [602, 128, 9])
def test_wide_rows_of_hubs(check, width):
    check(case("hubs", width), ps=8, dist=4)


@pytest.mark.parametrize(
    ("dtype", "width", "num_weights"),
    [*((dtype, 24, 3) for dtype in DTYPES), (torch.bfloat16, 9, 0)],
)
def test_dtypes(check, dtype, width, num_weights):
    check(case("hubs", width, dtype, num_weights=num_weights))


@pytest.mark.parametrize("num_weights", [1, 2, 6, 24])
def test_weights(check, num_weights):
    for name in ("many rows", "no entries", "one remote entry"):
        check(case(name, 24, num_weights=num_weights))


def test_rows_of_no_width(check):
    check(case("many rows", 0))


@pytest.mark.parametrize(("offset", "width"), [(1, 16), (2, 64)])
def test_rows_of_any_alignment(check, offset, width):
    check(case("many rows", width, offset=offset))


def test_numbers_of_rows_beyond_32_bits(check):
    check(case("many rows", 4, first=1 << 40))


def test_random_graphs(check, monkeypatch):
    random = np.random.default_rng(7)
    for _ in range(12):
        rows = random.integers(1, 60)
        local, remote = (
            np.minimum(random.pareto(0.7, rows), 400).astype(int).tolist() for _ in range(2)
        )
        monkeypatch.setitem(GRAPHS, "random", (local, remote))
        check(case("random", 16), ps=int(random.integers(1, 33)), dist=int(random.integers(1, 17)))


def test_exchange_of_a_graph(kernels):
    """The ranks' parts of a graph in one process, a rank after the other."""
    num_nodes, _, src, dst = edges("skewed")
    owned = ranges(shuffled(num_nodes, 3), torch.bincount(dst, minlength=num_nodes), 4)
    x = torch.randint(-8, 9, (num_nodes, 20)).float()
    weights = torch.randint(-3, 4, (len(src), 1)).float()
    every = [x[owned.nodes(rank)].to(kernels) for rank in range(owned.num_ranks)]
    for rank, rows in enumerate(every):
        part = cut(src.to(kernels), dst.to(kernels), owned, owned, rank)
        remote = RemoteReads(Chunks(part, None, 1), Together(every), Pipeline(ps=3, dist=2))
        for given in (None, weights):
            messages = x[src] if given is None else x[src] * given
            expected = torch.zeros_like(x).index_add(0, dst, messages)[owned.nodes(rank)]
            mine = None if given is None else given[part.edges.cpu()].to(kernels)
            assert torch.equal(remote.sums(rows, mine).cpu(), expected)


class Together:
    """Windows of one process that has all ranks' rows."""

    def __init__(self, every):
        self.every = [rows.view(torch.uint8).view(-1) for rows in every]

    def turn(self, nbytes):
        assert nbytes == max(map(len, self.every))
        return self.every

    def wait_for_all(self):
        """All rows are there."""

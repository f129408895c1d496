"""The CUDA kernels of sums of rows that lie in several memories, against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.ops.spmm_remote import Pipeline, Sources, cuda, spmm_remote
from dgl_mgpu.ops.spmm_remote.op import DTYPES
from tests.ops.test_spmm_remote import GRAPHS, case


@pytest.fixture
def check(where, monkeypatch):
    """That the operator on a device gives what it is to."""
    if where.type == "cpu":
        monkeypatch.setattr(torch.ops.dgl_mgpu.spmm_remote, "default", cuda._spmm_remote)

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
    "pipeline",
    [
        {"ps": 1, "dist": 1, "wpb": 1},
        {"ps": 1, "dist": 16, "wpb": 3},
        {"ps": 3, "dist": 2, "wpb": 2},
        {"ps": 7, "dist": 5, "wpb": 2},
        {"ps": 32, "dist": 16, "wpb": 16},
        {"ps": 32, "dist": 1, "wpb": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_weights", [0, 1])
def test_pipelines(check, pipeline, num_weights):
    for name in ("hubs", "hub at the end", "many rows"):
        check(case(name, 20, num_weights=num_weights), **pipeline)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 16, 28, 100, 130, 602])
def test_widths(check, width):
    check(case("many rows", width, torch.float32, torch.int32))


@pytest.mark.parametrize("width", [602, 128, 9])
def test_wide_rows_of_hubs(check, width):
    check(case("hubs", width), ps=8, dist=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 9])
def test_dtypes(check, dtype, width):
    check(case("hubs", width, dtype))
    check(case("hubs", width, dtype, num_weights=3))


@pytest.mark.parametrize("num_weights", [1, 2, 6, 24])
def test_weights(check, num_weights):
    for name in ("many rows", "no entries", "one remote entry"):
        check(case(name, 24, num_weights=num_weights))


def test_rows_of_no_width(check):
    check(case("many rows", 0))


@pytest.mark.parametrize("offset", [1, 2])
def test_rows_of_any_alignment(check, offset):
    check(case("many rows", 16, offset=offset))


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

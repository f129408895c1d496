"""Row gather as CUDA kernels, against plain indexing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.ops import count_tiers, device
from dgl_mgpu.ops.gather import cuda
from tests.kernels.cuda_views import on_device
from tests.ops.test_gather import some_ids, table
from tests.ops.views import LAYOUTS, row_view


def gather(view, ids, host_start=-1, sms=0):
    out = torch.full((len(ids), *view.row_shape), 77, device=ids.device).to(view.dtype)
    cuda._gather_rows(
        out, ids, view.tiers, view.pointers, view.position, view.num_rows, host_start, sms
    )
    device.raise_faults(ids.device, wait=True)
    return out.cpu()


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_layouts(where, layout, shuffled, id_dtype):
    rows = table(103, 7)
    view = row_view(rows, LAYOUTS[layout], np.random.default_rng(0) if shuffled else None)
    view = on_device(view, where, host_segments=True)
    for count in (0, 1, 31, 33, 1000):
        ids = some_ids(count, len(rows), id_dtype)
        assert torch.equal(gather(view, ids.to(where)), rows[ids.long()])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (3,), (5, 2), (0,), (20000,), (33,), (100,)])
def test_dtypes_and_shapes(where, dtype, shape):
    rows = table(20, *shape, dtype=torch.bool if dtype == torch.bool else torch.int64).to(dtype)
    ids = some_ids(50, 20)
    gathered = gather(on_device(row_view(rows, LAYOUTS["three tiers"]), where), ids.to(where))
    assert gathered.dtype == dtype
    assert torch.equal(gathered.view(torch.uint8), rows[ids].view(torch.uint8))


def test_out_of_any_alignment(where):
    rows, ids = table(50, 8, dtype=torch.uint8), some_ids(40, 50)
    view = on_device(row_view(rows), where)
    for offset in (1, 2, 4, 8):
        buffer = torch.zeros(8 * 40 + 16, dtype=torch.uint8, device=where)
        out = buffer[offset : offset + 320].view(40, 8)
        cuda._gather_rows(
            out, ids.to(where), view.tiers, view.pointers, view.position, view.num_rows
        )
        assert torch.equal(out.cpu(), rows[ids])
        assert buffer[:offset].sum() == 0 and buffer[offset + 320 :].sum() == 0


@pytest.mark.parametrize("sms", [0, 1])
@pytest.mark.parametrize("host_start", [0, 16, 102])
def test_host_rows_in_order(where, monkeypatch, host_start, sms):
    monkeypatch.setattr(cuda, "_SORTED_ROWS", 1)
    rows = table(103, 5)
    view = row_view(rows, LAYOUTS["three tiers"], np.random.default_rng(0))
    view = on_device(view, where, host_segments=True)
    for ids in (some_ids(500, 103), some_ids(1, 103), torch.arange(103).flip(0)):
        gathered = gather(view, ids.to(where), host_start, sms)
        assert torch.equal(gathered, rows[ids])


@pytest.mark.parametrize("host_start", [-1, 0])
@pytest.mark.parametrize("bad", [-5, 103])
def test_an_id_that_is_no_row_is_told_later(where, monkeypatch, bad, host_start):
    monkeypatch.setattr(cuda, "_SORTED_ROWS", 1)
    rows = table(103, 5)
    view = on_device(row_view(rows), where)
    ids = torch.tensor([3, bad, 4], device=where)
    with pytest.raises(IdOutOfRangeError, match=f"id {bad}, but there are 103 rows"):
        gather(view, ids, host_start)
    assert torch.equal(gather(view, torch.tensor([3], device=where)), rows[3:4])


def test_count_tiers(where):
    rows = table(103, 2)
    for layout in LAYOUTS.values():
        view = row_view(rows, layout, np.random.default_rng(0))
        ids = some_ids(2000, 103)
        there = on_device(view, where)
        counts = cuda._count_tiers(
            ids.to(where), there.tiers, there.pointers, there.position, there.num_rows
        )
        assert torch.equal(counts.cpu(), count_tiers(view, ids))

"""Row gather as CUDA kernels, against plain indexing."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gather_gpu import without_shift
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import count_tiers, device, gather_rows, host_reads, pick_rows
from dgl_mgpu.ops import gather as cuda
from dgl_mgpu.ops.gather import CASTS_FROM, CASTS_TO
from dgl_mgpu.ops.host_reads import HostReads
from dgl_mgpu.ops.view import LISTED_ROWS
from tests.kernels.cuda_views import on_device
from tests.ops.test_gather import assert_same_values, every_value, some_ids, table
from tests.ops.views import LAYOUTS, row_view


def gather(
    view, ids, host_start=-1, sms=0, dtype=None, staging=(None,) * 3, host_share=1.0, counts=()
):
    out = torch.full((len(ids), *view.row_shape), 77, device=ids.device).to(dtype or view.dtype)
    cuda._gather_rows_cuda(
        out, ids, view.tiers, view.pointers, view.position, view.num_rows, host_start, sms, 4,
        host_share, view.dtype if dtype else None, *staging, *counts,
    )  # fmt: skip
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
        cuda._gather_rows_cuda(
            out, ids.to(where), view.tiers, view.pointers, view.position, view.num_rows
        )
        assert torch.equal(out.cpu(), rows[ids])
        assert buffer[:offset].sum() == 0 and buffer[offset + 320 :].sum() == 0


PAIRS = [(stored, to) for stored in CASTS_FROM for to in CASTS_TO if stored != to]


def test_every_conversion(emulated):
    values = [every_value(stored) for stored, _ in PAIRS]
    results = [
        torch.full(rows.shape, 77, dtype=to) for rows, (_, to) in zip(values, PAIRS, strict=True)
    ]
    calls = "\n".join(
        f"all(reinterpret_cast<const {cuda._ELEMENTS[stored]}*>(from[{place}]),"
        f" reinterpret_cast<{cuda._ELEMENTS[to]}*>(to[{place}]), counts[{place}]);"
        for place, (stored, to) in enumerate(PAIRS)
    )
    text = f"""{device.source_text("convert.cuh")}
namespace dgl_mgpu {{
template <typename Stored, typename Wanted>
__device__ void all(const Stored* from, Wanted* to, int64 count) {{
  for (int64 i = threadIdx.x; i < count; i += blockDim.x) convert(from[i], to + i);
}}
__global__ void convert_all(const int64* from, const int64* to, const int64* counts) {{
{calls}
}}
}}
"""
    addresses = [torch.tensor([x.data_ptr() for x in each]) for each in (values, results)]
    counts = torch.tensor([len(each) for each in values])
    emulated.run(text, "dgl_mgpu::convert_all", 1, 64, *addresses, counts)
    for (_, to), stored, found in zip(PAIRS, values, results, strict=True):
        assert_same_values(found, stored.to(to))


@pytest.mark.parametrize(
    ("stored", "wanted", "shape"),
    [
        (torch.float32, torch.float16, (100,)),
        (torch.float16, torch.float32, (40, 2)),
        (torch.float8_e4m3fn, torch.bfloat16, (3,)),
        (torch.int64, torch.float64, ()),
        (torch.bool, torch.float32, (16,)),
    ],
)
def test_casts(where, monkeypatch, stored, wanted, shape):
    values = every_value(stored)
    values = values[torch.arange(103 * max(1, math.prod(shape))) * 7 % len(values)]
    rows = values.view(103, *shape)
    view = row_view(rows, LAYOUTS["three tiers"], np.random.default_rng(0))
    view = on_device(view, where, host_segments=True)
    for ids, least in ((some_ids(300, 103), 1 << 12), (torch.arange(103).flip(0), 1)):
        monkeypatch.setattr(cuda, "LISTED_ROWS", least)
        gathered = gather(view, ids.to(where), 16, dtype=wanted)
        assert_same_values(gathered, rows[ids].to(wanted))


def test_a_cast_of_any_alignment(where):
    rows, ids = torch.randn(50, 8, dtype=torch.float64), some_ids(40, 50).to(where)
    view = on_device(row_view(rows), where)
    for offset in (1, 2, 4, 8):
        buffer = torch.zeros(8 * 40 + 16, dtype=torch.float16, device=where)
        out = buffer[offset : offset + 320].view(40, 8)
        cuda._gather_rows_cuda(
            out, ids, view.tiers, view.pointers, view.position, 50, stored=torch.float64
        )
        assert torch.equal(out.cpu(), rows[ids.cpu()].half())
        assert buffer[:offset].sum() == 0 and buffer[offset + 320 :].sum() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stored", CASTS_FROM)
def test_every_cast_on_a_gpu(stored):
    rows = every_value(stored)
    rows = rows[: len(rows) // 2 * 2].view(-1, 2)
    view, ids = on_device(row_view(rows), "cuda"), torch.arange(len(rows), device="cuda")
    for wanted in CASTS_TO:
        assert_same_values(gather_rows(view, ids, dtype=wanted).cpu(), rows.to(wanted))


@pytest.mark.parametrize("sms", [0, 1])
@pytest.mark.parametrize("host_start", [0, 16, 102])
def test_host_rows_in_order(where, monkeypatch, host_start, sms):
    monkeypatch.setattr(cuda, "LISTED_ROWS", 1)
    rows = table(103, 5)
    view = row_view(rows, LAYOUTS["three tiers"], np.random.default_rng(0))
    view = on_device(view, where, host_segments=True)
    for ids in (some_ids(500, 103), some_ids(1, 103), torch.arange(103).flip(0)):
        gathered = gather(view, ids.to(where), host_start, sms)
        assert torch.equal(gathered, rows[ids])


def test_rows_that_are_not_shifted_are_the_same(where, monkeypatch):
    """Which a benchmark compares with those that are."""
    monkeypatch.setattr(cuda, "LISTED_ROWS", 0)
    rows, ids = table(60, 257), some_ids(500, 60)  # lines begin within rows
    view = on_device(row_view(rows), where, host_segments=True)
    with without_shift():
        assert cuda.row_slots(4 * 257, 4) == 257
        for host_start in (-1, 0):
            assert torch.equal(gather(view, ids.to(where), host_start), rows[ids])
    assert cuda.row_slots(4 * 257, 4) > 257


def test_many_host_rows(where, monkeypatch):
    monkeypatch.setattr(cuda, "LISTED_ROWS", 1 << 12)
    rows = table(20001, 1)  # more than there are buckets
    view = row_view(rows, [(100, 1), (0, 1)], np.random.default_rng(0))
    view = on_device(view, where, host_segments=True)
    ids = some_ids(cuda.LISTED_ROWS, len(rows))
    for buckets in (1 << 8, 1 << 13):
        monkeypatch.setattr(device, "MAX_BUCKETS", buckets)
        assert torch.equal(gather(view, ids.to(where), 100), rows[ids])


@pytest.mark.parametrize(("host_share", "listed"), [(0.099, False), (0.1, True)])
def test_host_rows_are_put_in_order_where_many_are_expected(where, monkeypatch, host_share, listed):
    monkeypatch.setattr(cuda, "LISTED_ROWS", 50)
    monkeypatch.setattr(device, "MAX_BUCKETS", 1 << 4)
    lists = []

    def noted(*asked, make=cuda._host_rows):
        lists.append(make(*asked))
        return lists[-1]

    monkeypatch.setattr(cuda, "_host_rows", noted)
    rows = table(1003, 5)
    view = row_view(rows, [(100, 2), (0, 1)], np.random.default_rng(0))
    view = on_device(view, where, host_segments=True)
    ids = some_ids(500, 1003)
    assert torch.equal(gather(view, ids.to(where), 100, host_share=host_share), rows[ids])
    assert len(lists) == listed
    for start, shift, _, _, room, _ in lists:
        asked_for = view.position.cpu()[ids].long()
        found = room[: 2 * len(ids)].view(torch.int64)[: int((asked_for >= start).sum())].cpu()
        assert torch.equal(found.sort()[0], asked_for[asked_for >= start].sort()[0])
        assert (((found - start) >> shift).diff() >= 0).all() and len(found.unique()) > 200


@pytest.fixture
def own_words(monkeypatch) -> None:
    """Words that no gather of an earlier test, which may still run, adds to."""
    monkeypatch.setattr(host_reads, "_free", {})


@pytest.mark.usefixtures("own_words")
@pytest.mark.parametrize("host_share", [0.0, 1.0])
def test_rows_read_from_host_memory_are_counted(where, monkeypatch, host_share):
    monkeypatch.setattr(cuda, "LISTED_ROWS", 50)
    rows, reads = table(1003, 5), HostReads()
    view = row_view(rows, [(100, 2), (0, 1)], np.random.default_rng(0))
    view = on_device(view, where, host_segments=True)
    words = reads.counters(torch.device(where))
    by_position = view.position.cpu().argsort()
    assert reads.share(0.25) == 0.25
    for count, of_host in ((500, 0.1), (49, 1.0), (2000, 0.7), (50, 0.0)):
        before = reads.share(0.25)
        at = torch.randint(100, (count,))
        at[: int(of_host * count)] = torch.randint(100, 1003, (int(of_host * count),))
        ids = by_position[at[torch.randperm(count)]]
        for _ in range(20):
            found = gather(view, ids.to(where), 100, host_share=host_share, counts=words)
            assert torch.equal(found, rows[ids])
        # What the last gather's blocks had to tell may have been overtaken by what others had.
        expected = pytest.approx(of_host, abs=0.05) if count >= 50 else before
        assert reads.share(0.25) == expected


@pytest.mark.usefixtures("own_words")
def test_what_blocks_have_not_told_yet_is_told_later(where):
    reads, other = HostReads(), HostReads()
    words = reads.counters(torch.device(where))
    for more, share in (
        ((1000 << 32) + 250, 0.25),
        (150, 0.25),  # the rest of the same gather
        ((1000 << 32) + 350, 0.5),
        (-100, 0.5),  # a block that had counted before others
        (100 + (2000 << 32) + 400, 0.25),
    ):
        words.host_counter.add_(more)
        assert reads.share(1.0) == share
    assert other.share(0.75) == 0.75
    del reads
    gc.collect()
    late = HostReads()
    assert late.counters(torch.device(where)) is words  # which what still runs may write
    assert late.share(0.75) == 0.75


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("slots", [1, 7, 87])
def test_rows_on_disk_come_from_the_cache_or_are_left_aside(where, slots, dtype):
    rows, ids = table(103, 12), some_ids(400, 103)
    whole = row_view(rows, LAYOUTS["three tiers"], np.random.default_rng(0))
    start, stop, _, last = whole.tiers[-1].tolist()
    view = on_device(whole, where, host_segments=True)
    view.pointers[last] = 0
    ordered = torch.empty_like(rows)
    ordered[whole.position.long()] = rows  # rows by position
    tags = torch.full((slots,), -1)
    kept = torch.arange(start, stop, 3)
    tags[kept % slots] = kept
    cache = ordered[tags].view(torch.uint8).to(where)
    aside = torch.full((len(ids),), 77, device=where)
    gathered = gather(view, ids.to(where), dtype=dtype, staging=(tags.to(where), cache, aside))
    position = whole.position[ids].long()
    lacking = (position >= start) & (tags[position % slots] != position)
    assert 0 < lacking.sum() < len(ids)
    assert torch.equal(aside.cpu(), torch.where(lacking, position, -1))
    expected = rows[ids].to(dtype or rows.dtype)
    assert torch.equal(gathered[~lacking], expected[~lacking])
    # The CPU's operator leaves aside the same.
    out, aside_there = torch.zeros_like(expected), torch.full((len(ids),), 77)
    pointers = whole.pointers.clone()
    pointers[last] = 0
    torch.ops.dgl_mgpu.gather_rows(
        out, ids, whole.tiers, pointers, whole.position, 103, -1, 0, 4, 1.0,
        rows.dtype if dtype else None, tags, cache.cpu(), aside_there,
    )  # fmt: skip
    assert torch.equal(aside_there, aside.cpu())
    assert torch.equal(out[~lacking], gathered[~lacking])


@pytest.mark.parametrize("host_start", [-1, 0])
@pytest.mark.parametrize("bad", [-5, 103])
def test_an_id_that_is_no_row_is_told_later(where, monkeypatch, bad, host_start):
    monkeypatch.setattr(cuda, "LISTED_ROWS", 1)
    rows = table(103, 5)
    view = on_device(row_view(rows), where)
    ids = torch.tensor([3, bad, 4], device=where)
    out = torch.full((3, 5), 77, dtype=rows.dtype, device=where)
    cuda._gather_rows_cuda(out, ids, view.tiers, view.pointers, view.position, 103, host_start)
    with pytest.raises(IdOutOfRangeError, match=f"id {bad} is not among the 103 rows"):
        device.raise_faults(ids.device, wait=True)
    assert torch.equal(out.cpu()[::2], rows[[3, 4]]) and not out[1].any()
    assert torch.equal(gather(view, torch.tensor([3], device=where)), rows[3:4])


def test_count_tiers(where):
    rows = table(103, 2)
    for layout in LAYOUTS.values():
        view = row_view(rows, layout, np.random.default_rng(0))
        ids = some_ids(2000, 103)
        there = on_device(view, where)
        counts = torch.ones(len(view.pointers), dtype=torch.int64, device=where)
        cuda._count_tiers_cuda(counts, ids.to(where), there.tiers, there.position, there.num_rows)
        assert torch.equal(counts.cpu(), 1 + count_tiers(view, ids))


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (16,), (33,), (5, 2), (0,), (20000,)])
def test_rows_of_a_tensor(where, monkeypatch, shape, id_dtype):
    if where.type == "cpu":
        monkeypatch.setattr(torch.ops.dgl_mgpu.pick_rows, "default", cuda._pick_rows_cuda)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        rows = table(103, *shape).to(dtype).to(where)
        for count in (0, 1, 31, 1000):
            ids = some_ids(count, len(rows), id_dtype).to(where)
            out = torch.full((count, *shape), 77, device=where).to(dtype)
            pick_rows(rows, ids, out)
            assert torch.equal(out, rows[ids.long()])


def test_rows_of_a_tensor_out_of_any_alignment(where, monkeypatch):
    if where.type == "cpu":
        monkeypatch.setattr(torch.ops.dgl_mgpu.pick_rows, "default", cuda._pick_rows_cuda)
    buffer = table(51 * 8, dtype=torch.uint8).to(where)
    ids = some_ids(40, 50).to(where)
    for offset in (0, 1, 2, 4):
        rows = buffer[offset : offset + 400].view(50, 8)
        room = torch.zeros(330, dtype=torch.uint8, device=where)
        out = room[offset : offset + 320].view(40, 8)
        pick_rows(rows, ids, out)
        assert torch.equal(out, rows[ids])
        assert not room[:offset].any() and not room[offset + 320 :].any()


def test_what_is_no_row_is_picked_as_zeros_and_told(where, monkeypatch):
    if where.type == "cpu":
        monkeypatch.setattr(torch.ops.dgl_mgpu.pick_rows, "default", cuda._pick_rows_cuda)
    rows = table(50, 7).to(where) + 1
    for bad in (-1, 50, 1 << 40):
        ids = torch.tensor([3, bad, 49], device=where)
        out = torch.full((3, 7), 77.0, device=where)
        pick_rows(rows, ids, out)
        with pytest.raises(IdOutOfRangeError, match=f"id {bad} is not among the 50 rows"):
            device.raise_faults(where, wait=True)
        assert torch.equal(out, rows[[3, 0, 49]] * torch.tensor([[1.0], [0], [1]], device=where))


@pytest.mark.parametrize("count", [1, 3, 9])
def test_rows_of_several_tables_are_picked_at_once(where, count, monkeypatch):
    if where.type == "cpu":
        monkeypatch.setattr(torch.ops.dgl_mgpu.pick_rows, "default", cuda._pick_rows_cuda)
        monkeypatch.setattr(cuda, "direct", lambda *arguments: cuda._pick_rows_cuda)
    picks, expected = [], []
    for number in range(count):
        dtype = (torch.float32, torch.int64, torch.uint8, torch.float16)[number % 4]
        rows = table(60, number * 5 + 1, dtype=dtype).to(where)
        ids = some_ids(0 if number == 2 else 40 * number + 1, 60).to(where)
        ids = ids.int() if number % 3 else ids.long()
        picks.append((torch.full_like(rows[:1], 77).repeat(len(ids), 1), rows, ids))
        expected.append(rows[ids.long()])
    rows, ids = table(60, 9).to(where), some_ids(40, 60).to(where)
    view = replace(on_device(row_view(table(60, 9)), where), address=rows.data_ptr())
    assert cuda.can_be_picked(ids, view)
    picks.insert(0, cuda.to_be_picked(ids, view))
    expected.insert(0, rows[ids])
    for dtype in (torch.int32, torch.int64):
        position = torch.randperm(60, device=where)
        elsewhere = replace(view, position=position.to(dtype))
        picks.append(cuda.to_be_picked(ids, elsewhere))
        expected.append(rows[position[ids]])
    cuda.pick_all(picks)
    for (out, _, _), rows in zip(picks, expected, strict=True):
        assert torch.equal(out, rows)


def test_which_views_are_picked(where):
    rows, ids = table(60, 9).to(where), some_ids(40, 60).to(where)
    view = on_device(row_view(table(60, 9)), where)
    assert not cuda.can_be_picked(ids, view)  # whose rows may be anywhere
    view = replace(view, address=rows.data_ptr())
    assert cuda.can_be_picked(ids, view)
    assert not cuda.can_be_picked(ids.short(), view)
    assert not cuda.can_be_picked(ids[None], view)
    many = ids.repeat(LISTED_ROWS)
    assert cuda.can_be_picked(many, view)
    assert not cuda.can_be_picked(many, replace(view, host_start=0))
    assert cuda.can_be_picked(ids, replace(view, host_start=0))
    out, _, _ = pick = cuda.to_be_picked(ids, view)
    cuda.pick_all([pick])  # on a CPU by gather_rows
    assert torch.equal(out, rows[ids])


def test_rows_are_picked_into_rows_like_them():
    rows, ids = table(5, 3), torch.tensor([1, 2])
    for out in (
        rows.new_empty(2, 4),
        rows.new_empty(2, 3).double(),
        rows.new_empty(3, 2).t(),
        rows.new_empty(2, 3, device="meta"),
    ):
        with pytest.raises(InvalidInputError, match="pick rows: out has shape"):
            pick_rows(rows, ids, out)
    for wrong in (ids.short(), ids.view(1, 2), [1, 2]):
        with pytest.raises(InvalidInputError, match="pick rows"):
            pick_rows(rows, wrong, rows.new_empty(2, 3))
    for bad in (-1, 5):
        with pytest.raises(IdOutOfRangeError, match=f"pick rows: id {bad} at place 1 .* 5 rows"):
            pick_rows(rows, torch.tensor([0, bad]), rows.new_empty(2, 3))

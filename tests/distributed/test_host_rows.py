"""Rows of the host's memory against the same rows as a tensor."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.distributed import host_features as host
from dgl_mgpu.distributed.graph import partition_graph
from dgl_mgpu.distributed.host_features import HostRows
from dgl_mgpu.errors import InvalidInputError
from tests.distributed.graphs import homogeneous
from tests.ranks import on_gpus_too

DEVICES = (
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
)
#: Of 11 columns: of which no multiple is 11, one that is, and more than there are.
SLAB_WIDTHS = (1, 4, 6, 11, 16)


def _rows(count: int = 7, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(count, 11, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slab_width", SLAB_WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_products_are_those_of_the_tensor(count, slab_width, device):
    rows, draw = _rows(count), torch.Generator().manual_seed(2)
    kept = HostRows(rows, device, slab_width)
    assert (kept.shape, kept.dtype, len(kept)) == (rows.shape, rows.dtype, count)
    weight, bias, gradient = (
        torch.randn(*shape, generator=draw, dtype=rows.dtype)
        for shape in ((11, 3), (3,), (count, 3))
    )
    for found, wanted in (
        (kept.whole(), rows),
        (kept.times(weight.to(device)), rows @ weight),
        (kept.times(weight.to(device), bias.to(device)), rows @ weight + bias),
        (kept.transposed_times(gradient.to(device)), rows.t() @ gradient),
    ):
        assert found.device.type == device
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_slabs_are_columns_in_order(device):
    rows = _rows()
    seen = []
    for columns, slab in HostRows(rows, device, 4).slabs():
        assert slab.is_contiguous()
        assert torch.equal(slab.cpu(), rows[:, columns])
        seen.append((columns.start, columns.stop))
        slab.zero_()  # it is the reader's
    assert seen == [(0, 4), (4, 8), (8, 11)]


@pytest.mark.parametrize("device", DEVICES)
def test_changes_are_made_whenever_rows_are_read_or_once(device):
    rows, calls = _rows(), []

    def change(slab: torch.Tensor, columns: slice) -> torch.Tensor:
        calls.append(columns.start)
        return slab.mul_(torch.arange(columns.start, columns.stop, device=slab.device))

    first = HostRows(rows, device, 4)
    changed = first.changed(change).changed(lambda slab, columns: slab + 1)
    wanted = rows * torch.arange(11) + 1
    for _ in range(2):
        assert torch.equal(changed.whole().cpu(), wanted)
    kept = changed.kept()
    assert calls == [0, 4, 8] * 3
    for _ in range(2):
        assert torch.equal(kept.whole().cpu(), wanted)
    assert calls == [0, 4, 8] * 3
    assert torch.equal(first.whole().cpu(), rows)
    in_place = first.changed(change).kept()
    assert torch.equal(in_place.whole().cpu(), rows * torch.arange(11))


def test_later_changes_of_the_tensor_do_not_show():
    rows = _rows()
    wanted = rows.clone()
    kept = [HostRows(rows, "cpu", width) for width in (4, 16)]
    rows.zero_()
    assert all(torch.equal(each.whole(), wanted) for each in kept)


def test_half_types_are_rounded_once():
    rows = _rows(50, torch.bfloat16)
    weight = torch.randn(11, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = HostRows(rows, "cpu", 1).times(weight)
    assert torch.equal(found, (rows.float() @ weight.float()).bfloat16())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_memory_is_not_given_up_while_a_gpu_reads():
    rows = torch.randn(1 << 20, 64)
    weight = torch.randn(64, 4, device="cuda")
    for _ in range(3):
        found = HostRows(rows, "cuda", 8).times(weight)
        other = torch.zeros(1 << 20, 64)  # where the rows were, perhaps
        torch.testing.assert_close(found.cpu(), rows @ weight.cpu(), rtol=1e-3, atol=1e-3)
        del other


def test_slabs_have_a_column():
    with pytest.raises(InvalidInputError, match="slab_width is 0"):
        HostRows(torch.ones(2, 3), "cpu", 0)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (torch.zeros(3), r"shape \(3,\)"),
        (torch.zeros(3, 0), r"shape \(3, 0\)"),
        (torch.zeros(3, 2, dtype=torch.int64), "int64"),
        (torch.zeros(3, 2, requires_grad=True), "require a gradient"),
        (torch.zeros(3, 2, device="meta"), "on 'meta'"),
    ],
)
def test_rows_that_are_refused(rows, found):
    with pytest.raises(InvalidInputError, match=found):
        HostRows(rows, "cpu", 8)


def _widths(by: torch.Tensor) -> list[int]:
    """Of slabs, where no two ranks have as many rows."""
    host._SLAB_BYTES, before = 4 * 24 * 12, host._SLAB_BYTES  # of the most rows 24 columns
    try:
        pg = partition_graph(homogeneous(), by=by)
        rows = HostRows.of_nodes(pg, torch.zeros(pg.num_nodes(), 55))
        return [columns.stop - columns.start for columns, _ in rows.slabs()]
    finally:
        host._SLAB_BYTES = before


@on_gpus_too
def test_slabs_are_as_wide_on_all_ranks(ranks):
    by = torch.tensor([0] * 12 + [1] * 7 + [ranks.size - 1] * 4)
    assert ranks.run(_widths, by) == [[24, 24, 7]] * ranks.size


def test_slabs_are_no_narrower_than_sums_like():
    g = homogeneous("random")
    rows = HostRows.of_nodes(g, torch.zeros(g.num_nodes(), 100))
    assert [columns.stop for columns, _ in rows.slabs()] == [100]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_SLAB_BYTES", 1)
        rows = HostRows.of_nodes(g, torch.zeros(g.num_nodes(), 100))
    assert [columns.stop for columns, _ in rows.slabs()] == [16, 32, 48, 64, 80, 96, 100]

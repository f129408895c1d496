"""The CUDA kernel that writes a mini-batch into static buffers, against the same in torch."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.capture.copy_list import CopyList


class OnGPU(CopyList):
    """Launches the kernel also where it is emulated."""

    def __init__(self, ids):
        super().__init__(ids)
        self._is_on_gpu = True


def written(kind, where, dtype, count):
    """Buffers of some sizes and alignments, each with something written to it."""
    generator = torch.Generator().manual_seed(count)
    copies = kind(torch.empty(0, dtype=dtype, device=where))
    buffers = []

    def buffer(rows, *shape, like=dtype):
        buffers.append(torch.full((rows, *shape), 77, device=where).to(like))
        return buffers[-1]

    for number in range(count):
        rows = int(torch.randint(0, 30, (), generator=generator))
        width = number % 5 + 1
        for like in (torch.float32, torch.float16, torch.int8):
            data = torch.randint(-9, 9, (rows, width), generator=generator).to(where, like)
            copies.copy(buffer(rows + 3, width, like=like), data)
            copies.copy(buffer(2 * rows + 3, width, like=like)[rows:], data)
        copies.fill(buffer(rows + 9), rows, 5)
        edges, spare = 7 * rows, number * 3
        indptr = buffer(rows + 8)
        copies.copy(indptr, torch.arange(rows + 1, dtype=dtype, device=where) * 7)
        copies.starts(indptr, rows + 1, edges, edges + spare)
    large = torch.randint(0, 99, (9000, 8), generator=generator).to(where)
    copies.copy(buffer(9100, 8, like=torch.int64), large)
    copies.copy(buffer(9000, 8, like=torch.int64), large.t().contiguous().t())
    copies.fill(buffer(40_000), 3, 1)
    copies.run()
    return [each.cpu() for each in buffers]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 4, 13])
def test_all_is_written_and_nothing_else(where, dtype, count):
    """Also in more launches than one, and a list that is used again."""
    expected = written(CopyList, "cpu", dtype, count)
    for one, other in zip(written(OnGPU, where, dtype, count), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("spare", [0, 3, 7, 8, 50, 1000])
def test_padding_rows_have_an_edge_each_as_far_as_there_are_enough(where, spare):
    rows, edges, padding = 10, 40, 7
    indptr = torch.zeros(rows + 1 + padding, dtype=torch.int64, device=where)
    copies = OnGPU(indptr)
    copies.copy(indptr, torch.arange(0, edges + 1, 4, device=where))
    copies.starts(indptr, rows + 1, edges, edges + spare)
    copies.run()
    degrees = indptr.cpu().diff()
    assert degrees[:rows].tolist() == [4] * rows
    assert int(degrees[rows:].sum()) == spare
    assert int((degrees[rows:] > 0).sum()) == min(spare, padding)

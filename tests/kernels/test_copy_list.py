"""The CUDA kernel that writes a mini-batch into static buffers, against the same in torch."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.capture.copy_list import CopyList

_ROWS = torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.int8, torch.int64


class OnGPU(CopyList):
    """Launches the kernel also where it is emulated."""

    def __init__(self, ids):
        super().__init__(ids)
        self._is_on_gpu = True


def written(kind, where, dtype, count):
    """Buffers of some sizes and alignments after each of two batches."""
    generator = torch.Generator().manual_seed(count)
    copies = kind(torch.empty(0, dtype=dtype, device=where))
    buffers, numbers = [], []

    def buffer(rows, *shape, like=dtype):
        buffers.append(torch.full((rows, *shape), 77, device=where).to(like))
        return buffers[-1]

    for each in range(count):
        numbers.append([copies.add_rows(buffer(40, each % 5 + 1, like=like)) for like in _ROWS])
        unaligned = buffer(61, each % 5 + 1, like=torch.float16)[21:]
        numbers[-1] += [
            copies.add_rows(unaligned),
            copies.add_ids(buffer(50), 5),
            copies.add_starts(buffer(38), 220),
        ]
    large = copies.add_rows(buffer(9100, 8, like=torch.int64))
    turned = copies.add_rows(buffer(9000, 8, like=torch.int64))
    filled = copies.add_ids(buffer(40_000), 1)
    states = []
    for _ in range(2):
        for each, (*of_rows, ids, starts) in enumerate(numbers):
            rows = int(torch.randint(0, 30, (), generator=generator))
            for number, like in zip(of_rows, (*_ROWS, torch.float16), strict=True):
                data = torch.randint(-9, 9, (rows, each % 5 + 1), generator=generator)
                padding = (each % 3 if rows else 4) if like.is_floating_point else 0
                copies.rows(number, data.to(where, like), rows + padding)
            chosen = torch.randint(0, 99, (rows + 9,), generator=generator)
            copies.ids(ids, chosen[each % 2 :].to(where, dtype))
            copies.starts(starts, torch.arange(rows + 1, dtype=dtype, device=where) * 7, 7 * rows)
        data = torch.randint(0, 99, (9000, 8), generator=generator).to(where)
        copies.rows(large, data, 9000)
        copies.rows(turned, data.t().contiguous().t(), 9000)
        copies.ids(filled, data[:3, 0].to(dtype))
        copies.run()
        states += [each.cpu().clone() for each in buffers]
    return states


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 4, 13])
def test_all_is_written_and_nothing_else(where, dtype, count):
    """Also in more launches than one, and a list that is used again."""
    expected = written(CopyList, "cpu", dtype, count)
    for one, other in zip(written(OnGPU, where, dtype, count), expected, strict=True):
        assert torch.equal(one, other)


def test_a_buffer_that_a_batch_leaves_out_stays_as_it_is(where):
    ids = torch.zeros(9, dtype=torch.int64, device=where)
    rows = torch.zeros(9, 2, device=where)
    copies = OnGPU(ids)
    numbers = copies.add_ids(ids, 4), copies.add_rows(rows)
    copies.ids(numbers[0], torch.tensor([7], device=where))
    copies.rows(numbers[1], torch.full((2, 2), 3.0, device=where), 3)
    copies.run()
    rows.zero_()
    copies.ids(numbers[0], torch.tensor([6, 6], device=where))
    copies.run()
    assert ids.tolist() == [6, 6, 4, 4, 4, 4, 4, 4, 4]
    assert not rows.any()


@pytest.mark.parametrize("spare", [0, 3, 7, 8, 50, 1000])
def test_padding_rows_have_an_edge_each_as_far_as_there_are_enough(where, spare):
    rows, edges, padding = 10, 40, 7
    indptr = torch.zeros(rows + 1 + padding, dtype=torch.int64, device=where)
    copies = OnGPU(indptr)
    number = copies.add_starts(indptr, edges + spare)
    copies.starts(number, torch.arange(0, edges + 1, 4, device=where), edges)
    copies.run()
    degrees = indptr.cpu().diff()
    assert degrees[:rows].tolist() == [4] * rows
    assert int(degrees[rows:].sum()) == spare
    assert int((degrees[rows:] > 0).sum()) == min(spare, padding)

"""Random numbers of tensors are those of kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.ops import SampleKey
from dgl_mgpu.ops.philox import as_uniform, draw_blocks, top_bits
from tests.ops import reference

KEY = SampleKey(seed=3, epoch=9).fold()


@pytest.mark.parametrize("stream", [0, 7, (1 << 31) + 5, (1 << 32) - 1])
def test_bits(stream):
    nodes = [0, 1, 12345678901, (1 << 40) + 3, (1 << 62) + 17]
    blocks = [0, 1, 5, 1 << 20, (1 << 32) - 1]
    found = draw_blocks(torch.tensor(nodes), torch.tensor(blocks), stream, KEY)
    expected = [reference.block(*at, stream, KEY) for at in zip(nodes, blocks, strict=True)]
    for draws, theirs in zip(found, zip(*expected, strict=True), strict=True):
        assert [draw % (1 << 64) for draw in draws.tolist()] == list(theirs)
        assert top_bits(draws).tolist() == [draw >> 11 for draw in theirs]
        assert as_uniform(draws).tolist() == [(draw >> 11) / 2**53 for draw in theirs]


def test_shapes_broadcast():
    nodes, streams = torch.arange(4), torch.arange(3)[:, None]
    first, second = draw_blocks(nodes, 2, streams, KEY)
    assert first.shape == second.shape == (3, 4)
    for stream in range(3):
        for found, row in zip(draw_blocks(nodes, 2, stream, KEY), (first, second), strict=True):
            assert torch.equal(found, row[stream])


def test_numbers_are_uniform():
    numbers = as_uniform(draw_blocks(torch.arange(100_000), 0, 0, KEY)[0]).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1
    assert np.abs(np.histogram(numbers, 20, (0, 1))[0] - 5000).max() < 450

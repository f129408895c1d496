"""Rows of graphs in a batch, padded and packed again, where some graphs have none."""

from __future__ import annotations

import pytest
import torch
from dgl import backend as F


@pytest.mark.parametrize(
    "lengths", [[2, 0, 3], [0, 0, 4, 1], [3, 0], [0, 2], [1], [0, 0, 2, 0, 0]], ids=str
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_keep_their_graphs(lengths, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    rows = torch.arange(2.0 * sum(lengths), device=device).view(-1, 2)
    parts = rows.split(lengths)
    padded = F.pad_packed_tensor(rows, lengths, -1.0, l_min=2)
    longest = max(2, *lengths, 0)
    assert padded.shape == (len(lengths), longest, 2)
    for part, count, graph in zip(parts, lengths, padded, strict=True):
        assert torch.equal(graph[:count], part)
        assert (graph[count:] == -1).all()
    assert torch.equal(F.pack_padded_tensor(padded, torch.tensor(lengths)), rows)

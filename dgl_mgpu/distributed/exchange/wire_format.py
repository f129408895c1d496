"""Rows as what gloo and NCCL both send."""

from __future__ import annotations

import math

import torch

from dgl_mgpu.ops.view import as_words


def sendable(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous rows of any element type as integers, without a copy."""
    if not math.prod(rows.shape[1:]):
        return rows.new_empty(len(rows), 0, dtype=torch.uint8)
    words = as_words(rows)
    return words.view(torch.uint8) if words.dtype == torch.int16 else words

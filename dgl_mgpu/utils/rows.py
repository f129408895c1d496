"""Rows of numbers as rows of bytes, of which all types are the same."""

from __future__ import annotations

import math

import torch


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The memory of contiguous rows, uint8, shape (n, row_bytes)."""
    if not rows.numel():  # whose strides may be any
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        return rows.new_empty(len(rows), row_bytes, dtype=torch.uint8)
    return rows.view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)

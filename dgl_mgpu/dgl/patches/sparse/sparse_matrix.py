"""`SparseMatrix` without deprecated functions of torch or needless copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dgl_mgpu.graph.originals import originals
from dgl_mgpu.utils.modules import module_with

if TYPE_CHECKING:
    from dgl.sparse import SparseMatrix


def all_ids(start: int, end: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.range`, without its end: the ids of all rows or columns."""
    return torch.arange(start, end, dtype=dtype, device=device)


torch_for_sparse_matrix = module_with(torch, range=all_ids)


def to(
    self: SparseMatrix,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> SparseMatrix:
    """`SparseMatrix.to`, which takes a device's name for another device than it is on."""
    if device is not None:
        device = torch.empty(0, device=device).device
    return originals["dgl.sparse.sparse_matrix:SparseMatrix.to"](self, device, dtype)

"""`SparseMatrix` without deprecated functions of torch or needless copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dgl_mgpu.graph.originals import originals
from dgl_mgpu.utils.modules import module_with

if TYPE_CHECKING:
    from dgl.sparse import SparseMatrix


def all_ids(start: int, end: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.range`, without its end: the ids of all rows or columns."""
    return torch.arange(start, end, dtype=dtype, device=device)


class _OnesElsewhere:
    """What ``torch.ones(size)`` is to be before ``to(device)`` follows, which it always does."""

    def __init__(self, size: int) -> None:
        self._size = size

    def to(self, device: torch.device) -> torch.Tensor:
        return torch.ones(self._size, device=device)


def ones(size: Any, **options: Any) -> torch.Tensor | _OnesElsewhere:
    """`torch.ones`, which does not make on the CPU what is copied to a GPU then."""
    return torch.ones(size, **options) if options else _OnesElsewhere(size)


torch_for_sparse_matrix = module_with(torch, range=all_ids, ones=ones)


def to(
    self: SparseMatrix,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> SparseMatrix:
    """`SparseMatrix.to`, which takes a device's name for another device than it is on."""
    if device is not None:
        device = torch.empty(0, device=device).device
    return originals["dgl.sparse.sparse_matrix:SparseMatrix.to"](self, device, dtype)

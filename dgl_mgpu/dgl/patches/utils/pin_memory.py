"""Pinned tensors. What runs kernels is imported at the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from dgl_mgpu.graph.pinning.pinning import PinnedMemory


def pin_memory_inplace(tensor: Tensor) -> PinnedMemory:
    """`dgl_mgpu.graph.pinning.pinning.pin_memory_inplace`."""
    from dgl_mgpu.graph.pinning import pinning

    return pinning.pin_memory_inplace(tensor)


def gather_pinned_tensor_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """`dgl_mgpu.graph.pinning.pinning.gather_pinned_tensor_rows`."""
    from dgl_mgpu.graph.pinning import pinning

    return pinning.gather_pinned_tensor_rows(tensor, rows)


def scatter_pinned_tensor_rows(dest: Tensor, rows: Tensor, source: Tensor) -> None:
    """`dgl_mgpu.graph.pinning.pinning.scatter_pinned_tensor_rows`."""
    from dgl_mgpu.graph.pinning import pinning

    pinning.scatter_pinned_tensor_rows(dest, rows, source)

"""DGL's pinned memory, imported when it is first used: it takes what runs kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from dgl_mgpu.backend.pinning import PinnedMemory


def pin_memory_inplace(tensor: Tensor) -> PinnedMemory:
    """`dgl_mgpu.backend.pinning.pin_memory_inplace`."""
    from dgl_mgpu.backend import pinning

    return pinning.pin_memory_inplace(tensor)


def gather_pinned_tensor_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """`dgl_mgpu.backend.pinning.gather_pinned_tensor_rows`."""
    from dgl_mgpu.backend import pinning

    return pinning.gather_pinned_tensor_rows(tensor, rows)


def scatter_pinned_tensor_rows(dest: Tensor, rows: Tensor, source: Tensor) -> None:
    """`dgl_mgpu.backend.pinning.scatter_pinned_tensor_rows`."""
    from dgl_mgpu.backend import pinning

    pinning.scatter_pinned_tensor_rows(dest, rows, source)


def pin_index(*arguments: Any) -> Any:
    """`dgl_mgpu.backend.pinning.pin_index`."""
    from dgl_mgpu.backend import pinning

    return pinning.pin_index(*arguments)


def unpin_index(*arguments: Any) -> Any:
    """`dgl_mgpu.backend.pinning.unpin_index`."""
    from dgl_mgpu.backend import pinning

    return pinning.unpin_index(*arguments)


def is_index_pinned(*arguments: Any) -> bool:
    """Whether `pin_index` has pinned a graph; without importing what pins."""
    (index,) = arguments
    return "_pinned" in vars(index)

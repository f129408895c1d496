"""What DGL has for GPUs alone, and the wheel not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dgl_mgpu.backend.compat.importer import originals
from dgl_mgpu.backend.memory.gpu_cache import GPUCache
from dgl_mgpu.backend.structure.partition import NDArrayPartition

__all__ = [
    "GPUCache",
    "NDArrayPartition",
    "_fetch_cuda",
    "_prefetch_update_feats",
    "is_tensor_adaptor_enabled",
]


def is_tensor_adaptor_enabled() -> bool:
    """Whether what a graph on a GPU is made of is torch's memory, which knows streams: it is."""
    return True


def _prefetch_update_feats(
    feats: dict[tuple[int, str], Any],
    frames: Sequence[Any],
    types: Sequence[Any],
    get_storage_func: Callable[..., Any],
    id_name: str,
    device: Any,
    pin_prefetcher: bool,
    gpu_caches: dict[tuple[str, Any], tuple[GPUCache, Any]],
) -> None:
    """Fetch the features that a sampler left to the dataloader, through a cache where there is one.

    Parameters
    ----------
    feats : dict
        By number of the type and name; is filled.
    frames, types : sequence
        Of nodes or edges.
    get_storage_func : callable
        What gives the storage of a name and a type.
    id_name : str
        Column of a frame that has the ids of its rows.
    device : torch.device
    pin_prefetcher : bool
        Passed on to storages.
    gpu_caches : dict
        By name and type.
    """
    from dgl.base import DGLError
    from dgl.frame import LazyFeature

    for number, (frame, type_) in enumerate(zip(frames, types, strict=True)):
        for key, column in frame._columns.items():
            if not isinstance(column, LazyFeature):
                continue
            name = column.name or key
            ids = frame.get(id_name) if column.id_ is None else column.id_
            if ids is None:
                raise DGLError(f"feature {name!r} is to be fetched, and nothing says of which rows")
            storage = get_storage_func(name, type_)

            def fetch(rows: Any, storage: Any = storage, where: Any = ids.device) -> Any:
                return storage.fetch(rows.to(where), device, pin_prefetcher)

            cache, _ = gpu_caches.get((name, type_), (None, None))
            feats[number, key] = fetch(ids) if cache is None else cache.fetch(ids.to(device), fetch)


def _fetch_cuda(indices: Any, tensor: torch.Tensor, device: Any, **kwargs: Any) -> torch.Tensor:
    """In place of ``dgl.storages.pytorch_tensor._fetch_cuda``: rows of a tensor on a GPU."""
    from dgl_mgpu.ops import pick_rows

    is_picked = (
        isinstance(indices, torch.Tensor)
        and indices.device == tensor.device
        and indices.dtype in (torch.int32, torch.int64)
        and tensor.is_contiguous()
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )
    if not is_picked:
        fetch = originals["dgl.storages.pytorch_tensor:_fetch_cuda"]
        return fetch(indices, tensor, device, **kwargs)
    rows = tensor.new_empty((len(indices), *tensor.shape[1:]))
    pick_rows(tensor.detach(), indices, rows)
    return rows.to(device, **kwargs)

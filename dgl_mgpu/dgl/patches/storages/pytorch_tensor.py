"""Rows of feature tensors on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.graph.originals import originals


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

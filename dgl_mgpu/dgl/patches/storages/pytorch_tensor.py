"""Rows of feature tensors on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dgl_mgpu.graph.originals import originals


def _fetch_cuda(indices: Any, tensor: torch.Tensor, device: Any, **kwargs: Any) -> torch.Tensor:
    """In place of ``dgl.storages.pytorch_tensor._fetch_cuda``: rows of a tensor on a GPU."""
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
    rows = tensor.new_empty((indices.shape[0], *tensor.shape[1:]))
    _pick_rows()(tensor.detach() if tensor.requires_grad else tensor, indices, rows)
    return rows if rows.device == device else rows.to(device, **kwargs)


@functools.cache
def _pick_rows() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    # Here: who has no graph on a GPU needs no operators of this package.
    from dgl_mgpu.ops import pick_rows

    return pick_rows

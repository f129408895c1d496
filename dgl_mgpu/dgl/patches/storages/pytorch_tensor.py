"""Rows of feature tensors on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.graph.originals import originals


def _fetch_cuda(indices: Any, tensor: torch.Tensor, device: Any, **kwargs: Any) -> torch.Tensor:
    """In place of ``dgl.storages.pytorch_tensor._fetch_cuda``: rows of a tensor on a GPU."""
    if not can_be_picked(indices, tensor):
        fetch = originals["dgl.storages.pytorch_tensor:_fetch_cuda"]
        return fetch(indices, tensor, device, **kwargs)
    pick = to_be_picked(indices, tensor)
    pick_all([pick])
    return pick[0].to(device, **kwargs)


def can_be_picked(indices: Any, tensor: torch.Tensor) -> bool:
    """Whether rows are on the tensor's device, and no gradient has to go back to them."""
    return (
        isinstance(indices, torch.Tensor)
        and indices.device == tensor.device
        and indices.dtype in (torch.int32, torch.int64)
        and indices.dim() == 1
        and tensor.is_contiguous()
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


def to_be_picked(
    indices: torch.Tensor, tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for rows, the tensor and the indices, for :func:`pick_all`."""
    rows = tensor.new_empty((indices.shape[0], *tensor.shape[1:]))
    return rows, tensor.detach() if tensor.requires_grad else tensor, indices


def pick_all(picks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Copy rows of tensors to memory for them, by one launch."""
    # Here: who has no graph on a GPU needs no operators of this package.
    from dgl_mgpu.ops import gather

    gather.pick_all(picks)

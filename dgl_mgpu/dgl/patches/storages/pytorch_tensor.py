"""Rows of feature tensors on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.graph.originals import originals


def _fetch_cuda(indices: Any, tensor: torch.Tensor, device: Any, **kwargs: Any) -> torch.Tensor:
    """In place of ``dgl.storages.pytorch_tensor._fetch_cuda``: rows of a tensor on a GPU."""
    # Here: who has no graph on a GPU needs no operators of this package.
    from dgl_mgpu.ops.gather import can_be_picked, pick_all, to_be_picked

    if not can_be_picked(indices, tensor):
        fetch = originals["dgl.storages.pytorch_tensor:_fetch_cuda"]
        return fetch(indices, tensor, device, **kwargs)
    pick = to_be_picked(indices, tensor)
    pick_all([pick])
    return pick[0].to(device, **kwargs)

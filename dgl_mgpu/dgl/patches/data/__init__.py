"""Graphs and tensors on a GPU are written to files from copies on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from dgl import backend

from dgl_mgpu.utils.modules import module_with


def zerocopy_to_dgl_ndarray(data: torch.Tensor) -> Any:
    """DGL's array of a tensor, or of a copy on the CPU."""
    from dgl_mgpu.graph.dispatch import tensor_backed_graphs

    with tensor_backed_graphs(False):
        return backend.zerocopy_to_dgl_ndarray(data.cpu())


backend_for_files = module_with(backend, zerocopy_to_dgl_ndarray=zerocopy_to_dgl_ndarray)

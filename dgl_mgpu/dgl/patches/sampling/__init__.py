"""What several samplers share: the backend on any device, and copies of edge ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from dgl import backend

from dgl_mgpu.utils.modules import module_with


class _AnyDevice:
    """Equal to every device."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def cpu() -> Any:
    """In place of `dgl.backend.cpu`, with which modules compare a graph's device."""
    return _AnyDevice()


backend_for_samplers = module_with(backend, cpu=cpu)


def copy_edge_ids(edges: Any) -> Any:
    """Edge ids of one type or of several, in memory of their own."""
    if isinstance(edges, Mapping):
        return {etype: copy_edge_ids(ids) for etype, ids in edges.items()}
    return edges.clone() if isinstance(edges, torch.Tensor) else edges

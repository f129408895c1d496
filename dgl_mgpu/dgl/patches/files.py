"""Graphs and tensors on a GPU are written to files from copies on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from dgl import backend

from dgl_mgpu.dgl.patches.modules import module_with
from dgl_mgpu.graph.originals import originals


def zerocopy_to_dgl_ndarray(data: torch.Tensor) -> Any:
    """DGL's array of a tensor, or of a copy on the CPU."""
    from dgl_mgpu.graph.dispatch import tensor_backed_graphs

    with tensor_backed_graphs(False):
        return backend.zerocopy_to_dgl_ndarray(data.cpu())


def save_graphs(filename: Any, g_list: Any, labels: Any = None, formats: Any = None) -> None:
    """In place of ``dgl.save_graphs``: a part of a graph is refused, whatever its class."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    for graph in g_list if isinstance(g_list, list) else [g_list]:
        index = getattr(graph, "_graph", None)
        if isinstance(index, DistributedGraphIndex):
            index.refuse_to_be_kept()
    originals["dgl.data.graph_serialize:save_graphs"](filename, g_list, labels, formats)


backend_for_files = module_with(backend, zerocopy_to_dgl_ndarray=zerocopy_to_dgl_ndarray)

"""Neighbour sampling on GPUs and of a store's graphs."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from dgl_mgpu.dgl.patches.sampling import copy_edge_ids
from dgl_mgpu.graph.originals import originals


def select_topk(
    g: Any, k: int | dict[Any, int], weight: str, nodes: Any = None, edge_dir: str = "in",
    ascending: bool = False, copy_ndata: bool = True, copy_edata: bool = True,
    output_device: Any = None,
) -> Any:  # fmt: skip
    """As `dgl.sampling.select_topk`; all nodes, the default, may be on a GPU."""
    if nodes is None:
        nodes = {ntype: g.nodes(ntype) for ntype in g.ntypes}
    original = originals["dgl.sampling.neighbor:select_topk"]
    return original(g, k, weight, nodes, edge_dir, ascending, copy_ndata, copy_edata, output_device)


def sample_neighbors(
    g: Any, nodes: Any, fanout: Any, edge_dir: str = "in", prob: Any = None,
    replace: bool = False, copy_ndata: bool = True, copy_edata: bool = True,
    _dist_training: bool = False, exclude_edges: Any = None, output_device: Any = None,
) -> Any:  # fmt: skip
    """As `dgl.sampling.sample_neighbors`, also of a store's graph."""
    from dgl_mgpu.dgl.patches.dataloading.dataloader import is_in_a_store

    is_plain = type(fanout) is int and fanout != 0 and prob is None and exclude_edges is None
    if is_plain and output_device is None and not _dist_training and _is_homogeneous(g, nodes):
        from dgl_mgpu.sampling.neighbors import sample_homogeneous

        return sample_homogeneous(g, nodes, fanout, edge_dir, replace, copy_ndata, copy_edata)
    original = partial(originals["dgl.sampling.neighbor:sample_neighbors"], g)
    sample = g.sample_neighbors if is_in_a_store(g) else original
    return sample(
        nodes, fanout, edge_dir, prob, replace, copy_ndata, copy_edata, _dist_training,
        exclude_edges, output_device,
    )  # fmt: skip


def _is_homogeneous(g: Any, nodes: Any) -> bool:
    """Whether a graph of tensors has one type of nodes and edges, and these are such nodes.

    Calls that are recorded go through DGL's C function.
    """
    from dgl.heterograph import DGLGraph

    from dgl_mgpu.dgl.capi import record
    from dgl_mgpu.graph.index import TensorIndex

    if type(g) is not DGLGraph or type(g._graph) is not TensorIndex or record.recording:
        return False
    index = g._graph
    return (
        index.schema.is_single
        and index.schema.num_ntypes == 1
        and isinstance(nodes, torch.Tensor)
        and nodes.dim() == 1
        and (nodes.dtype, nodes.device) == (index.idtype, index.device)
    )


def _sample_neighbors(
    g: Any, nodes: Any, fanout: Any, edge_dir: str = "in", prob: Any = None,
    replace: bool = False, copy_ndata: bool = True, copy_edata: bool = True,
    _dist_training: bool = False, exclude_edges: Any = None, fused: bool = False,
    mapping: dict[str, list[torch.Tensor]] | None = None,
) -> Any:  # fmt: skip
    """As DGL's for `sample_neighbors` and `sample_neighbors_fused`, with numbers of the ids' type.

    ``mapping`` has room for these numbers of nodes, which lasts from call to call.  Of
    ``exclude_edges`` DGL's C++ gets a copy, since it sorts the tensor, which may be edges' ids.
    """
    if fused:
        mapping = {} if mapping is None else mapping
        own = f"__mapping{os.getpid()}"
        if own not in mapping:
            counts = [g.num_nodes(ntype) for ntype in g.ntypes]
            mapping[own] = [torch.full((count,), -1, dtype=g.idtype) for count in counts]
    original = originals["dgl.sampling.neighbor:_sample_neighbors"]
    return original(
        g, nodes, fanout, edge_dir, prob, replace, copy_ndata, copy_edata, _dist_training,
        copy_edge_ids(exclude_edges), fused, mapping,
    )  # fmt: skip

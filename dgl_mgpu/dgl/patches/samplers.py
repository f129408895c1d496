"""DGL's samplers that refuse graphs on GPUs, as functions of its C library once did, or stores'."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from dgl import backend

from dgl_mgpu.dgl.patches.modules import module_with
from dgl_mgpu.graph.originals import originals


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


def select_topk(
    g: Any,
    k: int | dict[Any, int],
    weight: str,
    nodes: Any = None,
    edge_dir: str = "in",
    ascending: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    output_device: Any = None,
) -> Any:
    """Select edges of the largest weights, by default of all nodes, also on a GPU.

    Parameters and results are those of `dgl.sampling.select_topk`.
    """
    if nodes is None:
        nodes = {ntype: g.nodes(ntype) for ntype in g.ntypes}
    original = originals["dgl.sampling.neighbor:select_topk"]
    return original(g, k, weight, nodes, edge_dir, ascending, copy_ndata, copy_edata, output_device)


def sample_neighbors(
    g: Any,
    nodes: Any,
    fanout: Any,
    edge_dir: str = "in",
    prob: Any = None,
    replace: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    _dist_training: bool = False,
    exclude_edges: Any = None,
    output_device: Any = None,
) -> Any:
    """Sample neighbors, also of a store's graph.

    Parameters and results are those of `dgl.sampling.sample_neighbors`.
    """
    from dgl_mgpu.dgl.patches.uva import is_in_a_store

    original = partial(originals["dgl.sampling.neighbor:sample_neighbors"], g)
    sample = g.sample_neighbors if is_in_a_store(g) else original
    return sample(
        nodes, fanout, edge_dir, prob, replace, copy_ndata, copy_edata, _dist_training,
        exclude_edges, output_device,
    )  # fmt: skip


def _sample_neighbors(
    g: Any,
    nodes: Any,
    fanout: Any,
    edge_dir: str = "in",
    prob: Any = None,
    replace: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    _dist_training: bool = False,
    exclude_edges: Any = None,
    fused: bool = False,
    mapping: dict[str, list[torch.Tensor]] | None = None,
) -> Any:
    """Sample neighbors; of those that number them at once the numbers are of the ids' type.

    Parameters and results are those of `dgl.sampling.sample_neighbors` and of its twin for all at
    once, where ``mapping`` has room for numbers, which lasts from call to call.  ``exclude_edges``
    stay as they are: DGL's C++ sorts the tensor it is given, whose numbers may be edges' ids.
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
        _copied(exclude_edges), fused, mapping,
    )  # fmt: skip


def _copied(edges: Any) -> Any:
    """Edge ids of one type or of several, in memory of their own."""
    if isinstance(edges, Mapping):
        return {etype: _copied(ids) for etype, ids in edges.items()}
    return edges.clone() if isinstance(edges, torch.Tensor) else edges


def sample_labors(
    g: Any,
    nodes: Any,
    fanout: Any,
    edge_dir: str = "in",
    prob: Any = None,
    importance_sampling: int = 0,
    random_seed: Any = None,
    seed2_contribution: float = 0,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    exclude_edges: Any = None,
    output_device: Any = None,
) -> Any:
    """Layer-neighbour sampling; the weights are those of the edges that stay, also on a GPU.

    ``exclude_edges`` stay as they are, as in :func:`_sample_neighbors`.  Parameters and results are
    those of `dgl.sampling.sample_labors`.
    """
    from dgl.sampling import labor

    frontier, importances = labor._sample_labors(
        g,
        nodes,
        fanout,
        edge_dir=edge_dir,
        prob=prob,
        importance_sampling=importance_sampling,
        random_seed=random_seed,
        seed2_contribution=seed2_contribution,
        copy_ndata=copy_ndata,
        copy_edata=copy_edata,
        exclude_edges=_copied(exclude_edges),
    )
    if output_device is None:
        return frontier, importances
    return frontier.to(output_device), [each.to(output_device) for each in importances]


def random_walk(
    g: Any,
    nodes: Any,
    *,
    metapath: Any = None,
    length: int | None = None,
    prob: str | None = None,
    restart_prob: Any = None,
    return_eids: bool = False,
) -> Any:
    """Generate random walk traces, also on a store's graph.

    Parameters and results are those of `dgl.sampling.random_walk`.
    """
    from dgl_mgpu.dgl.patches.uva import is_in_a_store

    original = partial(originals["dgl.sampling.randomwalks:random_walk"], g)
    walk = g.random_walk if is_in_a_store(g) else original
    return walk(
        nodes,
        metapath=metapath,
        length=length,
        prob=prob,
        restart_prob=restart_prob,
        return_eids=return_eids,
    )


def node2vec_random_walk(
    g: Any,
    nodes: Any,
    p: float,
    q: float,
    walk_length: int,
    prob: str | None = None,
    return_eids: bool = False,
) -> Any:
    """Generate random walk traces based on the node2vec model, also on a GPU.

    Parameters and results are those of `dgl.sampling.node2vec_random_walk`.
    """
    from dgl import utils
    from dgl.sampling import node2vec_randomwalk

    from dgl_mgpu.graph.index import TensorIndex

    if not isinstance(g._graph, TensorIndex):
        original = originals["dgl.sampling.node2vec_randomwalk:node2vec_random_walk"]
        return original(g, nodes, p, q, walk_length, prob, return_eids)
    nodes = utils.prepare_tensor(g, nodes, "nodes")
    weights = nodes.new_empty(0) if prob is None else g.edata[prob]
    traces, eids = node2vec_randomwalk._CAPI_DGLSamplingNode2vec(
        g._graph, nodes, p, q, walk_length, weights
    )
    return (traces, eids) if return_eids else traces

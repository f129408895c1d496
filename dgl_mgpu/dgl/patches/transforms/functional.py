"""Transforms of graphs on GPUs and of parts of a partitioned graph."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import TENSOR_INDEX, on_whole_graph, override
from dgl_mgpu.graph.originals import originals

_FUNCTIONS = "dgl.transforms.functional:"


def reverse(
    g: Any, copy_ndata: bool = True, copy_edata: bool = False, *,
    share_ndata: bool | None = None, share_edata: bool | None = None,
) -> Any:  # fmt: skip
    """In place of ``dgl.reverse``: a part of a graph is one of the reversed graph."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    reversed_graph = originals[_FUNCTIONS + "reverse"](
        g, copy_ndata, copy_edata, share_ndata=share_ndata, share_edata=share_edata
    )
    if isinstance(g._graph, DistributedGraphIndex):
        reversed_graph.__class__ = type(g)
    return reversed_graph


@on_whole_graph
def remove_self_loop(g: Any, etype: Any = None) -> Any:
    """In place of ``dgl.remove_self_loop``: a part of a graph has all loops of its nodes."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex, remove_self_loops

    if isinstance(g._graph, DistributedGraphIndex) and _may_have_loops(g, etype):
        return remove_self_loops(g, etype)
    return originals[_FUNCTIONS + "remove_self_loop"](g, etype)


@on_whole_graph
def add_self_loop(
    g: Any, edge_feat_names: Any = None, fill_data: Any = 1.0, etype: Any = None
) -> Any:
    """In place of ``dgl.add_self_loop``: a part of a graph sets the ids of its edges itself."""
    from dgl.base import EID

    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    if isinstance(g._graph, DistributedGraphIndex) and edge_feat_names is None:
        edge_feat_names = [name for name in g.edges[etype].data if name != EID]
    return originals[_FUNCTIONS + "add_self_loop"](g, edge_feat_names, fill_data, etype)


@on_whole_graph
def add_edges(g: Any, u: Any, v: Any, data: Any = None, etype: Any = None) -> Any:
    """In place of ``dgl.add_edges``: what ``add_self_loop`` adds, a part of a graph takes, too."""
    import torch

    from dgl_mgpu.comm.communicator import Communicator
    from dgl_mgpu.graph.distributed import DistributedGraphIndex, add_self_loops

    if isinstance(g._graph, DistributedGraphIndex) and _may_have_loops(g, etype):
        nodes = g.nodes(g.to_canonical_etype(etype)[0])
        are_loops = all(isinstance(end, torch.Tensor) and torch.equal(end, nodes) for end in (u, v))
        # No edges are those of a rank without nodes, whatever the others add.
        if all(Communicator.of_all_machines().all_gather(are_loops)):
            return add_self_loops(g, data or {}, etype)
    return originals[_FUNCTIONS + "add_edges"](g, u, v, data, etype)


@on_whole_graph
def remove_edges(g: Any, eids: Any, etype: Any = None, store_ids: bool = False) -> Any:
    """In place of ``dgl.remove_edges``: also of a graph partitioned under ``--partition``."""
    return originals[_FUNCTIONS + "remove_edges"](g, eids, etype, store_ids)


@on_whole_graph
def add_reverse_edges(
    g: Any, readonly: Any = None, copy_ndata: bool = True, copy_edata: bool = False,
    ignore_bipartite: bool = False, exclude_self: bool = True,
) -> Any:  # fmt: skip
    """In place of ``dgl.add_reverse_edges``, likewise."""
    original = originals[_FUNCTIONS + "add_reverse_edges"]
    return original(g, readonly, copy_ndata, copy_edata, ignore_bipartite, exclude_self)


@on_whole_graph
def to_bidirected(g: Any, copy_ndata: bool = False, readonly: Any = None) -> Any:
    """In place of ``dgl.to_bidirected``, likewise."""
    return originals[_FUNCTIONS + "to_bidirected"](g, copy_ndata, readonly)


def _may_have_loops(g: Any, etype: Any) -> bool:
    source, _, destination = g.to_canonical_etype(etype)
    return source == destination


@override(_FUNCTIONS + "line_graph", TENSOR_INDEX)
def line_graph(g: Any, backtracking: bool = True, shared: bool = False) -> Any:
    """In place of ``dgl.line_graph``: a graph on a GPU stays there."""
    from dgl import DGLGraph, utils
    from dgl.base import DGLError
    from dgl.transforms import functional

    if not g.is_homogeneous:
        raise DGLError("only homogeneous graph is supported")
    lines = DGLGraph(functional._CAPI_DGLHeteroLineGraph(g._graph, backtracking))
    if shared:
        utils.set_new_frames(lines, node_frames=utils.extract_edge_subframes(g, None))
    return lines


@on_whole_graph
@override(_FUNCTIONS + "to_simple", TENSOR_INDEX)
def to_simple(
    g: Any, return_counts: str | None = "count", writeback_mapping: bool = False,
    copy_ndata: bool = True, copy_edata: bool = False, aggregator: str = "arbitrary",
) -> Any:  # fmt: skip
    """In place of ``dgl.to_simple``: also for a graph on a GPU."""
    from dgl import DGLGraph, utils
    from dgl.base import DGLError
    from dgl.transforms import functional

    if g.is_block:
        raise DGLError("Cannot convert a block graph to a simple graph.")
    index, counts, edge_maps = functional._CAPI_DGLToSimpleHetero(g._graph)
    simple = DGLGraph(index, g.ntypes, g.etypes)
    if copy_ndata:
        utils.set_new_frames(simple, node_frames=utils.extract_node_subframes(g, None))
    if copy_edata:
        frames = functional._coalesce_edge_frame(g, edge_maps, counts, aggregator)
        utils.set_new_frames(simple, edge_frames=frames)
    if return_counts is not None:
        for etype, count in zip(g.canonical_etypes, counts, strict=True):
            simple.edges[etype].data[return_counts] = count
    if not writeback_mapping:
        return simple
    if len(edge_maps) == 1:
        return simple, edge_maps[0]
    return simple, dict(zip(g.canonical_etypes, edge_maps, strict=True))

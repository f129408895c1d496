"""Neighbour sampling on graphs of tensors: C functions of DGL's ``sampling``.

What is drawn depends on ``dgl.seed``, on how many calls there were since then and on the nodes, and
is the same on a GPU as for tensors on the CPU.  A node that is mentioned twice in a call gets one
sample twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace as with_fields
from typing import Any

import torch
from dgl.base import EID
from dgl.heterograph import DGLGraph
from dgl.heterograph_index import HeteroGraphIndex

from dgl_mgpu.graph.block_frames import BlockFrame, FrameColumns
from dgl_mgpu.graph.dispatch import as_tensor, is_null
from dgl_mgpu.graph.errors import raising_dgl_errors
from dgl_mgpu.graph.index import SubgraphIndex, TensorIndex
from dgl_mgpu.ops import negative_edges
from dgl_mgpu.sampling.labor import Variates, pick_labor, take_all
from dgl_mgpu.sampling.seed_edges import (
    Sample,
    all_edges,
    as_subgraph,
    as_weights,
    draw,
    format_of,
    keep,
    new_key,
    not_excluded,
    resolve_graph,
    seeds_of,
    values_at,
)
from dgl_mgpu.sampling.views import edges_view

#: How many times the average pair's candidates a pair without an edge may try.
_SPREAD = 4


def sample_neighbors(
    graph: HeteroGraphIndex,
    nodes: Sequence[Any],
    fanouts: Any,
    edge_dir: str,
    probs: Sequence[Any],
    excluded: Sequence[Any],
    replace: bool,
) -> SubgraphIndex:
    """Sample edges of nodes: ``_CAPI_DGLSampleNeighbors``.

    Nodes are by node type, the rest by edge type, null for none.  Fanout -1 takes all edges, of a
    positive probability if there are any.  ``probs`` are float or a mask, shape (num_edges,); a
    node whose edges all have 0 gets none.  ``excluded`` edge ids are left out of the sample, as DGL
    does it on the CPU and on GPUs: a seed then has fewer edges.

    Returns all nodes, and the sampled edges, one seed's after the other's.  Raises
    InvalidInputError, IdOutOfRangeError or InvalidWeightError.
    """
    index, device = resolve_graph(graph, nodes)
    key = new_key()
    samples: list[Sample | None] = []
    for etype, fanout in enumerate(as_tensor(fanouts).tolist()):
        seeds = seeds_of(index, nodes, etype, edge_dir)
        if seeds is None or fanout == 0:
            samples.append(None)
            continue
        view = edges_view(index.relations[etype], format_of(edge_dir), device)
        weights = as_weights(probs[etype])
        etype_key = with_fields(key, etype=etype)
        edges = draw(view, seeds, fanout, etype_key, replace, weights)
        if excluded and not is_null(excluded[etype]):
            edges = keep(edges, not_excluded(edges, excluded[etype]))
        samples.append(Sample(seeds, edges))
    return as_subgraph(index, samples, edge_dir, device)


@raising_dgl_errors
def sample_homogeneous(
    g: DGLGraph,
    nodes: torch.Tensor,
    fanout: int,
    edge_dir: str,
    replace: bool,
    copy_ndata: bool,
    copy_edata: bool,
) -> DGLGraph:
    """``dgl.sampling.sample_neighbors`` of a graph of tensors with one type of nodes and edges.

    The same samples as by :func:`sample_neighbors`, without the lists and arrays that DGL makes for
    it: half of the time of a small call.
    """
    index: TensorIndex = g._graph
    device = index.device
    view = edges_view(index.relations[0], format_of(edge_dir), device)
    edges = draw(view, nodes, fanout, new_key(), replace, None)
    sampled = as_subgraph(index, [Sample(nodes, edges)], edge_dir, device)
    node_frames = [frame.clone() for frame in g._node_frames] if copy_ndata else None
    edge_frames = None
    if copy_edata:
        (eids,) = sampled.induced_edges
        columns = FrameColumns(g._edge_frames[0], EID)
        edge_frames = [BlockFrame(EID, eids, len(eids), columns)]
    return DGLGraph(sampled.graph, g.ntypes, g.etypes, node_frames, edge_frames)


def sample_neighbors_fused(
    graph: HeteroGraphIndex,
    nodes: Sequence[Any],
    mapping: Sequence[Any],
    fanouts: Any,
    edge_dir: str,
    probs: Sequence[Any],
    excluded: Sequence[Any],
    replace: bool,
) -> tuple[TensorIndex, list[torch.Tensor], list[torch.Tensor]]:
    """Sample edges of nodes into a block: ``_CAPI_DGLSampleNeighborsFused``.

    DGL's Python asks for it for graphs and nodes on the CPU alone.  ``mapping`` is scratch memory
    of DGL's, left as it is.  Returns the block, its source nodes by type and the ids of its edges.
    """
    from dgl_mgpu.graph.blocks import to_block

    frontier = sample_neighbors(graph, nodes, fanouts, edge_dir, probs, excluded, replace)
    idtype, device = frontier.graph.idtype, frontier.graph.device
    targets = [
        torch.empty(0, dtype=idtype, device=device) if is_null(ids) else as_tensor(ids)
        for ids in nodes
    ]
    block, sources, edge_places = to_block(frontier.graph, targets, True, [])
    eids = [
        ids[places.long()] for ids, places in zip(frontier.induced_edges, edge_places, strict=True)
    ]
    return block, sources, eids


def sample_labors(
    graph: HeteroGraphIndex,
    nodes: Sequence[Any],
    fanouts: Any,
    edge_dir: str,
    probs: Sequence[Any],
    excluded: Sequence[Any],
    importance_sampling: int,
    random_seed: Any,
    seed2_contribution: float,
    node_ids: Sequence[Any],
) -> list[Any]:
    """Layer-neighbour sampling: ``_CAPI_DGLSampleLabors``; see `dgl_mgpu.sampling.labor`.

    As :func:`sample_neighbors`, with expectations as fanouts.  ``importance_sampling`` counts
    optimisation steps, negative until convergence.  Equal ``random_seed``, int64, shape (1,) or
    (2,), give a node equal variates in every call; ``seed2_contribution`` says how far these have
    moved from the first seed's to the second's.  They are drawn by ``node_ids``, by node type, null
    for the nodes' own.

    Returns the subgraph, then for each edge type weights of the sampled edges, or an empty tensor
    where all are equal.
    """
    index, device = resolve_graph(graph, nodes)
    variates = Variates(as_tensor(random_seed).tolist(), seed2_contribution)
    samples: list[Sample | None] = []
    importances = []
    for etype, fanout in enumerate(as_tensor(fanouts).tolist()):
        seeds = seeds_of(index, nodes, etype, edge_dir)
        importances.append(torch.empty(0, dtype=torch.float32, device=device))
        if seeds is None or fanout == 0:
            samples.append(None)
            continue
        edges = all_edges(edges_view(index.relations[etype], format_of(edge_dir), device), seeds)
        weights = None if is_null(probs[etype]) else as_tensor(probs[etype]).reshape(-1)
        weights = values_at(weights, edges.eids)
        if fanout < 0:
            picked = take_all(edges.indptr, len(edges.eids), weights, importance_sampling)
        else:
            source, target = index.schema.ends[etype]
            names = node_ids[source if edge_dir == "in" else target]
            named = edges.neighbors if is_null(names) else values_at(names, edges.neighbors)
            picked = pick_labor(
                edges.indptr,
                edges.neighbors,
                fanout,
                variates.draw(named),
                weights,
                importance_sampling,
            )
        edges = keep(edges, picked.places)
        if picked.importances is not None:
            importances[-1] = picked.importances
        if excluded and not is_null(excluded[etype]):
            kept_places = not_excluded(edges, excluded[etype])
            if len(importances[-1]):
                importances[-1] = importances[-1][kept_places]
            edges = keep(edges, kept_places)
        samples.append(Sample(seeds, edges))
    return [as_subgraph(index, samples, edge_dir, device), *importances]


def global_uniform_negative_sampling(
    graph: HeteroGraphIndex,
    etype: int,
    count: int,
    trials: int,
    exclude_self_loops: bool,
    replace: bool,
    redundancy: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw pairs of nodes that are no edges: ``_CAPI_DGLGlobalUniformNegativeSampling``.

    Draws ``count`` pairs at most.  DGL draws ``count * (1 + redundancy)`` candidates, ``trials``
    times where they are edges.  Here each pair has candidates of its own, and may need more than
    the average pair.
    """
    index, device = resolve_graph(graph, [])
    sources, destinations = negative_edges(
        edges_view(index.relations[etype], "csc", device),
        count,
        new_key(),
        replace=replace,
        exclude_self_loops=exclude_self_loops,
        max_tries=max(1, math.ceil(_SPREAD * trials * (1.0 + redundancy))),
    )
    return sources, destinations


def select_pinsage_neighbors(
    sources: Any, targets: Any, each: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select the most visited nodes of each seed: ``_CAPI_DGLSamplingSelectPinSageNeighbors``.

    ``sources``, int32 or int64, shape (n * each,), are the nodes visited from each of n seeds, -1
    for none, and ``targets`` the seeds, as often.  Returns at most ``count`` sources, targets and
    numbers of visits a seed, the most visited first; of equally visited nodes that of the higher
    id, as in DGL.
    """
    visited = as_tensor(sources).reshape(-1, each).sort(dim=1, descending=True).values
    seeds = as_tensor(targets).reshape(-1, each)[:, 0]
    begins = torch.ones_like(visited, dtype=torch.bool)
    begins[:, 1:] = visited[:, 1:] != visited[:, :-1]
    run = begins.long().cumsum(dim=1) - 1
    lengths = torch.zeros_like(run).scatter_add_(1, run, torch.ones_like(run))
    # How often each node was visited, in the place of its first mention.
    counts = torch.where(begins & (visited >= 0), lengths.gather(1, run), 0)
    counts, order = counts.sort(dim=1, descending=True, stable=True)
    counts, order = counts[:, :count], order[:, :count]
    row, rank = counts.nonzero(as_tuple=True)
    return (visited[row, order[row, rank]], seeds[row], counts[row, rank].to(visited.dtype))

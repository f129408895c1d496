"""Sampling by what edges are, their type, tag or weight: C functions of DGL's ``sampling``.

All edges of the seeds are looked at, and some of them picked; see `dgl_mgpu.sampling.neighbors`
for what the draws depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from dgl.heterograph_index import HeteroGraphIndex

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import as_tensor, is_null
from dgl_mgpu.graph.index import SubgraphIndex
from dgl_mgpu.ops import SampledNeighbors, SampleKey
from dgl_mgpu.sampling.seed_edges import (
    ACTION,
    Sample,
    all_edges,
    as_subgraph,
    as_weights,
    edge_rows,
    format_of,
    keep,
    new_key,
    pick,
    resolve_graph,
    row_bounds,
    seeds_of,
    values_at,
)
from dgl_mgpu.sampling.views import edges_view


def sample_neighbors_etype(
    graph: HeteroGraphIndex,
    nodes: Any,
    etype_offset: Sequence[int],
    fanouts: Any,
    edge_dir: str,
    probs: Sequence[Any],
    replace: bool,
    etype_sorted: bool,
) -> SubgraphIndex:
    """Sample edges of each type in a graph that has them as one: ``_CAPI_DGLSampleNeighborsEType``.

    ``etype_offset`` has the first edge id of each type, and may end with the number of edges.
    Fanouts and ``probs`` are by type, or ``probs`` is one null.  ``etype_sorted``, whether a node's
    edges are stored by type, makes no difference here.  A seed's sampled edges are in the order of
    their types.
    """
    index, device = resolve_graph(graph, [nodes])
    key = new_key()
    (relation,) = index.relations
    seeds = as_tensor(nodes)
    if is_null(seeds):
        return as_subgraph(index, [None], edge_dir, device)
    by_type = as_tensor(fanouts).tolist()
    offsets = torch.tensor([int(first) for first in etype_offset], dtype=torch.int64)
    edges = all_edges(edges_view(relation, format_of(edge_dir), device), seeds)
    types = torch.searchsorted(offsets.to(device), edges.eids.long(), right=True) - 1
    # A row for each seed and type.
    rows = edge_rows(edges) * len(by_type) + types
    rows, order = torch.sort(rows, stable=True)
    edges = SampledNeighbors(
        row_bounds(rows, len(seeds) * len(by_type)), edges.neighbors[order], edges.eids[order]
    )
    weights = None
    if not all(map(is_null, probs)):
        joined = _joined(probs, offsets, relation.num_edges)
        weights = values_at(as_weights(joined), edges.eids)
    edges = _pick_by_type(edges, by_type, key, replace, weights)
    edges = edges._replace(indptr=edges.indptr[:: len(by_type)])
    return as_subgraph(index, [Sample(seeds, edges)], edge_dir, device)


def _joined(probs: Sequence[Any], offsets: torch.Tensor, num_edges: int) -> torch.Tensor:
    """Probabilities by edge id, of those of each type."""
    sizes = torch.cat([offsets[: len(probs)], torch.tensor([num_edges])]).diff().tolist()
    by_type = [as_tensor(prob) for prob in probs]
    like = next(prob for prob in by_type if not is_null(prob))
    return torch.cat(
        [
            like.new_ones(size) if is_null(prob) else prob.reshape(-1)
            for prob, size in zip(by_type, sizes, strict=True)
        ]
    )


def _pick_by_type(
    edges: SampledNeighbors,
    fanouts: list[int],
    key: SampleKey,
    replace: bool,
    weights: torch.Tensor | None,
) -> SampledNeighbors:
    """Pick edges of each row, whose fanout is that of its number modulo their number."""
    num_rows, device = len(edges.indptr) - 1, edges.eids.device
    of_type = edge_rows(edges) % len(fanouts)
    picked = []
    for fanout in sorted(set(fanouts)):
        has_fanout = torch.tensor(fanouts, device=device) == fanout
        places = has_fanout[of_type].nonzero()[:, 0]
        place_weights = None if weights is None else weights[places]
        picked.append(pick(keep(edges, places), fanout, key, replace, place_weights))
    rows, order = torch.cat([edge_rows(edges) for edges in picked]).sort(stable=True)
    return SampledNeighbors(
        row_bounds(rows, num_rows),
        torch.cat([edges.neighbors for edges in picked])[order],
        torch.cat([edges.eids for edges in picked])[order],
    )


def sample_neighbors_biased(
    graph: HeteroGraphIndex,
    nodes: Any,
    fanout: int,
    bias: Any,
    tag_offset: Any,
    edge_dir: str,
    replace: bool,
) -> SubgraphIndex:
    """Sample edges by the tag of their other end: ``_CAPI_DGLSampleNeighborsBiased``.

    ``bias``, float, shape (tags,), has the probability of an edge by its tag, of any sum;
    ``tag_offset``, int, shape (num_nodes, tags + 1), where among a node's edges, which are sorted
    by tag, those of each tag begin.
    """
    index, device = resolve_graph(graph, [nodes])
    key = new_key()
    seeds = as_tensor(nodes)
    if is_null(seeds) or fanout == 0:
        return as_subgraph(index, [None], edge_dir, device)
    edges = all_edges(edges_view(index.relations[0], format_of(edge_dir), device), seeds)
    bias = as_tensor(bias).to(device, torch.float64)
    counts = values_at(as_tensor(tag_offset), seeds).long().diff(dim=1)
    tags = torch.arange(len(bias), device=device).repeat(len(seeds))
    if counts.shape[1] != len(bias) or int(counts.sum()) != len(edges.eids):
        raise InvalidInputError(
            f"{ACTION} by {len(bias)} tags",
            f"the graph has offsets of {counts.shape[1]} tags, for {int(counts.sum())} of the"
            f" nodes' {len(edges.eids)} edges",
            "sort the graph with dgl.sort_csc_by_tag, or dgl.sort_csr_by_tag for edge_dir='out'",
        )
    tags = tags.repeat_interleave(counts.flatten(), output_size=len(edges.eids))
    edges = pick(edges, fanout, key, replace, bias[tags])
    return as_subgraph(index, [Sample(seeds, edges)], edge_dir, device)


def sample_neighbors_topk(
    graph: HeteroGraphIndex,
    nodes: Sequence[Any],
    counts: Any,
    edge_dir: str,
    weights: Sequence[Any],
    ascending: bool,
) -> SubgraphIndex:
    """Select the edges of the largest, or smallest, weights: ``_CAPI_DGLSampleNeighborsTopk``.

    ``counts`` has the edges of each node by edge type, -1 for all; ``weights`` are by edge type,
    shape (num_edges,).  A seed's edges are in the order of their weights, equal ones as they are
    stored.
    """
    index, device = resolve_graph(graph, nodes)
    samples: list[Sample | None] = []
    for etype, count in enumerate(as_tensor(counts).tolist()):
        seeds = seeds_of(index, nodes, etype, edge_dir)
        if seeds is None or count == 0:
            samples.append(None)
            continue
        edges = all_edges(edges_view(index.relations[etype], format_of(edge_dir), device), seeds)
        values = values_at(as_tensor(weights[etype]).reshape(-1), edges.eids)
        order = values.argsort(stable=True, descending=not ascending)
        rows, by_row = edge_rows(edges)[order].sort(stable=True)
        order = order[by_row]
        edges = SampledNeighbors(edges.indptr, edges.neighbors[order], edges.eids[order])
        if count > 0:
            rank = torch.arange(len(rows), device=device) - edges.indptr[rows]
            edges = keep(edges, (rank < count).nonzero()[:, 0])
        samples.append(Sample(seeds, edges))
    return as_subgraph(index, samples, edge_dir, device)

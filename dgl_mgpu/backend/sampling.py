"""Neighbour sampling on graphs of tensors: C functions of DGL's ``sampling``.

Seeds on a GPU may sample a graph in that GPU's memory or, pinned, in the host's.  What is drawn
depends on ``dgl.seed``, on how many calls there were since then and on the nodes, and is the same
on a GPU as for tensors on the CPU.  A node that is mentioned twice in a call gets one sample twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace as with_fields
from typing import Any, NamedTuple

import torch
from dgl.heterograph_index import HeteroGraphIndex

from dgl_mgpu.backend import random
from dgl_mgpu.backend.arrays import as_tensor, is_null
from dgl_mgpu.backend.filter import IdFilter
from dgl_mgpu.backend.index import SubgraphIndex, TensorIndex
from dgl_mgpu.backend.labor import Variates, pick_labor
from dgl_mgpu.backend.pinning import gather_pinned_tensor_rows
from dgl_mgpu.backend.relation import Compressed, Coo, Relation
from dgl_mgpu.backend.views import compressed_view, edges_view, scalars_view
from dgl_mgpu.errors import InvalidInputError, InvalidWeightError
from dgl_mgpu.ops import SampledNeighbors, SampleKey, negative_edges
from dgl_mgpu.ops import sample_neighbors as sample_edges
from dgl_mgpu.ops.view import GraphView

_ASKED = "sample neighbors"
#: How many times the average pair's candidates a pair without an edge may try.
_SPREAD = 4
_WEIGHTS = torch.float32, torch.float64, torch.bool, torch.uint8


def new_key() -> SampleKey:
    """The key of a new call, which no other has had since DGL was seeded."""
    seed, call = random.next_key()
    return SampleKey(seed, batch=call)


def placed(graph: HeteroGraphIndex, arrays: Iterable[Any]) -> tuple[TensorIndex, torch.device]:
    """A call's graph as tensors, and the device on which its arguments have it work.

    Raises
    ------
    InvalidInputError
        If the graph is on the CPU, nodes are on a GPU and the graph is not pinned.
    """
    if isinstance(graph, TensorIndex):
        return graph, graph.device
    devices = (each.device for each in arrays if isinstance(each, torch.Tensor))
    where = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    pinned = vars(graph).get("_pinned")
    if pinned is None:
        raise InvalidInputError(
            f"sample a graph on the CPU for nodes on {where}",
            "it is not pinned",
            f"pin it with g.pin_memory_(), move it with g.to('{where}'), or the nodes to the CPU",
        )
    return pinned, where


class _Sample(NamedTuple):
    """What was sampled of one edge type."""

    seeds: torch.Tensor
    edges: SampledNeighbors


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

    Parameters
    ----------
    graph : HeteroGraphIndex
    nodes : list of array
        By node type; null for none.
    fanouts : array, int64
        By edge type; -1 for all edges, of a positive probability if there are any.
    edge_dir : str
        "in" or "out".
    probs : list of array, float or mask, shape (num_edges,)
        By edge type; null for equal ones.  A node whose edges all have 0 gets none.
    excluded : list of array
        Edge ids by edge type, which are left out of the sample, as DGL does it on the CPU and on
        GPUs: a seed then has fewer edges.  Empty for none.
    replace : bool

    Returns
    -------
    SubgraphIndex
        All nodes, and the sampled edges, one seed's after the other's.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError, InvalidWeightError
    """
    index, where = placed(graph, nodes)
    key = new_key()
    samples: list[_Sample | None] = []
    for etype, fanout in enumerate(as_tensor(fanouts).tolist()):
        seeds = _seeds_of(index, nodes, etype, edge_dir)
        if seeds is None or fanout == 0:
            samples.append(None)
            continue
        view = edges_view(index.relations[etype], _format(edge_dir), where)
        weights = _as_weights(probs[etype])
        etype_key = with_fields(key, etype=etype)
        edges = _sample(view, seeds, fanout, etype_key, replace, weights)
        if excluded and not is_null(excluded[etype]):
            edges = keep(edges, _staying(edges, excluded[etype]))
        samples.append(_Sample(seeds, edges))
    return _subgraph(index, samples, edge_dir, where)


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

    DGL's Python asks for it for graphs and nodes on the CPU alone.

    Parameters
    ----------
    mapping : list of array
        Scratch memory of DGL's, left as it is.

    Returns
    -------
    TensorIndex, list of Tensor, list of Tensor
        The block, its source nodes by type and the ids of its edges.
    """
    from dgl_mgpu.backend.blocks import to_block

    frontier = sample_neighbors(graph, nodes, fanouts, edge_dir, probs, excluded, replace)
    idtype, where = frontier.graph.idtype, frontier.graph.device
    targets = [
        torch.empty(0, dtype=idtype, device=where) if is_null(each) else as_tensor(each)
        for each in nodes
    ]
    block, sources, kept = to_block(frontier.graph, targets, True, [])
    eids = [ids[places.long()] for ids, places in zip(frontier.induced_edges, kept, strict=True)]
    return block, sources, eids


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

    Parameters
    ----------
    etype_offset : list of int
        First edge id of each type; may end with the number of edges.
    fanouts : array, int64
        By type.
    probs : list of array
        By type, each as long as the type has edges; or one null.
    etype_sorted : bool
        Whether a node's edges are stored by type, which makes no difference here.

    Returns
    -------
    SubgraphIndex
        A seed's edges are in the order of their types.
    """
    index, where = placed(graph, [nodes])
    key = new_key()
    (relation,) = index.relations
    seeds = as_tensor(nodes)
    if is_null(seeds):
        return _subgraph(index, [None], edge_dir, where)
    by_type = as_tensor(fanouts).tolist()
    offsets = torch.tensor([int(each) for each in etype_offset], dtype=torch.int64)
    edges = all_edges(edges_view(relation, _format(edge_dir), where), seeds)
    types = torch.searchsorted(offsets.to(where), edges.eids.long(), right=True) - 1
    # A row for each seed and type.
    rows = edge_rows(edges) * len(by_type) + types
    rows, order = torch.sort(rows, stable=True)
    edges = SampledNeighbors(
        _bounds(rows, len(seeds) * len(by_type)), edges.neighbors[order], edges.eids[order]
    )
    weights = None
    if not all(map(is_null, probs)):
        joined = _joined(probs, offsets, relation.num_edges)
        weights = values_at(_as_weights(joined), edges.eids)
    edges = _pick_by_type(edges, by_type, key, replace, weights)
    edges = edges._replace(indptr=edges.indptr[:: len(by_type)])
    return _subgraph(index, [_Sample(seeds, edges)], edge_dir, where)


def _joined(probs: Sequence[Any], offsets: torch.Tensor, num_edges: int) -> torch.Tensor:
    """Probabilities by edge id, of those of each type."""
    sizes = torch.cat([offsets[: len(probs)], torch.tensor([num_edges])]).diff().tolist()
    given = [as_tensor(each) for each in probs]
    there = next(each for each in given if not is_null(each))
    return torch.cat(
        [
            there.new_ones(size) if is_null(each) else each.reshape(-1)
            for each, size in zip(given, sizes, strict=True)
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
    num_rows, where = len(edges.indptr) - 1, edges.eids.device
    of_type = edge_rows(edges) % len(fanouts)
    picked = []
    for fanout in sorted(set(fanouts)):
        has_it = torch.tensor([each == fanout for each in fanouts], device=where)
        here = has_it[of_type].nonzero()[:, 0]
        there = None if weights is None else weights[here]
        picked.append(_pick(keep(edges, here), fanout, key, replace, there))
    rows, order = torch.cat([edge_rows(each) for each in picked]).sort(stable=True)
    return SampledNeighbors(
        _bounds(rows, num_rows),
        torch.cat([each.neighbors for each in picked])[order],
        torch.cat([each.eids for each in picked])[order],
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

    Parameters
    ----------
    bias : array, float, shape (tags,)
        Probability of an edge by its tag, of any sum.
    tag_offset : array, int, shape (num_nodes, tags + 1)
        Where among a node's edges, which are sorted by tag, those of each tag begin.
    """
    index, where = placed(graph, [nodes])
    key = new_key()
    seeds = as_tensor(nodes)
    if is_null(seeds) or fanout == 0:
        return _subgraph(index, [None], edge_dir, where)
    edges = all_edges(edges_view(index.relations[0], _format(edge_dir), where), seeds)
    bias = as_tensor(bias).to(where, torch.float64)
    counts = values_at(as_tensor(tag_offset), seeds).long().diff(dim=1)
    tags = torch.arange(len(bias), device=where).repeat(len(seeds))
    if counts.shape[1] != len(bias) or int(counts.sum()) != len(edges.eids):
        raise InvalidInputError(
            f"{_ASKED} by {len(bias)} tags",
            f"offsets of {counts.shape[1]} tags for {int(counts.sum())} of {len(edges.eids)} edges",
            "sort the graph with dgl.sort_csc_by_tag, or dgl.sort_csr_by_tag for edge_dir='out'",
        )
    tags = tags.repeat_interleave(counts.flatten(), output_size=len(edges.eids))
    edges = _pick(edges, fanout, key, replace, bias[tags])
    return _subgraph(index, [_Sample(seeds, edges)], edge_dir, where)


def sample_neighbors_topk(
    graph: HeteroGraphIndex,
    nodes: Sequence[Any],
    counts: Any,
    edge_dir: str,
    weights: Sequence[Any],
    ascending: bool,
) -> SubgraphIndex:
    """Select the edges of the largest, or smallest, weights: ``_CAPI_DGLSampleNeighborsTopk``.

    Parameters
    ----------
    counts : array, int64
        Edges of each node, by edge type; -1 for all.
    weights : list of array, shape (num_edges,)
        By edge type.

    Returns
    -------
    SubgraphIndex
        A seed's edges are in the order of their weights, equal ones as they are stored.
    """
    index, where = placed(graph, nodes)
    samples: list[_Sample | None] = []
    for etype, count in enumerate(as_tensor(counts).tolist()):
        seeds = _seeds_of(index, nodes, etype, edge_dir)
        if seeds is None or count == 0:
            samples.append(None)
            continue
        edges = all_edges(edges_view(index.relations[etype], _format(edge_dir), where), seeds)
        values = values_at(as_tensor(weights[etype]).reshape(-1), edges.eids)
        order = values.argsort(stable=True, descending=not ascending)
        rows, by_row = edge_rows(edges)[order].sort(stable=True)
        order = order[by_row]
        edges = SampledNeighbors(edges.indptr, edges.neighbors[order], edges.eids[order])
        if count > 0:
            rank = torch.arange(len(rows), device=where) - edges.indptr[rows]
            edges = keep(edges, (rank < count).nonzero()[:, 0])
        samples.append(_Sample(seeds, edges))
    return _subgraph(index, samples, edge_dir, where)


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
    """Layer-neighbour sampling: ``_CAPI_DGLSampleLabors``; see `dgl_mgpu.backend.labor`.

    Parameters
    ----------
    nodes, fanouts, edge_dir, probs, excluded
        As in :func:`sample_neighbors`; fanouts are expectations.
    importance_sampling : int
        Optimisation steps; negative until convergence.
    random_seed : array, int64, shape (1,) or (2,)
        Equal seeds give a node equal variates in every call.
    seed2_contribution : float
        How far variates have moved from the first seed's to the second's.
    node_ids : list of array
        By node type, ids by which variates are drawn; null for the nodes' own.

    Returns
    -------
    list
        The subgraph, then for each edge type weights of the sampled edges, or an empty tensor where
        all are equal.
    """
    index, where = placed(graph, nodes)
    variates = Variates(as_tensor(random_seed).tolist(), seed2_contribution)
    samples: list[_Sample | None] = []
    importances = []
    for etype, fanout in enumerate(as_tensor(fanouts).tolist()):
        seeds = _seeds_of(index, nodes, etype, edge_dir)
        importances.append(torch.empty(0, dtype=torch.float32, device=where))
        if seeds is None or fanout == 0:
            samples.append(None)
            continue
        edges = all_edges(edges_view(index.relations[etype], _format(edge_dir), where), seeds)
        weights = None if is_null(probs[etype]) else as_tensor(probs[etype]).reshape(-1)
        if fanout < 0 and weights is not None:
            edges = keep(edges, values_at(weights, edges.eids).nonzero()[:, 0])
        elif fanout > 0:
            source, target = index.schema.ends[etype]
            names = node_ids[source if edge_dir == "in" else target]
            named = edges.neighbors if is_null(names) else values_at(names, edges.neighbors)
            picked = pick_labor(
                edges.indptr,
                edges.neighbors,
                fanout,
                variates.of(named),
                None if weights is None else values_at(weights, edges.eids),
                importance_sampling,
            )
            edges = keep(edges, picked.places)
            if picked.importances is not None:
                importances[-1] = picked.importances
        if excluded and not is_null(excluded[etype]):
            stays = _staying(edges, excluded[etype])
            if len(importances[-1]):
                importances[-1] = importances[-1][stays]
            edges = keep(edges, stays)
        samples.append(_Sample(seeds, edges))
    return [_subgraph(index, samples, edge_dir, where), *importances]


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

    Parameters
    ----------
    count : int
        Pairs to draw at most.
    trials : int
    redundancy : float
        DGL draws ``count * (1 + redundancy)`` candidates, ``trials`` times where they are edges.
        Here each pair has candidates of its own, and may need more than the average pair.

    Returns
    -------
    sources, destinations : Tensor, shape (n,)
    """
    index, where = placed(graph, [])
    sources, destinations = negative_edges(
        edges_view(index.relations[etype], "csc", where),
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

    Parameters
    ----------
    sources : array, int32 or int64, shape (n * each,)
        Nodes visited from each of n seeds; -1 for none.
    targets : array, same shape
        The seeds.
    each : int
        Visits of a seed.
    count : int
        Nodes to select at most.

    Returns
    -------
    sources, targets, counts : Tensor, shape (m,)
        A seed's most visited nodes first, of equally visited ones that of the higher id, as in DGL.
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
    return (
        visited[row, order[row, rank]],
        seeds[row],
        counts[row, rank].to(visited.dtype),
    )


# -- edges of seeds -------------------------------------------------------------------------------


def _format(edge_dir: str) -> str:
    formats = {"in": "csc", "out": "csr"}
    if edge_dir not in formats:
        raise InvalidInputError(_ASKED, f"edge_dir={edge_dir!r}", "pass 'in' or 'out'")
    return formats[edge_dir]


def _seeds_of(
    index: TensorIndex, nodes: Sequence[Any], etype: int, edge_dir: str
) -> torch.Tensor | None:
    """The seeds at whose edges of a type is looked; None for none."""
    source, target = index.schema.ends[etype]
    seeds = nodes[target if edge_dir == "in" else source]
    return None if is_null(seeds) else as_tensor(seeds)


def _as_weights(prob: Any) -> torch.Tensor | None:
    """Probabilities in a dtype that operators know; None for equal ones."""
    if is_null(prob):
        return None
    weights = as_tensor(prob).reshape(-1)
    if weights.dtype in _WEIGHTS:
        return weights
    return weights.view(torch.uint8) if weights.dtype == torch.int8 else weights.float()


def values_at(values: Any, ids: torch.Tensor) -> Any:
    """Rows of a tensor on the device of ``ids``, or pinned; None of None."""
    if values is None:
        return None
    values = as_tensor(values)
    if values.device == ids.device:
        return values[ids.long()]
    return gather_pinned_tensor_rows(values, ids)


def _sample(
    view: GraphView,
    seeds: torch.Tensor,
    fanout: int,
    key: SampleKey,
    replace: bool,
    weights: torch.Tensor | None,
) -> SampledNeighbors:
    if weights is None:
        return sample_edges(view, seeds, fanout, key, replace=replace)
    rows = scalars_view(weights, seeds.device)
    try:
        return sample_edges(view, seeds, fanout, key, replace=replace, weights=rows)
    except InvalidWeightError:
        # The operator refuses a seed whose edges all have weight 0; DGL samples nothing there.
        edges = all_edges(view, seeds)
        positive = values_at(weights, edges.eids).nonzero()[:, 0]
        has_any = keep(edges, positive).indptr.diff() > 0
        if bool((has_any | (edges.indptr.diff() == 0)).all()):
            raise
    sample = sample_edges(view, seeds[has_any], fanout, key, replace=replace, weights=rows)
    counts = torch.zeros_like(seeds, dtype=torch.int64)
    counts[has_any] = sample.indptr.diff()
    return sample._replace(indptr=_sums_before(counts))


def all_edges(view: GraphView, seeds: torch.Tensor) -> SampledNeighbors:
    """All edges of seeds, in the order in which they are stored."""
    return sample_edges(view, seeds, -1, SampleKey(0))


def edge_rows(edges: SampledNeighbors) -> torch.Tensor:
    """For each edge the place of its seed among the seeds, int64."""
    places = torch.arange(len(edges.indptr) - 1, device=edges.eids.device)
    return places.repeat_interleave(edges.indptr.diff(), output_size=len(edges.eids))


def keep(edges: SampledNeighbors, places: torch.Tensor) -> SampledNeighbors:
    """The edges at some places, int64 and ascending."""
    return SampledNeighbors(
        torch.searchsorted(places, edges.indptr), edges.neighbors[places], edges.eids[places]
    )


def _staying(edges: SampledNeighbors, excluded: Any) -> torch.Tensor:
    """Places of the edges that are not excluded."""
    left_out = IdFilter(as_tensor(excluded).to(edges.eids.device)).holds(edges.eids)
    return left_out.logical_not_().nonzero()[:, 0]


def _sums_before(counts: torch.Tensor) -> torch.Tensor:
    """Sums of all that come before each place, and of all; int64."""
    return torch.nn.functional.pad(counts.long().cumsum(0), (1, 0))


def _bounds(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Where in sorted ``rows`` each row begins, and the last ends; int64."""
    return torch.searchsorted(rows, torch.arange(num_rows + 1, device=rows.device))


def _pick(
    edges: SampledNeighbors,
    fanout: int,
    key: SampleKey,
    replace: bool,
    weights: torch.Tensor | None,
) -> SampledNeighbors:
    """Sample from given edges of seeds, with weights by their places in them."""
    if weights is not None:
        positive = weights.nonzero()[:, 0]
        edges, weights = keep(edges, positive), weights[positive]
    if fanout < 0:
        return edges
    count, where = len(edges.indptr) - 1, edges.eids.device
    # Without edge ids, they are places.
    matrix = Compressed(edges.indptr, edges.neighbors, None)
    picked = _sample(
        compressed_view(matrix, count, count, where),
        torch.arange(count, device=where),
        fanout,
        key,
        replace,
        weights,
    )
    return picked._replace(eids=edges.eids[picked.eids.long()])


def _subgraph(
    index: TensorIndex, samples: Sequence[_Sample | None], edge_dir: str, where: torch.device
) -> SubgraphIndex:
    """All nodes of a graph, and the sampled edges of each type."""
    relations, induced = [], []
    for relation, sample in zip(index.relations, samples, strict=True):
        if sample is None:
            near = far = eids = torch.empty(0, dtype=index.idtype, device=where)
        else:
            (indptr, far, eids) = sample.edges
            near = sample.seeds.to(far.dtype).repeat_interleave(indptr.diff(), output_size=len(far))
        coo = Coo(far, near) if edge_dir == "in" else Coo(near, far)
        relations.append(Relation(relation.num_src, relation.num_dst, coo=coo))
        induced.append(eids)
    num_nodes = [index.num_nodes(ntype) for ntype in range(index.schema.num_ntypes)]
    return SubgraphIndex(TensorIndex(index.schema, num_nodes, relations), [], induced)

"""Samples of a mini-batch that leave edges out: those that a model is to predict.

As in DGL, edges are sampled first and left out then: a node may have fewer than its fanout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as with_fields

import torch

from dgl_mgpu.ops import (
    BlockEdges,
    EtypeBlock,
    GraphView,
    RowView,
    SampledNeighbors,
    SampleKey,
    append_unique,
    sample_neighbors,
)
from dgl_mgpu.sampling.filter import IdFilter
from dgl_mgpu.sampling.seed_edges import keep
from dgl_mgpu.store.table_names import CanonicalEtype


def without(edges: SampledNeighbors, left_out: IdFilter | None) -> SampledNeighbors:
    """The edges that are not left out."""
    if left_out is None:
        return edges
    return keep(edges, left_out.holds(edges.eids).logical_not_().nonzero()[:, 0])


def sample_hops_without(
    left_out: Mapping[CanonicalEtype, IdFilter],
    views: Mapping[CanonicalEtype, GraphView],
    seeds: Mapping[str, torch.Tensor],
    fanouts: Sequence[Mapping[CanonicalEtype, int]],
    key: SampleKey,
    *,
    replace: bool,
    weights: Mapping[CanonicalEtype, RowView],
) -> list[EtypeBlock]:
    """Sample the message-flow graphs of a mini-batch, hop by hop, without some edges.

    Parameters
    ----------
    left_out : dict of IdFilter
        Edge ids by edge type.
    views, seeds, fanouts, key, replace, weights
        As in :func:`dgl_mgpu.ops.sample_etype_blocks`, of which this is the result where no edge
        is left out.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError, InvalidWeightError
    """
    some = next(iter(views.values()))
    none = torch.empty(0, dtype=some.idtype, device=some.tiers.device)
    ends = dict.fromkeys(ntype for source, _, target in views for ntype in (source, target))
    nodes = {ntype: seeds.get(ntype, none) for ntype in ends}
    blocks = []
    for hop, fanout in enumerate(reversed(fanouts), start=key.hop):
        sampled = {}
        for number, (etype, view) in enumerate(views.items()):
            edges = sample_neighbors(
                view,
                nodes[etype[2]],
                fanout[etype],
                with_fields(key, hop=hop, etype=number),
                replace=replace,
                weights=weights.get(etype),
            )
            sampled[etype] = without(edges, left_out.get(etype))
        sources: dict[str, torch.Tensor] = {}
        places: dict[CanonicalEtype, torch.Tensor] = {}
        for ntype, ids in nodes.items():
            etypes = [etype for etype in views if etype[0] == ntype]
            neighbors = [sampled[etype].neighbors for etype in etypes]
            sources[ntype], local = append_unique(ids, torch.cat([none, *neighbors]))
            places.update(zip(etypes, local.split([len(each) for each in neighbors]), strict=True))
        edges_of = {
            etype: BlockEdges(edges.indptr, places[etype], edges.eids)
            for etype, edges in sampled.items()
        }
        blocks.append(
            EtypeBlock(edges_of, sources, {ntype: len(ids) for ntype, ids in nodes.items()})
        )
        nodes = sources
    return blocks[::-1]

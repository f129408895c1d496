"""Which edge types of a store's graph are others the other way round.

A store has the in-edges of each node, and a walk follows out-edges: those of an edge type are the
in-edges of the type that has the same edges from destination to source, as the two types of a
recommender's graph.  Whether a type does is told by sums over all of its edges, of a hash of each:
they do not depend on the order of edges, and those of other edges are equal once in 2**64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.sampling.seed_edges import all_edges, edge_rows

#: Edges that are read at a time, on average.
_TOGETHER = 1 << 20
#: An odd number of 64 bits, as int64, whose product's high half depends on all of the other.
_FACTOR = 0xD6E8FEB86659FD93 - (1 << 64)
_LOW = (1 << 32) - 1


class Fingerprint(NamedTuple):
    """Sums over edges, modulo 2**64.

    Attributes
    ----------
    ends : int
        Of hashes of source and destination.
    ends_and_ids : int
        Of hashes of source, destination and edge id.
    """

    ends: int
    ends_and_ids: int


def fingerprints(view: GraphView) -> tuple[Fingerprint, Fingerprint]:
    """Fingerprints of an edge type, and of its edges the other way round; all edges are read."""
    where = view.tiers.device
    sums = torch.zeros(4, dtype=torch.int64, device=where)
    rows = max(1, _TOGETHER * view.num_rows // max(1, view.num_edges))
    for begin in range(0, view.num_rows, rows):
        targets = torch.arange(begin, min(begin + rows, view.num_rows), device=where)
        edges = all_edges(view, targets)
        sources, eids = edges.neighbors.long(), edges.eids.long()
        destinations = edge_rows(edges) + begin
        hashes = _hash(_hash(sources) + destinations), _hash(_hash(destinations) + sources)
        for place, ends in enumerate(hashes):
            sums[2 * place] += ends.sum()
            sums[2 * place + 1] += _hash(ends + eids).sum()
    forward, backward = sums.view(2, 2).tolist()
    return Fingerprint(*forward), Fingerprint(*backward)


def _hash(numbers: torch.Tensor) -> torch.Tensor:
    """A permutation of int64 without a pattern."""
    for _ in range(2):
        numbers = (numbers ^ (numbers >> 32 & _LOW)) * _FACTOR
    return numbers ^ (numbers >> 32 & _LOW)

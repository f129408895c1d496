"""Which edge types of a store's graph are others reversed.

A store has the in-edges of each node, and a walk follows out-edges.  The out-edges of an edge type
are the in-edges of the type that has the same edges from destination to source, as the two edge
types of a recommender's graph do.  Two types are compared by sums over all of their edges, of a
hash of each edge.  The sums do not depend on the order of edges; those of different edges are equal
with a probability of 2**-64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dgl_mgpu.errors import UnsupportedByStoreError
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.sampling.seed_edges import all_edges, edge_rows
from dgl_mgpu.store.graph_structure import GraphStructure
from dgl_mgpu.utils.types import CanonicalEtype

#: Edges that are read at a time, on average.
_EDGES_PER_READ = 1 << 20
#: An odd factor of 64 bits, as int64: the high half of a product depends on all bits of the other.
_FACTOR = 0xD6E8FEB86659FD93 - (1 << 64)
_LOW = (1 << 32) - 1


class Fingerprint(NamedTuple):
    """Sums over edges, modulo 2**64.

    ``ends``: of hashes of source and destination.  ``ends_and_ids``: of hashes of source,
    destination and edge id.
    """

    ends: int
    ends_and_ids: int


class _Reversal(NamedTuple):
    """The edges of a type by source: the in-edges of another type.

    ``has_same_ids`` says whether each edge has the same id there.
    """

    view: GraphView
    has_same_ids: bool


class ReversedEdges:
    """Finds the out-edges of a store's graph among its in-edges."""

    def __init__(self, structure: GraphStructure) -> None:
        self._structure = structure
        #: Of the edge types that were compared, and of their edges reversed.
        self._fingerprints: dict[CanonicalEtype, tuple[Fingerprint, Fingerprint]] = {}

    def of(self, etype: CanonicalEtype, needs_ids: bool = False) -> GraphView:
        """The edges of a type by source.

        Raises UnsupportedByStoreError if no edge type has the edges of ``etype`` reversed; with
        ``needs_ids``, if none has them under the same ids.
        """
        reversal = self._find(etype)
        if reversal is None:
            source, name, target = etype
            raise UnsupportedByStoreError(
                f"walk along edges of type {etype}",
                "the store has in-edges only, and no edge type has these the other way round",
                f"build it from a graph with the reversed edges, too, as ({target!r}, "
                f"'reverse-{name}', {source!r})",
            )
        if needs_ids and not reversal.has_same_ids:
            raise UnsupportedByStoreError(
                f"know the ids of edges of type {etype} on a walk",
                "the edge type that has them the other way round has them under other ids",
                "build the store from a graph whose edge i of one type is edge i of the other",
            )
        return reversal.view

    def _find(self, etype: CanonicalEtype) -> _Reversal | None:
        """The edge type that has the edges of ``etype`` reversed, best with the same ids."""
        num_edges = self._structure.view(etype).num_edges  # raises if the store was closed
        reversal = None
        for other, view in self._structure.views().items():
            if (etype[2], etype[0]) != (other[0], other[2]) or view.num_edges != num_edges:
                continue
            forward, _ = self._fingerprints_of(etype)
            _, backward = self._fingerprints_of(other)
            if forward == backward:
                return _Reversal(view, True)
            if forward.ends == backward.ends and reversal is None:
                reversal = _Reversal(view, False)
        return reversal

    def _fingerprints_of(self, etype: CanonicalEtype) -> tuple[Fingerprint, Fingerprint]:
        if etype not in self._fingerprints:
            self._fingerprints[etype] = fingerprints(self._structure.view(etype))
        return self._fingerprints[etype]


def fingerprints(view: GraphView) -> tuple[Fingerprint, Fingerprint]:
    """Fingerprints of an edge type, and of its edges reversed; reads all edges."""
    device = view.tiers.device
    sums = torch.zeros(4, dtype=torch.int64, device=device)
    rows = max(1, _EDGES_PER_READ * view.num_rows // max(1, view.num_edges))
    for begin in range(0, view.num_rows, rows):
        targets = torch.arange(begin, min(begin + rows, view.num_rows), device=device)
        edges = all_edges(view, targets)
        sources, eids = edges.neighbors.long(), edges.eids.long()
        destinations = edge_rows(edges) + begin
        hashes = _hash(_hash(sources) + destinations), _hash(_hash(destinations) + sources)
        for direction, ends in enumerate(hashes):
            sums[2 * direction] += ends.sum()
            sums[2 * direction + 1] += _hash(ends + eids).sum()
    forward, backward = sums.view(2, 2).tolist()
    return Fingerprint(*forward), Fingerprint(*backward)


def _hash(numbers: torch.Tensor) -> torch.Tensor:
    """A pseudo-random permutation of int64."""
    for _ in range(2):
        numbers = (numbers ^ (numbers >> 32 & _LOW)) * _FACTOR
    return numbers ^ (numbers >> 32 & _LOW)

"""Edges of a store's graph by their ids, which edge and link prediction start from.

A store keeps the in-edges of each node, one segment of memory after the other.  It finds the ends
of an edge by its id in one of two ways:

- If edges are numbered in the order in which they are stored, the destination is the last node
  whose first edge has an id that is not greater, and the source is read from the edge's location.
- Otherwise it reads a table of ends, which it has if it was built with ``edges=True``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as with_fields
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from dgl.base import ALL, is_all

from dgl_mgpu.errors import InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.ops import gather_rows
from dgl_mgpu.ops.view import FIRST, INDICES, INDPTR, PARTS, START, STOP, GraphView, RowView
from dgl_mgpu.sampling.seed_edges import all_edges, edge_rows
from dgl_mgpu.store.graph_structure import GraphStructure, ends_table
from dgl_mgpu.store.memory import Store, TopologySource
from dgl_mgpu.store.memory.format import EdgeIds, numpy_dtype
from dgl_mgpu.utils.types import CanonicalEtype

Edges = torch.Tensor | Mapping[Any, torch.Tensor]

#: Nodes whose first edges are searched together; 8 bytes of each run of them stay in memory.
_RUN = 16
#: Edges that are read at a time, on average.
_EDGES_PER_READ = 1 << 20


def ends_of(topology: TopologySource) -> np.ndarray:
    """Source and destination of each edge by its id, in the dtype of ids, shape (num_edges, 2)."""
    dtype = numpy_dtype(topology.idtype)
    ends = np.empty((topology.num_edges, 2), dtype)
    targets = np.repeat(np.arange(topology.num_rows, dtype=dtype), np.diff(topology.indptr))
    eids = slice(None) if topology.eids is None else topology.eids
    ends[eids, 0], ends[eids, 1] = topology.indices, targets
    return ends


class Ends(NamedTuple):
    """Ends of edges, both in the graph's idtype, shape (n,)."""

    sources: torch.Tensor
    destinations: torch.Tensor


class EdgeQueries:
    """Answers queries of edges as a DGLGraph does: by their ids, by their ends, by destination."""

    def __init__(self, store: Store, structure: GraphStructure) -> None:
        self._store, self._structure = store, structure
        #: Of the edge types of which edges were looked up.
        self._locations: dict[CanonicalEtype, _EdgeLocations] = {}

    def find_edges(
        self, eid: torch.Tensor | int, etype: str | CanonicalEtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ends of edges.

        Parameters
        ----------
        eid : Tensor or int
            Edge ids in the graph's idtype, shape (n,).
        etype : str or (str, str, str), optional

        Returns
        -------
        sources, destinations : Tensor, the graph's idtype, shape (n,)
            On the store's device.

        Raises
        ------
        InvalidInputError
        IdOutOfRangeError
            Of ids on a GPU by a later call, as :func:`dgl_mgpu.ops.gather_rows` says.
        UnsupportedByStoreError
            If edges have ids of their own, or are on several machines, and the store was built
            without ``edges=True``.
        """
        full = self._structure.to_canonical_etype(etype)
        eids = self._structure.checked_ids(
            eid, self._structure.num_edges(full), f"find edges of type {full}", "edge"
        )
        table = self._store.tables.get(ends_table(full))
        if table is not None:
            assert isinstance(table.view, RowView)
            ends = gather_rows(table.view, eids)
            return Ends(ends[:, 0].contiguous(), ends[:, 1].contiguous())
        if self._structure.others is not None:
            raise UnsupportedByStoreError(
                f"find edges of type {full} by their ids",
                "each machine of the job has a part of them, and the store has no table of ends",
                "build it with edges=True, for which each machine takes two ids for every edge",
            )
        view, edge_ids = self._structure.view(full), self._structure.edge_id_format(full)
        if edge_ids is EdgeIds.STORED:
            raise UnsupportedByStoreError(
                f"find edges of type {full} by their ids",
                "edge ids are not in the CSC's order, and the store has no table of ends",
                "build it with edges=True, for which an edge takes two ids more",
            )
        if not len(eids):
            return Ends(eids, eids)
        locations = self._locations.get(full)
        if locations is None:
            locations = self._locations[full] = _locate_edges(view, edge_ids)
        return _ends_by_location(view, edge_ids, locations, eids)

    def in_degrees(
        self, v: torch.Tensor | int = ALL, etype: str | CanonicalEtype | None = None
    ) -> torch.Tensor | int:
        """How many in-edges nodes have; over machines asked by all ranks together.

        Parameters
        ----------
        v : Tensor or int, optional
            Node ids in the graph's idtype, shape (n,); all of the edge type's destinations by
            default.
        etype : str or (str, str, str), optional

        Returns
        -------
        Tensor, the graph's idtype, shape (n,), or int
            On the store's device.

        Raises
        ------
        InvalidInputError
        IdOutOfRangeError
            Of ids on a GPU by a later call, as :func:`dgl_mgpu.ops.gather_rows` says.
        """
        structure = self._structure
        with structure.told("count in-edges"):
            full = structure.to_canonical_etype(etype)
            num_rows, action = structure.num_nodes(full[2]), f"count in-edges of type {full}"
            if is_all(v):
                ids = torch.arange(num_rows, device=structure.device)
            else:
                ids = structure.checked_ids(v, num_rows, action, "node")
            own = None if structure.others is None else self._own_degrees(full)
        if structure.others is None or own is None:
            degrees = self._kept_degrees(full, ids)
        else:
            degrees = structure.others.gather_owned(f"in-degrees of {full}", full[2], own, ids)
        return int(degrees[0]) if isinstance(v, Integral) else degrees

    def _kept_degrees(self, etype: CanonicalEtype, ids: torch.Tensor) -> torch.Tensor:
        """In-degrees of nodes whose in-edges are on this machine, in the graph's idtype."""
        view, idtype = self._structure.views()[etype], self._structure.idtype
        if not len(ids):
            return ids.to(idtype)
        bounds = _bounds(view, self._structure.edge_id_format(etype))
        next_bounds = with_fields(bounds, pointers=bounds.pointers + bounds.row_bytes)
        ends, begins = (
            gather_rows(rows, ids).view(len(ids), -1)[:, 0] for rows in (next_bounds, bounds)
        )
        return (ends - begins).to(idtype)

    def _own_degrees(self, etype: CanonicalEtype) -> torch.Tensor:
        """In-degrees of the nodes that this machine owns, in the graph's idtype."""
        own = self._structure.own_nodes(etype[2])
        ids = torch.arange(own.start, own.stop, device=self._structure.device)
        return self._kept_degrees(etype, ids)

    def count_degrees(self, way: str, etype: CanonicalEtype) -> torch.Tensor:
        """Degrees of all nodes, 'out' of sources or 'in' of destinations, also over machines.

        Collective where other machines have some of the edges: each one counts those of the nodes
        that it owns.

        Parameters
        ----------
        way : 'out' or 'in'
        etype : (str, str, str)
            The canonical edge type.

        Returns
        -------
        Tensor, the graph's idtype, shape (num_nodes,)
            Of the sources' type for 'out', of the destinations' for 'in'; on the store's device.

        Raises
        ------
        StoreClosedError
            If the store was closed.
        RankFailedError
            If another rank failed.
        """
        structure, what = self._structure, f"count {way}-degrees of {etype}"
        with structure.told(what):
            counts = self._counted_here(way, etype)
        if structure.others is None:
            return counts
        return structure.others.sum_over_machines(what, counts)

    def _counted_here(self, way: str, etype: CanonicalEtype) -> torch.Tensor:
        """Degrees of all nodes, of the in-edges of those that this machine owns."""
        structure = self._structure
        view, own = structure.views()[etype], structure.own_nodes(etype[2])
        size = view.num_cols if way == "out" else view.num_rows
        counts = torch.zeros(size, dtype=structure.idtype, device=structure.device)
        if way == "in":
            counts[own.start : own.stop] = self._own_degrees(etype)
            return counts
        step = max(1, _EDGES_PER_READ * view.num_rows // max(1, view.num_edges))
        for low in range(own.start, own.stop, step):
            ids = torch.arange(low, min(low + step, own.stop), device=structure.device)
            sources = all_edges(view, ids).neighbors
            counts += torch.bincount(sources, minlength=size).to(counts.dtype)
        return counts

    def has_edges_between(
        self,
        u: torch.Tensor | int,
        v: torch.Tensor | int,
        etype: str | CanonicalEtype | None = None,
    ) -> torch.Tensor | bool:
        """Whether there are edges from nodes to others.

        All in-edges of the destinations are read.

        Parameters
        ----------
        u, v : Tensor or int
            Sources and destinations, in the graph's idtype, shape (n,).
        etype : str or (str, str, str), optional

        Returns
        -------
        Tensor, bool, shape (n,), or bool

        Raises
        ------
        InvalidInputError, IdOutOfRangeError
        """
        full = self._structure.to_canonical_etype(etype)
        view, action = self._structure.view(full), f"look for edges of type {full}"
        sources = self._structure.checked_ids(u, view.num_cols, action, "source node", wait=True)
        targets = self._structure.checked_ids(
            v, view.num_rows, action, "destination node", wait=True
        )
        try:
            sources, targets = torch.broadcast_tensors(sources, targets)
        except RuntimeError as error:
            raise InvalidInputError(
                action,
                f"there are {len(sources)} sources but {len(targets)} destinations",
                "pass as many sources as destinations",
            ) from error
        rows, row = targets.unique(return_inverse=True)
        # A pair of nodes as one number.
        pairs, inverse = (row * view.num_cols + sources).unique(return_inverse=True)
        edges = all_edges(view, rows)
        edge_pairs = edge_rows(edges) * view.num_cols + edges.neighbors
        is_edge = torch.zeros(len(pairs), dtype=torch.bool, device=self._structure.device)
        if len(pairs) and len(edge_pairs):
            index = torch.searchsorted(pairs, edge_pairs).clamp_(max=len(pairs) - 1)
            is_edge[index[pairs[index] == edge_pairs]] = True
        is_edge = is_edge[inverse]
        return bool(is_edge) if isinstance(u, Integral) and isinstance(v, Integral) else is_edge


@dataclass(frozen=True)
class _EdgeLocations:
    """Where the edges of a type are, if they are numbered in the order of the store.

    ``firsts`` has the id of the first edge of every ``_RUN``-th row.  ``tiers``, shape
    (segments, 4), makes all edges a table of scalars, each segment a tier.  Both are int64.
    ``num_kept`` are the edges in all segments, which may have some more than once.
    """

    firsts: torch.Tensor
    tiers: torch.Tensor
    num_kept: int


def _locate_edges(view: GraphView, edge_ids: EdgeIds) -> _EdgeLocations:
    device = view.tiers.device
    begins = torch.arange(0, view.num_rows, _RUN, device=device)
    firsts = gather_rows(_bounds(view, edge_ids), begins).view(len(begins), -1)[:, -1].contiguous()
    counts = [view.num_edges]
    if edge_ids is EdgeIds.FIRST:
        # A segment's edges end where the row behind its last one would begin.
        tiers_of_rows = view.tiers.tolist()
        last = [
            rows[-1] if len(rows := range(start + part, stop, parts)) else -1
            for start, stop, parts, _ in tiers_of_rows
            for part in range(parts)
        ]
        bounds = _bounds(view, edge_ids)
        behind = with_fields(
            bounds,
            pointers=bounds.pointers + bounds.row_bytes,
            num_rows=tiers_of_rows[-1][STOP],  # ids are positions
            position=view.position[:0],
        )
        ends = gather_rows(behind, torch.tensor(last, device=device).clamp_(min=0))[:, 0]
        counts = [end if row >= 0 else 0 for end, row in zip(ends.tolist(), last, strict=True)]
    stops = np.cumsum(counts)
    tiers = [
        [stop - count, stop, 1, segment]
        for segment, (count, stop) in enumerate(zip(counts, stops.tolist(), strict=True))
    ]
    locations = _EdgeLocations(
        firsts, torch.tensor(tiers, dtype=torch.int64).to(device), sum(counts)
    )
    if firsts.is_cuda:
        # Another stream may be the next to read them.
        torch.cuda.current_stream(device).synchronize()
    return locations


def _bounds(view: GraphView, edge_ids: EdgeIds) -> RowView:
    """The bounds of rows, as rows: each row's first edge's place in its segment and, where rows
    have it, that edge's id behind it."""
    shape = (2,) if edge_ids is EdgeIds.FIRST else ()
    pointers = view.pointers[:, INDPTR].contiguous()
    return RowView(
        view.tiers, pointers, view.num_rows, shape, torch.int64, view.position, view.owner,
        sms=view.sms,
    )  # fmt: skip


def _ends_by_location(
    view: GraphView, edge_ids: EdgeIds, locations: _EdgeLocations, eids: torch.Tensor
) -> Ends:
    device, idtype = eids.device, eids.dtype
    eids = eids.long()
    bounds = _bounds(view, edge_ids)
    # The run whose first row begins last, and in it the row that does.
    run = torch.searchsorted(locations.firsts, eids, right=True).sub_(1).clamp_(min=0)
    rows = (run * _RUN)[:, None] + torch.arange(_RUN, device=device)
    firsts = gather_rows(bounds, rows.clamp(max=view.num_rows - 1).flatten())
    has_begun = firsts.view(len(eids), _RUN, -1)[:, :, -1] <= eids[:, None]
    has_begun &= rows < view.num_rows
    targets = rows[:, 0] + has_begun.sum(1) - 1
    location = eids
    if edge_ids is EdgeIds.FIRST:
        offset, first = gather_rows(bounds, targets).T
        position = view.position[targets].long() if len(view.position) else targets
        stops = view.tiers[:-1, STOP].contiguous()
        tier = view.tiers[torch.searchsorted(stops, position, right=True)]
        segment = tier[:, FIRST] + (position - tier[:, START]) % tier[:, PARTS]
        location = locations.tiers[segment, START] + offset + eids - first
        # Behind the last row is another segment.
        location = torch.where(eids < view.num_edges, location, -1)
    indices = RowView(
        locations.tiers, view.pointers[:, INDICES].contiguous(), locations.num_kept, (), idtype,
        view.position[:0], view.owner, sms=view.sms,
    )  # fmt: skip
    return Ends(gather_rows(indices, location), targets.to(idtype))

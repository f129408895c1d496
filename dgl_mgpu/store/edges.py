"""Edges of a store's graph by their ids, which edge and link prediction start from.

The store has the in-edges of each node, one segment of memory after the other, and finds the edges
of a node.  To find the ends of an edge by its id it looks either

- at where edges are, if they are numbered as they lie: the destination is the node whose first
  edge's id is the last not above, and the source is read in its place; or else
- into a table of ends, which the store has if it was built with ``edges=True``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as with_fields
from numbers import Integral
from typing import Any, NamedTuple

import dgl
import numpy as np
import torch
from dgl.base import ALL, EID, is_all
from dgl.sampling.negative import _calc_redundancy

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.ops import SampleKey, gather_rows, negative_destinations, negative_edges
from dgl_mgpu.ops.view import FIRST, INDICES, INDPTR, PARTS, START, STOP, GraphView, RowView
from dgl_mgpu.sampling.seed_edges import all_edges, edge_rows
from dgl_mgpu.store.batch_keys import BatchKeys
from dgl_mgpu.store.lazy_rows import LateRows
from dgl_mgpu.store.memory import TopologySource
from dgl_mgpu.store.memory.format import CSCFormat, EdgeIds
from dgl_mgpu.store.table_names import CanonicalEtype, ends_table, topology_table

Edges = torch.Tensor | Mapping[Any, torch.Tensor]

#: A node's first edge is looked for among those of so many nodes: of each run of them, 8 bytes stay
#: in memory.
_RUN = 16
#: Candidates for a negative edge, for each that DGL would draw for the average one.
_TRIES = 12


def ends_of(topology: TopologySource) -> np.ndarray:
    """Source and destination of each edge by its id, in the dtype of ids, shape (num_edges, 2)."""
    dtype = np.int32 if topology.idtype == torch.int32 else np.int64
    ends = np.empty((topology.num_edges, 2), dtype)
    targets = np.repeat(np.arange(topology.num_rows, dtype=dtype), np.diff(topology.indptr))
    at = slice(None) if topology.eids is None else topology.eids
    ends[at, 0], ends[at, 1] = topology.indices, targets
    return ends


class Ends(NamedTuple):
    """Ends of edges.

    Attributes
    ----------
    sources, destinations : Tensor, the graph's idtype, shape (n,)
    """

    sources: torch.Tensor
    destinations: torch.Tensor


class EdgeQueries(LateRows):
    """What a store's graph answers about its edges, as a DGLGraph does."""

    device: torch.device
    _batch_keys: BatchKeys
    #: How the edges of a type lie, of those that were asked for.
    _places: dict[CanonicalEtype, _Places]

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
            If edges have ids of their own, and the store was built without ``edges=True``.
        """
        full = self.to_canonical_etype(etype)
        view = self.view(full)
        eids = self._checked(eid, view.num_edges, f"find edges of type {full}", "edge")
        table = self._store.tables.get(ends_table(full))
        if table is not None:
            assert isinstance(table.view, RowView)
            ends = gather_rows(table.view, eids)
            return Ends(ends[:, 0].contiguous(), ends[:, 1].contiguous())
        layout = self._edge_ids(full)
        if layout is EdgeIds.STORED:
            raise UnsupportedByStoreError(
                f"find edges of type {full} by their ids",
                "edge ids are not in the CSC's order, and the store has no table of ends",
                "build it with edges=True, for which an edge takes two ids more",
            )
        if not len(eids):
            return Ends(eids, eids)
        places = self._places.get(full)
        if places is None:
            places = self._places[full] = _look_at_places(view, layout)
        return _ends_by_place(view, layout, places, eids)

    def in_degrees(
        self, v: torch.Tensor | int = ALL, etype: str | CanonicalEtype | None = None
    ) -> torch.Tensor | int:
        """How many in-edges nodes have.

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
        full = self.to_canonical_etype(etype)
        view, asked = self.view(full), f"count in-edges of type {full}"
        if is_all(v):
            ids = torch.arange(view.num_rows, device=self.device)
        else:
            ids = self._checked(v, view.num_rows, asked, "node")
        if not len(ids):
            return ids.to(self.idtype)
        bounds = _bounds(view, self._edge_ids(full))
        behind = with_fields(bounds, pointers=bounds.pointers + bounds.row_bytes)
        ends, begins = (
            gather_rows(each, ids).view(len(ids), -1)[:, 0] for each in (behind, bounds)
        )
        degrees = (ends - begins).to(self.idtype)
        return int(degrees[0]) if isinstance(v, Integral) else degrees

    def edge_subgraph(
        self,
        edges: Edges,
        *,
        relabel_nodes: bool = True,
        store_ids: bool = True,
        output_device: torch.device | str | None = None,
    ) -> dgl.DGLGraph:
        """The graph of given edges, as ``dgl.edge_subgraph`` makes it.

        Global negative edges that are drawn next are those of these edges: they depend on them,
        the seed and the epoch, but not on who draws them.

        Parameters
        ----------
        edges : Tensor or dict of Tensor, the graph's idtype, shape (n,)
            Edge ids, by edge type in a heterogeneous graph.
        relabel_nodes : bool
            Whether nodes at none of the edges are left out.
        store_ids : bool
            Whether ids go into ``edata[dgl.EID]``, and of nodes with other ids now into
            ``ndata[dgl.NID]``.
        output_device : torch.device, optional

        Returns
        -------
        DGLGraph
            With the features of its nodes and edges, read from the store when they are looked at.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError, UnsupportedByStoreError
            As :meth:`find_edges`.
        """
        if not isinstance(edges, Mapping):
            edges = {self.to_canonical_etype(None): edges}
        given = {self.to_canonical_etype(etype): eids for etype, eids in edges.items()}
        none = torch.empty(0, dtype=self.idtype, device=self.device)
        induced, ends = {}, {}
        for etype in self.canonical_etypes:
            induced[etype], ends[etype] = none, Ends(none, none)
            if etype in given:
                asked = f"take edges of type {etype}"
                count = self.view(etype).num_edges
                induced[etype] = self._checked(given[etype], count, asked, "edge")
                ends[etype] = Ends(*self.find_edges(induced[etype], etype))
        self._batch_keys.begin_edges({":".join(etype): induced[etype] for etype in given})
        graph = dgl.heterograph(ends, self._num_nodes, idtype=self.idtype, device=self.device)
        for etype, eids in induced.items():
            graph.edges[etype].data[EID] = eids
        self._add_all_rows(graph)
        if relabel_nodes:
            everything = {
                etype: torch.arange(len(eids), dtype=self.idtype, device=self.device)
                for etype, eids in induced.items()
            }
            graph = dgl.edge_subgraph(graph, everything, store_ids=store_ids)
        for etype, eids in induced.items():
            if store_ids:
                graph.edges[etype].data[EID] = eids
            else:
                graph.edges[etype].data.pop(EID)
        return graph if output_device is None else graph.to(output_device)

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
        full = self.to_canonical_etype(etype)
        view, asked = self.view(full), f"look for edges of type {full}"
        sources = self._checked(u, view.num_cols, asked, "source node", wait=True)
        targets = self._checked(v, view.num_rows, asked, "destination node", wait=True)
        try:
            sources, targets = torch.broadcast_tensors(sources, targets)
        except RuntimeError as error:
            raise InvalidInputError(
                asked,
                f"there are {len(sources)} sources but {len(targets)} destinations",
                "pass as many sources as destinations",
            ) from error
        rows, row = targets.unique(return_inverse=True)
        wanted, which = (row * view.num_cols + sources).unique(return_inverse=True)
        edges = all_edges(view, rows)
        there = edge_rows(edges) * view.num_cols + edges.neighbors
        found = torch.zeros(len(wanted), dtype=torch.bool, device=self.device)
        if len(wanted) and len(there):
            at = torch.searchsorted(wanted, there).clamp_(max=len(wanted) - 1)
            found[at[wanted[at] == there]] = True
        found = found[which]
        return bool(found) if isinstance(u, Integral) and isinstance(v, Integral) else found

    def global_uniform_negative_sampling(
        self,
        num_samples: int,
        exclude_self_loops: bool = True,
        replace: bool = False,
        etype: str | CanonicalEtype | None = None,
        redundancy: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw pairs of nodes that are no edges, each such pair with the same probability.

        Parameters
        ----------
        num_samples : int
            Pairs to draw at most.
        exclude_self_loops : bool
            Whether to draw no pairs of a node and itself.
        replace : bool
            Whether a pair may be drawn more than once.
        etype : str or (str, str, str), optional
            The first one by default.
        redundancy : float, optional
            Accepted for DGL's sake, which finds it from the graph's density as well.

        Returns
        -------
        sources, destinations : Tensor, the graph's idtype, shape (n,)

        Raises
        ------
        InvalidInputError
        """
        number = 0 if etype is None else self.canonical_etypes.index(self.to_canonical_etype(etype))
        source, _, target = full = self.canonical_etypes[number]
        view = self.view(full)
        pairs = view.num_rows * view.num_cols
        if num_samples < 1 or view.num_edges >= pairs:
            # With repeated edges some pairs may still be none: those are too few to be drawn.
            redundancy = 0.0
        else:
            redundancy = _calc_redundancy(num_samples, view.num_edges, pairs)
        drawn = negative_edges(
            view,
            num_samples,
            self._batch_keys.negative_key(number),
            replace=replace,
            exclude_self_loops=exclude_self_loops and source == target,
            max_tries=math.ceil(_TRIES * (1.0 + redundancy)),
        )
        return drawn.sources, drawn.destinations

    def negative_destinations(
        self,
        sources: torch.Tensor,
        k: int,
        etype: str | CanonicalEtype | None = None,
        key: SampleKey | None = None,
    ) -> torch.Tensor:
        """Draw for each source nodes to which it has no edge, with replacement.

        For a source that has edges to nearly all nodes, some may be nodes to which it has one.

        Parameters
        ----------
        sources : Tensor, int32 or int64, shape (n,)
        k : int
            Nodes for each.
        etype : str or (str, str, str), optional
        key : SampleKey, optional
            Names the experiment; by default that of the seed, the epoch and the edges of the last
            :meth:`edge_subgraph`, as for :meth:`global_uniform_negative_sampling`.

        Returns
        -------
        Tensor, the graph's idtype, shape (n, k)

        Raises
        ------
        InvalidInputError, IdOutOfRangeError
        """
        full = self.to_canonical_etype(etype)
        view = self.view(full)
        if key is None:
            key = self._batch_keys.negative_key(self.canonical_etypes.index(full))
        is_of_one_type = full[0] == full[2]
        drawn = negative_destinations(view, sources, k, key, exclude_self_loops=is_of_one_type)
        next_node = ((sources + 1) % view.num_rows).to(drawn.dtype)
        return torch.where(drawn < 0, next_node[:, None], drawn)

    def _edge_ids(self, etype: CanonicalEtype) -> EdgeIds:
        layout = self._store.tables[topology_table(etype)].format
        assert isinstance(layout, CSCFormat)
        return layout.edge_ids

    def _checked(
        self, ids: torch.Tensor | int, count: int, asked: str, what: str, wait: bool = False
    ) -> torch.Tensor:
        """Ids on the store's device; those on a GPU are looked at only with ``wait``."""
        if isinstance(ids, Integral):
            ids = torch.tensor([ids], dtype=self.idtype)
        ids = torch.as_tensor(ids)
        if not ids.numel():
            return torch.empty(0, dtype=self.idtype, device=self.device)
        if ids.dtype != self.idtype or ids.dim() != 1:
            hint = "; of a mask, mask.nonzero().flatten()" if ids.dtype == torch.bool else ""
            raise InvalidInputError(
                asked,
                f"the ids have dtype {ids.dtype} and shape {tuple(ids.shape)}",
                f"pass a vector of {self.idtype}, as the graph's ids are{hint}",
            )
        if wait or not ids.is_cuda:
            low, high = (int(bound) for bound in ids.aminmax())
            if low < 0 or high >= count:
                raise IdOutOfRangeError(
                    asked,
                    f"there is no {what} {low if low < 0 else high}, the graph has {count}",
                    f"pass ids in [0, {count})",
                )
        return ids.to(self.device)


@dataclass(frozen=True)
class _Places:
    """Where edges are whose ids follow from where they are.

    Attributes
    ----------
    firsts : Tensor, int64
        Id of the first edge of every ``_RUN``-th row.
    tiers : Tensor, int64, shape (segments, 4)
        All edges as a table of scalars, one segment's after the other's: each segment is a tier.
    """

    firsts: torch.Tensor
    tiers: torch.Tensor


def _look_at_places(view: GraphView, layout: EdgeIds) -> _Places:
    where = view.tiers.device
    begins = torch.arange(0, view.num_rows, _RUN, device=where)
    firsts = gather_rows(_bounds(view, layout), begins).view(len(begins), -1)[:, -1].contiguous()
    counts = [view.num_edges]
    if layout is EdgeIds.FIRST:
        # A segment's edges end where the row behind its last one would begin.
        last = [
            rows[-1] if len(rows := range(start + part, stop, parts)) else -1
            for start, stop, parts, _ in view.tiers.tolist()
            for part in range(parts)
        ]
        bounds = _bounds(view, layout)
        behind = with_fields(
            bounds, pointers=bounds.pointers + bounds.row_bytes, position=view.position[:0]
        )
        ends = gather_rows(behind, torch.tensor(last, device=where).clamp_(min=0))[:, 0]
        counts = [end if row >= 0 else 0 for end, row in zip(ends.tolist(), last, strict=True)]
    stops = np.cumsum(counts)
    tiers = [
        [stop - count, stop, 1, segment]
        for segment, (count, stop) in enumerate(zip(counts, stops.tolist(), strict=True))
    ]
    places = _Places(firsts, torch.tensor(tiers, dtype=torch.int64).to(where))
    if firsts.is_cuda:
        # Another stream may be the next to read them.
        torch.cuda.current_stream(where).synchronize()
    return places


def _bounds(view: GraphView, layout: EdgeIds) -> RowView:
    """The bounds of rows, as rows: each row's first edge's place in its segment and, where rows
    have it, that edge's id behind it."""
    shape = (2,) if layout is EdgeIds.FIRST else ()
    pointers = view.pointers[:, INDPTR].contiguous()
    return RowView(
        view.tiers, pointers, view.num_rows, shape, torch.int64, view.position, view.owner,
        sms=view.sms,
    )  # fmt: skip


def _ends_by_place(view: GraphView, layout: EdgeIds, places: _Places, eids: torch.Tensor) -> Ends:
    where, idtype = eids.device, eids.dtype
    eids = eids.long()
    bounds = _bounds(view, layout)
    # The run whose first row begins last, and in it the row that does.
    run = torch.searchsorted(places.firsts, eids, right=True).sub_(1).clamp_(min=0)
    rows = (run * _RUN)[:, None] + torch.arange(_RUN, device=where)
    firsts = gather_rows(bounds, rows.clamp(max=view.num_rows - 1).flatten())
    has_begun = firsts.view(len(eids), _RUN, -1)[:, :, -1] <= eids[:, None]
    has_begun &= rows < view.num_rows
    targets = rows[:, 0] + has_begun.sum(1) - 1
    place = eids
    if layout is EdgeIds.FIRST:
        at, first = gather_rows(bounds, targets).T
        position = view.position[targets].long() if len(view.position) else targets
        stops = view.tiers[:-1, STOP].contiguous()
        tier = view.tiers[torch.searchsorted(stops, position, right=True)]
        segment = tier[:, FIRST] + (position - tier[:, START]) % tier[:, PARTS]
        place = places.tiers[segment, START] + at + eids - first
        # Behind the last row is another segment.
        place = torch.where(eids < view.num_edges, place, -1)
    indices = RowView(
        places.tiers, view.pointers[:, INDICES].contiguous(), view.num_edges, (), idtype,
        view.position[:0], view.owner, sms=view.sms,
    )  # fmt: skip
    return Ends(gather_rows(indices, place), targets.to(idtype))

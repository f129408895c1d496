"""The structure of a store's graph: its types, its numbers of nodes and edges, its edges.

Tables of a store have names, ``kind/type/feature``.  What divides these parts is quoted in a type,
as in addresses of web pages (``a/b`` is ``a%2Fb``), so that no two tables have one name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from typing import Any

import networkx as nx
import torch

from dgl_mgpu.errors import (
    IdOutOfRangeError,
    InvalidInputError,
    UnsupportedByStoreError,
    nearest,
)
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.store.memory import Store
from dgl_mgpu.store.memory.format import CSCFormat, EdgeIds
from dgl_mgpu.store.remote import OtherMachines
from dgl_mgpu.utils.types import CanonicalEtype

#: Node ids, by node type in a heterogeneous graph.
Nodes = torch.Tensor | Mapping[str, torch.Tensor]


def topology_table(etype: CanonicalEtype) -> str:
    """Name of the table that holds the in-edges of ``etype``."""
    return f"topology/{_quoted(*etype)}"


def ends_table(etype: CanonicalEtype) -> str:
    """Name of the table that holds the ends of each edge of ``etype`` by its id."""
    return f"ends/{_quoted(*etype)}"


def node_table(ntype: str, name: str) -> str:
    """Name of the table that holds node feature ``name``."""
    return f"node/{_quoted(ntype)}/{name}"


def edge_table(etype: CanonicalEtype, name: str) -> str:
    """Name of the table that holds edge feature ``name``."""
    return f"edge/{_quoted(*etype)}/{name}"


def state_table(ntype: str, name: str, state: str) -> str:
    """Name of the table that holds a part of an embedding's optimizer's state."""
    return f"state/{_quoted(ntype)}/{name}/{state}"


def feature_of(table: str) -> str | None:
    """The feature of nodes or edges that a table holds, if it does."""
    kind, _, feature = table.partition("/")
    return feature.partition("/")[2] if kind in ("node", "edge") else None


def _quoted(*types: str) -> str:
    quoted = (part.replace("%", "%25").replace("/", "%2F").replace(":", "%3A") for part in types)
    return ":".join(quoted)


class GraphStructure:
    """Node and edge types of a graph in a store, and the views of its edges.

    ``others`` are the machines that have rows which this one does not, where there are any.
    """

    def __init__(
        self,
        store: Store,
        num_nodes: Mapping[str, int],
        canonical_etypes: Sequence[CanonicalEtype],
        others: OtherMachines | None = None,
    ) -> None:
        self._store, self.others = store, others
        self.num_nodes_by_type = dict(num_nodes)
        self.ntypes = list(num_nodes)
        self.canonical_etypes = list(canonical_etypes)
        self._topology_tables = {etype: topology_table(etype) for etype in canonical_etypes}
        #: Those to ask for edges, where there are any that this machine does not read.
        self.others_with_edges = others
        edges = (store.tables[name] for name in self._topology_tables.values())
        if others is not None and all(table.reads_all_rows for table in edges):
            self.others_with_edges = None
        self.device = self._kept(canonical_etypes[0]).tiers.device

    @property
    def etypes(self) -> list[str]:
        """Edge type names, in the order of ``canonical_etypes``."""
        return [etype for _, etype, _ in self.canonical_etypes]

    @property
    def idtype(self) -> torch.dtype:
        """int32 or int64."""
        return self._kept(self.canonical_etypes[0]).idtype

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one edge type."""
        return len(self.ntypes) == 1 and len(self.canonical_etypes) == 1

    def to_canonical_etype(self, etype: str | CanonicalEtype | None) -> CanonicalEtype:
        """The full triple of an edge type; ``None`` names the only one.

        Raises
        ------
        InvalidInputError
            If no edge type has this name, or several have.
        """
        matches = [
            full
            for full in self.canonical_etypes
            if etype is None or full == etype or full[1] == etype
        ]
        if len(matches) != 1:
            raise InvalidInputError(
                f"find edge type {etype!r}",
                f"{len(matches) or 'none'} of the graph's edge types fit: {self.canonical_etypes}",
                "name one of them as (source type, edge type, destination type)",
            )
        return matches[0]

    def told(self, what: str) -> AbstractContextManager[None]:
        """Have other machines told of an error, of what all ranks were about to do together."""
        return contextlib.nullcontext() if self.others is None else self.others.told(what)

    def metagraph(self) -> nx.MultiDiGraph:
        """Node types as nodes and edge types as edges, keyed by name, as in DGL."""
        types = nx.MultiDiGraph()
        types.add_edges_from(
            (source, target, name) for source, name, target in self.canonical_etypes
        )
        return types

    def num_nodes(self, ntype: str | None = None) -> int:
        """Nodes of type ``ntype``, or of all types."""
        if ntype is None:
            return sum(self.num_nodes_by_type.values())
        return self.num_nodes_by_type[self.only_ntype(ntype)]

    def num_edges(self, etype: str | CanonicalEtype | None = None) -> int:
        """Edges of type ``etype``, or of all types."""
        etypes = self.canonical_etypes if etype is None else [self.to_canonical_etype(etype)]
        return sum(self._kept(full).num_edges for full in etypes)

    def view(self, etype: str | CanonicalEtype | None = None) -> GraphView:
        """The edges of a type as operators and kernels read them (:mod:`dgl_mgpu.ops`).

        Parameters
        ----------
        etype : str or (str, str, str), optional
            The only one by default.

        Returns
        -------
        GraphView
            Valid in this process, until the store is closed.

        Raises
        ------
        InvalidInputError
            If there is no such edge type.
        UnsupportedByStoreError
            If other machines have some of the edges.
        StoreClosedError
        """
        full = etype
        if full not in self._topology_tables:
            full = self.to_canonical_etype(etype)
        if self.others is not None:
            raise spread_over_machines(f"read the edges of type {full} directly")
        return self._kept(full)  # type: ignore[arg-type]

    def _kept(self, etype: CanonicalEtype) -> GraphView:
        """The edges of a type that this machine has."""
        view = self._store.tables[self._topology_tables[etype]].view
        assert isinstance(view, GraphView)
        return view

    def own_nodes(self, ntype: str | None = None) -> range:
        """The nodes of a type that this machine owns: where there are no others, all of them.

        Where machines have one copy together (``span='job'``), each has the features and in-edges
        of its own nodes.

        Parameters
        ----------
        ntype : str, optional
            Needed if there are several types of nodes.

        Returns
        -------
        range
            Of node ids.

        Raises
        ------
        InvalidInputError
            If there is no such type, or none is named of several.
        """
        name = self.only_ntype(ntype)
        if self.others is None:
            return range(self.num_nodes_by_type[name])
        return self.others.owned(name)

    @property
    def is_open(self) -> bool:
        """Whether the store has not been closed."""
        return not any(
            self._store.tables[name].is_closed for name in self._topology_tables.values()
        )

    def views(self) -> dict[CanonicalEtype, GraphView]:
        """The view of each edge type, with the edges that this machine has.

        Raises StoreClosedError if the store was closed.
        """
        return {etype: self._kept(etype) for etype in self.canonical_etypes}

    def edge_id_format(self, etype: CanonicalEtype) -> EdgeIds:
        """How the store keeps the ids of an edge type's edges."""
        table_format = self._store.tables[self._topology_tables[etype]].format
        assert isinstance(table_format, CSCFormat)
        return table_format.edge_ids

    def only_ntype(self, ntype: str | None) -> str:
        """A node type of the graph, or InvalidInputError; ``None`` names the only one."""
        if ntype is None and len(self.ntypes) == 1:
            return self.ntypes[0]
        if ntype is None:
            raise InvalidInputError(
                "find node type None",
                f"the graph has several node types, {self.ntypes}",
                "name one of them: pass ntype=, or nodes as a dict by type",
            )
        if ntype not in self.num_nodes_by_type:
            raise InvalidInputError(
                f"find node type {ntype!r}",
                "the graph has none of this name",
                nearest(str(ntype), self.ntypes),
            )
        return ntype

    def no_ids(self) -> torch.Tensor:
        """An empty vector of ids on the store's device."""
        return torch.empty(0, dtype=self.idtype, device=self.device)

    def nodes_by_ntype(self, nodes: Nodes) -> dict[str, torch.Tensor]:
        """Node ids by node type, neither checked nor converted."""
        by_type = nodes if isinstance(nodes, Mapping) else {None: nodes}
        return {self.only_ntype(ntype): _as_vector(ids) for ntype, ids in by_type.items()}

    def seeds_by_ntype(self, nodes: Nodes, wait: bool = False) -> dict[str, torch.Tensor]:
        """Seed nodes by node type, checked, on the store's device and in the graph's idtype.

        Without ``wait`` those on a GPU keep their dtype, and operators check them without a wait of
        the host.
        """
        dtypes = torch.int32, torch.int64
        return {
            ntype: self._checked(
                ids, self.num_nodes_by_type[ntype], dtypes, "sample neighbors", "seed node", wait
            )
            for ntype, ids in self.nodes_by_ntype(nodes).items()
        }

    def checked_ids(
        self, ids: torch.Tensor | int, count: int, action: str, noun: str, wait: bool = False
    ) -> torch.Tensor:
        """Ids of ``count`` nodes or edges as a vector on the store's device.

        They have to be in the graph's idtype; those on a GPU are checked only with ``wait``.
        """
        if isinstance(ids, Integral):
            ids = torch.tensor([ids], dtype=self.idtype)
        return self._checked(torch.as_tensor(ids), count, (self.idtype,), action, noun, wait)

    def _checked(
        self,
        ids: torch.Tensor,
        count: int,
        dtypes: Sequence[torch.dtype],
        action: str,
        noun: str,
        wait: bool = False,
    ) -> torch.Tensor:
        # Before any conversion, which would make ids of a float or of a mask.
        if ids.dim() and not len(ids):
            return self.no_ids()
        if ids.dtype not in dtypes or ids.dim() != 1:
            hint = "; of a mask, mask.nonzero().flatten()" if ids.dtype == torch.bool else ""
            raise InvalidInputError(
                action,
                f"the {noun} ids have dtype {ids.dtype} and shape {tuple(ids.shape)}",
                f"pass a vector of {' or '.join(map(str, dtypes))}{hint}",
            )
        if ids.is_cuda and not wait:
            return ids.to(self.device)
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= count:
            raise IdOutOfRangeError(
                action,
                f"there is no {noun} {low if low < 0 else high}, the graph has {count} "
                f"{noun.split()[-1]}s",
                f"pass ids in [0, {count})",
            )
        return ids.to(self.device, self.idtype)

    def fanouts_by_etype(self, fanout: int | Mapping) -> dict[CanonicalEtype, int]:
        """The fanout of each edge type, or InvalidInputError if some have none."""
        if not isinstance(fanout, Mapping):
            return dict.fromkeys(self.canonical_etypes, _as_integer(fanout))
        fanouts = {self.to_canonical_etype(etype): _as_integer(n) for etype, n in fanout.items()}
        missing = [etype for etype in self.canonical_etypes if etype not in fanouts]
        if missing:
            raise InvalidInputError(
                "sample with a fanout for each edge type",
                f"there is no fanout for {missing}",
                "give each edge type a fanout; 0 leaves it out",
            )
        return fanouts


def spread_over_machines(action: str) -> UnsupportedByStoreError:
    """What reads a store of several machines in a way that they do not serve."""
    return UnsupportedByStoreError(
        action,
        "the machines of the job have one copy of the data together, of which this reads what is "
        "on this machine",
        "sample with NeighborSampler and read features by ids, or build the store with "
        "span='machine' (store.span)",
    )


def _as_vector(ids: Any) -> torch.Tensor:
    is_one = isinstance(ids, torch.Tensor) and ids.dim() == 1
    return ids if is_one else torch.atleast_1d(torch.as_tensor(ids))


def _as_integer(fanout: Any) -> Any:
    """A fanout as DGL takes it: 3.0 and ``torch.tensor(3)`` are 3; operators refuse the rest."""
    if isinstance(fanout, bool):
        return fanout
    try:
        return int(fanout) if int(fanout) == fanout else fanout
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return fanout

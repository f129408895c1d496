"""What a store's graph is made of: types, how many nodes and edges, and where edges are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.store.memory import Store
from dgl_mgpu.store.table_names import CanonicalEtype, topology_table


class StoredTopology:
    """Node and edge types of a graph whose topology is in a store.

    Attributes
    ----------
    ntypes : list of str
    canonical_etypes : list of (str, str, str)
    idtype : torch.dtype
    """

    def __init__(
        self, store: Store, num_nodes: Mapping[str, int], canonical_etypes: Sequence[CanonicalEtype]
    ) -> None:
        self._store = store
        self._num_nodes = dict(num_nodes)
        self.ntypes = list(num_nodes)
        self.canonical_etypes = list(canonical_etypes)
        self._topology_tables = {etype: topology_table(etype) for etype in canonical_etypes}

    @property
    def etypes(self) -> list[str]:
        """Edge type names, in the order of ``canonical_etypes``."""
        return [etype for _, etype, _ in self.canonical_etypes]

    @property
    def idtype(self) -> torch.dtype:
        """int32 or int64."""
        return self.view(self.canonical_etypes[0]).idtype

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one edge type."""
        return len(self.ntypes) == 1 and len(self.canonical_etypes) == 1

    def is_pinned(self) -> bool:
        """True: as of a pinned DGLGraph, nodes may be named on another device than the graph's."""
        return True

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

    def metagraph(self) -> nx.MultiDiGraph:
        """Node types, and for each edge type an edge that has its name for a key, as DGL's."""
        types = nx.MultiDiGraph()
        types.add_edges_from(
            (source, target, name) for source, name, target in self.canonical_etypes
        )
        return types

    def num_nodes(self, ntype: str | None = None) -> int:
        """Nodes of type ``ntype``, or of all types."""
        if ntype is None:
            return sum(self._num_nodes.values())
        return self._num_nodes[self._only_ntype(ntype)]

    number_of_nodes = num_nodes

    def num_edges(self, etype: str | CanonicalEtype | None = None) -> int:
        """Edges of type ``etype``, or of all types."""
        etypes = self.canonical_etypes if etype is None else [self.to_canonical_etype(etype)]
        return sum(self.view(full).num_edges for full in etypes)

    number_of_edges = num_edges

    def view(self, etype: str | CanonicalEtype | None = None) -> GraphView:
        """An edge type's topology as operators and kernels take it (:mod:`dgl_mgpu.ops`).

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
        StoreClosedError
        """
        name = self._topology_tables.get(etype)  # type: ignore[arg-type]
        if name is None:
            name = self._topology_tables[self.to_canonical_etype(etype)]
        view = self._store.tables[name].view
        assert isinstance(view, GraphView)
        return view

    def _only_ntype(self, ntype: str | None) -> str:
        if ntype is None and len(self.ntypes) == 1:
            return self.ntypes[0]
        if ntype not in self._num_nodes:
            raise InvalidInputError(
                f"find node type {ntype!r}",
                f"the graph has several node types, {self.ntypes}",
                "name one of them: pass ntype=, or nodes as a dict by type",
            )
        return ntype

    def _by_etype(self, fanout: int | Mapping) -> dict[CanonicalEtype, int]:
        if not isinstance(fanout, Mapping):
            return dict.fromkeys(self.canonical_etypes, _integral(fanout))
        fanouts = {self.to_canonical_etype(etype): _integral(n) for etype, n in fanout.items()}
        missing = [etype for etype in self.canonical_etypes if etype not in fanouts]
        if missing:
            raise InvalidInputError(
                "sample with a fanout for each edge type",
                f"there is no fanout for {missing}",
                "give each edge type a fanout; 0 leaves it out",
            )
        return fanouts


def _integral(fanout: Any) -> Any:
    """A number as DGL takes it: 3.0 and ``torch.tensor(3)`` are 3; others are refused later."""
    if isinstance(fanout, bool):
        return fanout
    try:
        return int(fanout) if int(fanout) == fanout else fanout
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return fanout

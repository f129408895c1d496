"""Features of a store's graph: their storages, and those that samples are weighted by."""

from __future__ import annotations

import math
from dataclasses import replace

from dgl_mgpu.errors import nearest
from dgl_mgpu.graph.errors import UnknownFeatureError
from dgl_mgpu.ops import check_weights
from dgl_mgpu.ops.view import RowView
from dgl_mgpu.store.edges import EdgeQueries
from dgl_mgpu.store.feature_storage import TableStorage
from dgl_mgpu.store.lazy_rows import Type
from dgl_mgpu.store.memory import Table
from dgl_mgpu.store.table_names import CanonicalEtype, edge_table, feature_of


class Features(EdgeQueries):
    """What a store's graph has of features, as DGL's DataLoader asks for it."""

    #: Edge features that were found to be weights, as they were then.
    _checked_weights: dict[str, list[int]]

    def get_node_storage(self, key: str, ntype: str | None = None) -> TableStorage:
        """The storage of node feature ``key``.

        Parameters
        ----------
        key : str
        ntype : str, optional
            The only one by default.

        Returns
        -------
        TableStorage
            A row for each node of the type.

        Raises
        ------
        InvalidInputError
            If there is no such feature or node type.
        """
        return self._storage(key, self._only_ntype(ntype))

    def get_edge_storage(self, key: str, etype: str | CanonicalEtype | None = None) -> TableStorage:
        """The storage of edge feature ``key``.

        Parameters
        ----------
        key : str
        etype : str or (str, str, str), optional
            The only one by default.

        Returns
        -------
        TableStorage
            A row for each edge of the type, by its id.

        Raises
        ------
        InvalidInputError
            If there is no such feature or edge type.
        """
        return self._storage(key, self.to_canonical_etype(etype))

    def has_feature(self, key: object) -> bool:
        """Whether nodes or edges of some type have a feature of this name."""
        return any(feature_of(name) == key for name in self._store.tables)

    def check_weights(self, prob: str) -> None:
        """Check edge feature ``prob`` of the whole graph as sampling weights, once.

        Raises
        ------
        InvalidWeightError
            If a weight is NaN, infinite or negative, or all are zero at some node.
        """
        versions = [table.version for table in self.weight_tables(prob)]
        if self._checked_weights.get(prob) == versions:
            return
        for etype in self.canonical_etypes:
            weights = self._weights(etype, prob)
            if weights is not None:
                check_weights(self.view(etype), weights)
        self._checked_weights[prob] = versions

    def weight_tables(self, prob: str) -> list[Table]:
        """Where edge feature ``prob`` is, of the edge types that have it."""
        names = (edge_table(etype, prob) for etype in self.canonical_etypes)
        return [self._store.tables[name] for name in names if name in self._store.tables]

    def _storage(self, key: str, of: Type) -> TableStorage:
        found = self._find_storage(of, key)
        if found is None:
            there = self._feature_names(of)
            kind, shown = ("nodes", of) if isinstance(of, str) else ("edges", of[1])
            raise UnknownFeatureError(
                f"find feature '{key}' of {kind} of type '{shown}'",
                f"the store holds {there}" if there else "the store holds none of theirs",
                (f"{nearest(key, there)} " if there else "")
                + "(a store has the features that its graph had when it was built)",
            )
        return found

    def _weights(self, etype: CanonicalEtype, prob: str) -> RowView | None:
        """Weights of an edge type; None, as in DGL, for one that has no such feature."""
        table = self._store.tables.get(edge_table(etype, prob))
        if table is None:
            if self.is_homogeneous:
                self.get_edge_storage(prob)  # raises, and says which features there are
            return None
        view = table.view
        assert isinstance(view, RowView)
        if view.row_shape and math.prod(view.row_shape) == 1:
            return replace(view, row_shape=())  # (edges, 1) is a vector, as it is to DGL
        return view

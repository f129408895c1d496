"""Features of a store's graph: their storages, their rows in samples, sampling weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from dgl.base import EID, NID
from dgl.frame import Frame, Scheme
from dgl.heterograph import DGLGraph

from dgl_mgpu.errors import nearest
from dgl_mgpu.graph.block_frames import Features
from dgl_mgpu.graph.errors import UnknownFeatureError
from dgl_mgpu.ops import check_weights
from dgl_mgpu.ops.view import RowView
from dgl_mgpu.store.feature_storage import TableStorage, Traffic
from dgl_mgpu.store.graph_structure import (
    GraphStructure,
    edge_table,
    feature_of,
    node_table,
)
from dgl_mgpu.store.lazy_rows import LazyColumn, LazyColumns, NodeOrEdgeType
from dgl_mgpu.store.memory import Store, Table
from dgl_mgpu.utils.types import CanonicalEtype


class _Feature:
    """A feature in the store, in its table of this name; makes the columns of sampled graphs."""

    def __init__(self, storage: TableStorage, table: str) -> None:
        self._storage, self.table = storage, table
        # On the meta device: nobody can mistake its contents for rows.
        self.like = torch.empty(storage.shape, dtype=storage.dtype, device="meta")
        self._scheme = Scheme(tuple(storage.shape[1:]), storage.dtype)

    def column(self, ids: torch.Tensor | None) -> LazyColumn:
        """A column of rows ``ids``, all if None, read when they are first looked at."""
        return LazyColumn.create(self.like, self._scheme, ids, self.read, self.table)

    def read(self, ids: torch.Tensor | None) -> torch.Tensor:
        if ids is None:
            return self._storage[:]
        return self._storage.fetch(ids, ids.device)


class GraphFeatures:
    """Node and edge features of a graph in a store; ``traffic`` counts what is read."""

    def __init__(self, store: Store, structure: GraphStructure, traffic: Traffic) -> None:
        self._store, self._structure, self._traffic = store, structure, traffic
        #: By type, of those types that were looked up, and by name.
        self._features: dict[NodeOrEdgeType, dict[str, _Feature]] = {}
        #: Table versions of the edge features that are valid weights.
        self._valid_weights: dict[str, list[int]] = {}

    def names(self, of: NodeOrEdgeType) -> list[str]:
        """Names of the features of a node type or of a canonical edge type."""
        prefix = _prefix(of)
        return [name.removeprefix(prefix) for name in self._store.tables if name.startswith(prefix)]

    def has_feature(self, key: object) -> bool:
        """Whether nodes or edges of some type have a feature of this name."""
        return any(feature_of(name) == key for name in self._store.tables)

    def find_storage(self, of: NodeOrEdgeType, name: str) -> TableStorage | None:
        """The storage of a feature of a type; None if there is no such feature."""
        table = self._store.tables.get(_prefix(of) + name)
        if table is None:
            return None
        shown = of if isinstance(of, str) else of[1]
        name = name if self._structure.is_homogeneous else f"{shown}.{name}"
        others = self._structure.others
        remote = None
        if others is not None and isinstance(of, str) and not table.reads_all_rows:
            remote = others.table(name, of)
        return TableStorage(name, table, self._traffic, remote, others)

    def storage(self, of: NodeOrEdgeType, name: str) -> TableStorage:
        """The storage of a feature of a type, or UnknownFeatureError."""
        storage = self.find_storage(of, name)
        if storage is None:
            names = self.names(of)
            kind, shown = ("nodes", of) if isinstance(of, str) else ("edges", of[1])
            raise UnknownFeatureError(
                f"find feature '{name}' of {kind} of type '{shown}'",
                f"the store holds {names}" if names else "the store holds none of theirs",
                (f"{nearest(name, names)} " if names else "")
                + "(a store has the features that its graph had when it was built)",
            )
        return storage

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
        return self.storage(self._structure.only_ntype(ntype), key)

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
        return self.storage(self._structure.to_canonical_etype(etype), key)

    # -- rows of sampled graphs -----------------------------------------------------------

    def add_columns(self, frame: Frame, of: NodeOrEdgeType, ids_name: str | None = None) -> None:
        """Give a frame the features of a type that it does not have.

        ``ids_name`` is the frame's column of row ids; without it the frame has all rows.
        """
        columns, features = frame._columns, self.columns_of(of, ids_name or "")
        ids = None if ids_name is None else columns[ids_name].data
        frame._columns = {**features.rows(ids), **columns}

    def columns_of(self, of: NodeOrEdgeType, ids_name: str) -> LazyColumns:
        """The columns of a type, for frames whose column of original ids has this name."""
        features = self._features_of(of)
        return LazyColumns(features, ids_name, lambda name, ids: features[name].column(ids))

    def of_blocks(self) -> Features:
        """The features of blocks that are yet to be made."""
        return Features(
            [self.columns_of(ntype, NID) for ntype in self._structure.ntypes],
            [self.columns_of(etype, EID) for etype in self._structure.canonical_etypes],
        )

    def add_to_graph(self, graph: DGLGraph, ndata: bool = True, edata: bool = True) -> None:
        """Give a graph of all nodes the features of its nodes, and of its edges by their ids."""
        if ndata:
            ntypes: list[str] = graph.ntypes
            for ntype, frame in zip(ntypes, graph._node_frames, strict=True):
                self.add_columns(frame, ntype)
        if edata:
            for etype, frame in zip(graph.canonical_etypes, graph._edge_frames, strict=True):
                self.add_columns(frame, etype, EID)

    def add_to_block(self, block: DGLGraph) -> None:
        """Give a block the features of its nodes and edges, by their ids."""
        ntypes: list[str] = [*block.srctypes, *block.dsttypes]
        for ntype, frame in zip(ntypes, block._node_frames, strict=True):
            self.add_columns(frame, ntype, NID)
        for etype, frame in zip(block.canonical_etypes, block._edge_frames, strict=True):
            self.add_columns(frame, etype, EID)

    def reattach(self, column: LazyColumn) -> None:
        """Have a column that came from another process read its rows here."""
        types: list[NodeOrEdgeType] = [*self._structure.ntypes, *self._structure.canonical_etypes]
        for of in types:
            for feature in self._features_of(of).values():
                if feature.table == column.table:
                    column.storage, column.read = feature.like, feature.read

    def _features_of(self, of: NodeOrEdgeType) -> Mapping[str, _Feature]:
        features = self._features.get(of)
        if features is None:
            features = self._features[of] = {
                name: _Feature(self.storage(of, name), _prefix(of) + name)
                for name in self.names(of)
            }
        return features

    # -- sampling weights -----------------------------------------------------------------

    def weights(self, etype: CanonicalEtype, prob: str) -> RowView | None:
        """Edge feature ``prob`` of a type as weights; None, as in DGL, for a type without it.

        Raises UnknownFeatureError if the graph's only edge type does not have it.
        """
        table = self._store.tables.get(edge_table(etype, prob))
        if table is None:
            if self._structure.is_homogeneous:
                self.get_edge_storage(prob)  # raises, and names the features that there are
            return None
        view = table.view
        assert isinstance(view, RowView)
        if view.row_shape and math.prod(view.row_shape) == 1:
            return replace(view, row_shape=())  # DGL takes (edges, 1) for a vector
        return view

    def weights_by_etype(self, prob: str | None) -> dict[CanonicalEtype, RowView]:
        """Edge feature ``prob`` of the edge types that have it; none if it is None."""
        if prob is None:
            return {}
        weights = {etype: self.weights(etype, prob) for etype in self._structure.canonical_etypes}
        return {etype: rows for etype, rows in weights.items() if rows is not None}

    def check_weights(self, prob: str) -> None:
        """Check edge feature ``prob`` of the whole graph as sampling weights, once.

        Collective where other machines have some of the edges: each checks those that it has.

        Raises
        ------
        InvalidWeightError
            If a weight is NaN, infinite or negative, or all are zero at some node.
        """
        versions = [table.version for table in self.weight_tables(prob)]
        if self._valid_weights.get(prob) == versions:
            return
        others = self._structure.others
        with self._structure.told(f"check sampling weights '{prob}'"):
            by_etype = self.weights_by_etype(prob)
        for etype, weights in by_etype.items():
            if others is None:
                check_weights(self._structure.view(etype), weights)
            else:
                others.check_weights(self._structure.views()[etype], weights)
        self._valid_weights[prob] = versions

    def weight_tables(self, prob: str) -> list[Table]:
        """The tables of edge feature ``prob``, of the edge types that have it."""
        names = (edge_table(etype, prob) for etype in self._structure.canonical_etypes)
        return [self._store.tables[name] for name in names if name in self._store.tables]


def _prefix(of: NodeOrEdgeType) -> str:
    return node_table(of, "") if isinstance(of, str) else edge_table(of, "")

"""Rows of features that graphs sampled from a store have, read when they are first looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from dgl.base import EID, NID
from dgl.frame import Column, Frame, Scheme, _LazyIndex
from dgl.heterograph import DGLGraph

from dgl_mgpu.store.feature_storage import TableStorage, Traffic
from dgl_mgpu.store.graph_structure import StoredTopology
from dgl_mgpu.store.table_names import CanonicalEtype, edge_table, node_table

#: A node type or a canonical edge type.
Type = str | CanonicalEtype
#: Gives rows by their ids, or all.
Read = Callable[[torch.Tensor | None], torch.Tensor]
#: What a column has that holds a tensor and nothing else.
_PLAIN_COLUMN = dict(vars(Column(torch.empty(0))))


class RowsLater(Column):
    """Rows of a feature, read when they are first looked at.

    DGL's own column reads them from a tensor that has all of the feature.

    Attributes
    ----------
    read : callable or None
        None when they have been read.
    table : str or None
        Of a store, where they are.
    """

    index: Any
    storage: Any
    read: Read | None
    table: str | None

    @classmethod
    def of(
        cls,
        like: torch.Tensor,
        scheme: Scheme,
        ids: torch.Tensor | None,
        read: Read,
        table: str | None = None,
    ) -> RowsLater:
        """Rows ``ids`` of a feature, all if None, that has the shape and dtype of ``like``."""
        rows = cls.__new__(cls)
        # A batch has many of these, and DGL's constructor takes longer.
        rows.__dict__ = {
            **_PLAIN_COLUMN,
            "storage": like,
            "scheme": scheme,
            "index": ids,
            "read": read,
            "table": table,
        }
        return rows

    @property
    def data(self) -> torch.Tensor:
        """The rows."""
        if self.read is not None:
            ids = self.index.flatten() if isinstance(self.index, _LazyIndex) else self.index
            self.storage, self.index, self.read = self.read(ids), None, None
        return Column.data.fget(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.read = None
        Column.data.fset(self, value)

    def astype(self, new_dtype: torch.dtype) -> RowsLater:
        """The same in another type, when they are read."""
        if self.read is None:
            return super().astype(new_dtype)
        some = self.clone()
        if some.dtype != new_dtype:
            if some.deferred_dtype is not None:
                _ = some.data  # one conversion after the other, as DGL does
                return some.astype(new_dtype)
            some.deferred_dtype = new_dtype
        return some

    def clone(self) -> RowsLater:
        """A shallow copy."""
        return self.subcolumn(None)

    def subcolumn(self, rowids: torch.Tensor | None) -> RowsLater:
        """Some of the rows, not read yet either."""
        some = RowsLater(self.storage, self.scheme, self.index, self.device, self.deferred_dtype)
        some.read, some.table = self.read, self.table
        if rowids is not None:
            index = self.index
            if index is not None:
                index = index if isinstance(index, _LazyIndex) else _LazyIndex(index)
            some.index = rowids if index is None else index.slice(rowids)
        return some

    def record_stream(self, stream: Any) -> None:
        """Have a stream of a GPU use the memory that there is by now."""
        if self.read is None:
            super().record_stream(stream)
        elif isinstance(self.index, _LazyIndex) or (self.index is not None and self.index.is_cuda):
            self.index.record_stream(stream)

    def leave_in_store(self) -> None:
        """Go to another process without the rows, if they are a store's and not read yet."""
        if self.read is not None and self.table is not None and self.deferred_dtype is None:
            self.storage = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "read": None}


class _Feature:
    """A feature of a store, of which graphs have rows."""

    def __init__(self, storage: TableStorage, table: str) -> None:
        self._storage, self._table = storage, table
        # It has no memory, so that nobody can take what is in it for rows.
        self.like = torch.empty(storage.shape, dtype=storage.dtype, device="meta")
        self._scheme = Scheme(tuple(storage.shape[1:]), storage.dtype)

    def rows(self, ids: torch.Tensor | None) -> RowsLater:
        return RowsLater.of(self.like, self._scheme, ids, self.read, self._table)

    def read(self, ids: torch.Tensor | None) -> torch.Tensor:
        if ids is None:
            return self._storage[:]
        return self._storage.fetch(ids, ids.device)


class LateRows(StoredTopology):
    """A graph in a store that gives what is sampled of it rows of its features."""

    traffic: Traffic
    #: Features by type, of those types that were asked for, and by table.
    _features: dict[Type, dict[str, _Feature]]

    def _feature_names(self, of: Type) -> list[str]:
        """Names of the features of a node type or of an edge type, in full."""
        prefix = self._prefix(of)
        return [name.removeprefix(prefix) for name in self._store.tables if name.startswith(prefix)]

    def _find_storage(self, of: Type, name: str) -> TableStorage | None:
        """The storage of a feature; None if there is no such feature."""
        table = self._store.tables.get(self._prefix(of) + name)
        if table is None:
            return None
        shown = of if isinstance(of, str) else of[1]
        return TableStorage(name if self.is_homogeneous else f"{shown}.{name}", table, self.traffic)

    def _restore_rows(self, rows: RowsLater) -> None:
        """Have rows that came from another process read here."""
        types: list[Type] = [*self.ntypes, *self.canonical_etypes]
        for of in types:
            for feature in self._features_of(of).values():
                if feature._table == rows.table:
                    rows.storage, rows.read = feature.like, feature.read

    def _add_rows(self, frame: Frame, of: Type, ids_name: str | None = None) -> None:
        """Give a frame the features of a type, of the rows that it names or of all."""
        mine = frame._columns
        ids = None if ids_name is None else mine[ids_name].data
        rows = {
            name: feature.rows(ids)
            for name, feature in self._features_of(of).items()
            if name not in mine
        }
        frame._columns = {**rows, **mine}

    def _add_all_rows(self, graph: DGLGraph, ndata: bool = True, edata: bool = True) -> None:
        """Give a graph of all nodes the features of nodes, and of edges by their ids."""
        if ndata:
            ntypes: list[str] = graph.ntypes
            for ntype, frame in zip(ntypes, graph._node_frames, strict=True):
                self._add_rows(frame, ntype)
        if edata:
            for etype, frame in zip(graph.canonical_etypes, graph._edge_frames, strict=True):
                self._add_rows(frame, etype, EID)

    def _add_block_rows(self, block: DGLGraph) -> None:
        """Give a block the features of its nodes and edges, by their ids."""
        ntypes: list[str] = [*block.srctypes, *block.dsttypes]
        for ntype, frame in zip(ntypes, block._node_frames, strict=True):
            self._add_rows(frame, ntype, NID)
        for etype, frame in zip(block.canonical_etypes, block._edge_frames, strict=True):
            self._add_rows(frame, etype, EID)

    def _features_of(self, of: Type) -> Mapping[str, _Feature]:
        found = self._features.get(of)
        if found is None:
            found = {}
            for name in self._feature_names(of):
                storage = self._find_storage(of, name)
                assert storage is not None
                found[name] = _Feature(storage, self._prefix(of) + name)
            self._features[of] = found
        return found

    def _prefix(self, of: Type) -> str:
        return node_table(of, "") if isinstance(of, str) else edge_table(of, "")

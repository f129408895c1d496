"""Rows of features that graphs sampled from a store have, read when they are first looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from dgl.frame import Column, Scheme, _LazyIndex

from dgl_mgpu.utils.types import CanonicalEtype

#: A node type or a canonical edge type.
NodeOrEdgeType = str | CanonicalEtype
#: Gives rows by their ids, or all.
Read = Callable[[torch.Tensor | None], torch.Tensor]
#: What a column has that holds a tensor and nothing else.
_PLAIN_COLUMN = dict(vars(Column(torch.empty(0))))


class LazyColumn(Column):
    """Rows of a feature, read when they are first looked at.

    DGL's own column reads them from a tensor that has all of the feature.
    """

    index: Any
    storage: Any
    read: Read | None  # None when they have been read
    table: str | None  # the store's, if they are in one

    @classmethod
    def create(
        cls,
        like: torch.Tensor,
        scheme: Scheme,
        ids: torch.Tensor | None,
        read: Read,
        table: str | None = None,
    ) -> LazyColumn:
        """Rows ``ids`` of a feature, all if None, that has the shape and dtype of ``like``."""
        rows = cls.__new__(cls)
        # A batch has many of these, and DGL's constructor takes longer.
        own = {"storage": like, "scheme": scheme, "index": ids, "read": read, "table": table}
        rows.__dict__ = {**_PLAIN_COLUMN, **own}
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

    def astype(self, new_dtype: torch.dtype) -> LazyColumn:
        """The same in another type, when they are read."""
        if self.read is None:
            return super().astype(new_dtype)
        copy = self.clone()
        if copy.dtype != new_dtype:
            if copy.deferred_dtype is not None:
                _ = copy.data  # one conversion after the other, as DGL does
                return copy.astype(new_dtype)
            copy.deferred_dtype = new_dtype
        return copy

    def clone(self) -> LazyColumn:
        """A shallow copy."""
        return self.subcolumn(None)

    def subcolumn(self, rowids: torch.Tensor | None) -> LazyColumn:
        """Some of the rows, not read yet either."""
        rows = LazyColumn(self.storage, self.scheme, self.index, self.device, self.deferred_dtype)
        rows.read, rows.table = self.read, self.table
        if rowids is not None:
            index = self.index
            if index is not None:
                index = index if isinstance(index, _LazyIndex) else _LazyIndex(index)
            rows.index = rowids if index is None else index.slice(rowids)
        return rows

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


class LazyColumns:
    """The features of a type of nodes or edges: a source of columns for frames of blocks.

    See :class:`dgl_mgpu.graph.block_frames.ColumnSource`.

    Parameters
    ----------
    names : iterable of str
    id_name : str
        Of the frames' column of original ids.
    make : callable
        Makes the column of a name for rows with these ids, or for all if None.
    initializers : optional
        Of the graph's frame, and its default one; without them each frame has its own.
    """

    __slots__ = ("_features", "_initializers", "_make", "names")
    is_lazy = True

    def __init__(
        self,
        names: Iterable[str],
        id_name: str,
        make: Callable[[str, torch.Tensor | None], LazyColumn],
        initializers: tuple[Any, Any] | None = None,
    ) -> None:
        self._features, self._make, self._initializers = tuple(names), make, initializers
        self.names = (*self._features, id_name)

    @property
    def initializers(self) -> tuple[Any, Any]:
        """Those of a frame, and its default one."""
        return ({}, None) if self._initializers is None else self._initializers

    def rows(self, ids: torch.Tensor | None) -> dict[str, Any]:
        """Columns of these rows, or of all, read when they are first looked at."""
        return {name: self._make(name, ids) for name in self._features}

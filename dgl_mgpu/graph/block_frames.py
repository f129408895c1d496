"""Frames of blocks: original ids and rows of the features of the graph, made when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from dgl.base import EID, NID
from dgl.frame import Column, Frame, Scheme
from dgl.heterograph import DGLGraph

#: What a column has that holds a tensor and nothing else, and one of ids.
_PLAIN_COLUMN = dict(vars(Column(torch.empty(0))))
_ID_COLUMNS = {
    dtype: {**_PLAIN_COLUMN, "storage": None, "scheme": Scheme((), dtype)}
    for dtype in (torch.int32, torch.int64)
}


def plain_column(data: torch.Tensor) -> Column:
    """A column that holds a tensor and nothing else, in less time than DGL takes for one."""
    column = Column.__new__(Column)
    column.__dict__ = {
        **_PLAIN_COLUMN,
        "storage": data,
        "scheme": Scheme(data.shape[1:], data.dtype),
    }
    return column


class ColumnSource(Protocol):
    """Makes the columns of a block's frame.

    Attributes
    ----------
    initializers : dict, callable or None
        Of a frame, and its default one.
    is_lazy : bool
        Whether :meth:`rows` makes the same columns whenever it is called.
    names : tuple of str
        Of the columns, with that of the original ids.
    """

    is_lazy: bool
    names: tuple[str, ...]

    @property
    def initializers(self) -> tuple[Any, Any]: ...

    def rows(self, ids: torch.Tensor) -> dict[str, Any]:
        """Columns of these rows, gathered when they are looked at."""


class Features:
    """The features of a graph's nodes and edges, by type, for blocks of it."""

    def __init__(self, of_nodes: Sequence[ColumnSource], of_edges: Sequence[ColumnSource]) -> None:
        self.of_nodes, self.of_edges = of_nodes, of_edges

    @classmethod
    def of_graph(cls, graph: DGLGraph, device: torch.device) -> Features:
        """Those that a graph has now, for blocks on a device."""
        return cls(
            [FrameColumns(frame, NID, device) for frame in graph._node_frames],
            [FrameColumns(frame, EID) for frame in graph._edge_frames],
        )


class FrameColumns:
    """The columns of a frame, as they are now, for some of its rows: as its ``subframe`` has them.

    With a device, rows are copied there, where they are elsewhere, when they are looked at.
    """

    __slots__ = ("_columns", "_plain", "initializers", "is_lazy", "names")

    def __init__(self, frame: Frame, id_name: str, device: torch.device | None = None) -> None:
        self.initializers = frame._initializers, frame._default_initializer
        self._columns = dict(frame._columns)
        #: By name, what a column has but for the rows.
        self._plain: dict[str, dict[str, Any]] = {}
        for name, column in self._columns.items():
            if type(column) is Column and column.index is None:
                self._plain[name] = attributes = {
                    **_PLAIN_COLUMN,
                    "storage": column.storage,
                    "scheme": column.scheme,
                    "device": column.device,
                    "deferred_dtype": column.deferred_dtype,
                }
                if device is not None and column.device is None and column.storage.device != device:
                    attributes["device"] = device, {}
        #: Whether rows can be taken later; columns of other kinds may have others by then.
        self.is_lazy = len(self._plain) == len(self._columns)
        #: Of the columns of a block's frame, with that of the original ids.
        self.names = tuple({**self._columns, id_name: None})

    def rows(self, ids: torch.Tensor) -> dict[str, Any]:
        """As :class:`ColumnSource` says."""
        rows: dict[str, Any] = {}
        for name, column in self._columns.items():
            attributes = self._plain.get(name)
            if attributes is None:
                rows[name] = column.subcolumn(ids)
            else:
                row = rows[name] = Column.__new__(Column)
                row.__dict__ = {**attributes, "index": ids}
        return rows


class BlockFrame(Frame):
    """A frame of a block, whose columns are made when they are first looked at: most never are.

    Parameters
    ----------
    name : str
        Of the column of original ids.
    ids : Tensor, shape (n,)
        Original ids of which the first ``num_rows`` are the frame's.
    num_rows : int
    features : optional
        The columns that rows are taken of.
    """

    def __init__(
        self, name: str, ids: torch.Tensor, num_rows: int, features: ColumnSource | None = None
    ) -> None:
        initializers: tuple[Any, Any] = ({}, None) if features is None else features.initializers
        self._num_rows = num_rows
        self._initializers, self._default_initializer = initializers
        self._source: tuple[str, torch.Tensor, ColumnSource | None] | None = name, ids, features
        if features is not None and not features.is_lazy:
            self._make()

    def __getattr__(self, name: str) -> Any:
        if name != "_columns":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._make()

    def _make(self) -> dict[str, Any]:
        source = self._source
        if source is None:  # another thread has made them
            made: dict[str, Any] = self.__dict__["_columns"]
            return made
        name, ids, features = source
        if ids.shape[0] != self._num_rows:
            ids = ids[: self._num_rows]
        columns = {} if features is None else features.rows(ids)
        column = columns[name] = Column.__new__(Column)
        column.__dict__ = {**_ID_COLUMNS[ids.dtype], "storage": ids}
        self._columns = columns
        self._source = None
        return columns

    @property
    def unmade_ids(self) -> torch.Tensor | None:
        """The ids of rows whose columns have not been made; None if they have been."""
        is_unmade = self._source is not None and "_columns" not in self.__dict__
        return self._source[1] if is_unmade else None  # type: ignore[index]

    @property
    def unmade_names(self) -> tuple[str, ...] | None:
        """The names of columns that have not been made; None if they have been."""
        if self._source is None or "_columns" in self.__dict__:
            return None
        name, _, features = self._source
        return (name,) if features is None else features.names

    def __reduce__(self) -> tuple[Any, ...]:
        columns = self._columns
        state = {key: value for key, value in self.__dict__.items() if key != "_source"}
        return _frame_of, ({**state, "_columns": columns},)


def _frame_of(state: dict[str, Any]) -> Frame:
    frame = Frame.__new__(Frame)
    frame.__dict__ = state
    return frame

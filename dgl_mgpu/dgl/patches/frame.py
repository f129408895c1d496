"""Copies of frames without a check of their columns."""

from __future__ import annotations

from typing import Any


def clone_frame(self: Any) -> Any:
    """In place of ``Frame.clone``: the columns of a frame have as many rows each."""
    from dgl.frame import Column

    frame = object.__new__(type(self))
    if "_columns" not in self.__dict__:  # of a block, which nobody has looked at
        frame.__dict__ = self.__dict__.copy()
        return frame
    frame.__dict__ = {
        **self.__dict__,
        "_columns": {
            name: column.clone() if isinstance(column, Column) else column
            for name, column in self._columns.items()
        },
    }
    return frame


def clone_column(self: Any) -> Any:
    """In place of ``Column.clone``: what a column has is not looked at again."""
    column = object.__new__(type(self))
    column.__dict__ = {**self.__dict__, "pinned_by_dgl": False, "_data_nd": None}
    return column

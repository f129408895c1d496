"""Features of a graph made of tensors: set and copied without asking what is known."""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.graph.dispatch import is_tensor_backed
from dgl_mgpu.graph.originals import originals


def clone_frame(self: Any) -> Any:
    """In place of ``Frame.clone``: the columns of a frame have as many rows each."""
    from dgl.frame import Column

    frame = object.__new__(type(self))
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


def set_node_features(self: Any, ntid: int, u: Any, data: Any) -> None:
    """In place of ``DGLGraph._set_n_repr``."""
    index = self._graph
    if is_tensor_backed(index) and _fit(u, data, index.num_nodes(ntid), index.device):
        _update(self._node_frames[ntid], data)
    else:
        originals["dgl.heterograph:DGLGraph._set_n_repr"](self, ntid, u, data)


def set_edge_features(self: Any, etid: int, edges: Any, data: Any) -> None:
    """In place of ``DGLGraph._set_e_repr``."""
    index = self._graph
    if is_tensor_backed(index) and _fit(edges, data, index.num_edges(etid), index.device):
        _update(self._edge_frames[etid], data)
    else:
        originals["dgl.heterograph:DGLGraph._set_e_repr"](self, etid, edges, data)


def _fit(rows: Any, data: Any, count: int, device: torch.device) -> bool:
    """Whether tensors are the features of all nodes or edges; DGL raises where they are not."""
    return (
        isinstance(rows, str)
        and rows == "__ALL__"
        and type(data) is dict
        and all(
            isinstance(value, torch.Tensor)
            and value.dim() > 0
            and value.shape[0] == count
            and value.device == device
            for value in data.values()
        )
    )


def _update(frame: Any, data: dict[str, torch.Tensor]) -> None:
    for name, value in data.items():
        frame.update_column(name, value)

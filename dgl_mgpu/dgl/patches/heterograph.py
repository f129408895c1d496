"""Overrides in `dgl.heterograph`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from dgl_mgpu.dgl import copies
from dgl_mgpu.dgl.patches import DISTRIBUTED, is_partitioned, on_whole_graph, override, partitions
from dgl_mgpu.graph.dispatch import TensorBacked, is_tensor_backed
from dgl_mgpu.graph.originals import originals


def out_degrees(self: Any, u: Any = "__ALL__", etype: Any = None) -> Any:
    """In place of ``DGLGraph.out_degrees``: all nodes of a graph exist."""
    from dgl.base import is_all

    from dgl_mgpu.graph.index import TensorIndex

    if not (is_all(u) and isinstance(self._graph, TensorIndex)):
        return originals["dgl.heterograph:DGLGraph.out_degrees"](self, u, etype)
    return self._graph.out_degrees(self.get_etype_id(etype), None)


def in_degrees(self: Any, v: Any = "__ALL__", etype: Any = None) -> Any:
    """In place of ``DGLGraph.in_degrees``."""
    from dgl.base import is_all

    from dgl_mgpu.graph.index import TensorIndex

    if not (is_all(v) and isinstance(self._graph, TensorIndex)):
        return originals["dgl.heterograph:DGLGraph.in_degrees"](self, v, etype)
    return self._graph.in_degrees(self.get_etype_id(etype), None)


def to(self: Any, device: Any, **kwargs: Any) -> Any:
    """In place of ``DGLGraph.to``: a part of the graph under ``--partition``."""
    from dgl.heterograph import DGLGraph

    is_whole = device is not None and type(self) is DGLGraph and not self.is_block
    if is_whole and (script := partitions()) is not None:
        # DGL moves what it has made itself, often to where it is.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not (caller.startswith("dgl.") and self.device == torch.device(device)):
            return script.partition(self, device)
    if is_whole:
        copies.note()
    return originals["dgl.heterograph:DGLGraph.to"](self, device, **kwargs)


def _set_n_repr(self: Any, ntid: int, u: Any, data: Any) -> None:
    """In place of ``DGLGraph._set_n_repr``."""
    index = self._graph
    if is_tensor_backed(index) and _fit(u, data, index.num_nodes(ntid), index.device):
        _update(self._node_frames[ntid], data)
    else:
        originals["dgl.heterograph:DGLGraph._set_n_repr"](self, ntid, u, data)


def _set_e_repr(self: Any, etid: int, edges: Any, data: Any) -> None:
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


def update_all(
    self: Any, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
) -> None:
    """In place of ``DGLGraph.update_all``: a graph of one relation is not sliced to that first."""
    index = self._graph
    is_ours = isinstance(index, TensorBacked)
    if is_ours and index.schema.is_single:
        from dgl_mgpu.graph.message_passing import operators

        operators.update_all(self, message_func, reduce_func, apply_node_func, etype)
    else:
        original = originals["dgl.heterograph:DGLGraph.update_all"]
        original(self, message_func, reduce_func, apply_node_func, etype)


def apply_edges(self: Any, func: Any, edges: Any = "__ALL__", etype: Any = None) -> None:
    """In place of ``DGLGraph.apply_edges``, for all edges of a graph of one relation."""
    from dgl.base import is_all

    index = self._graph
    is_ours = isinstance(index, TensorBacked)
    if is_ours and index.schema.is_single and etype is None and is_all(edges):
        from dgl_mgpu.graph.message_passing import operators

        if operators.is_message(func):
            operators.apply_edges(self, func)
            return
    originals["dgl.heterograph:DGLGraph.apply_edges"](self, func, edges, etype)


def _batch_size(self: Any) -> int:
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    if isinstance(self._graph, DistributedGraphIndex):
        return 1
    return originals["dgl.heterograph:DGLGraph.batch_size"].fget(self)


batch_size = property(_batch_size, doc="In place of ``DGLGraph.batch_size``.")


@override("dgl.heterograph:DGLGraph.batch_num_nodes", DISTRIBUTED)
def batch_num_nodes(self: Any, ntype: Any = None) -> Any:
    """In place of ``DGLGraph.batch_num_nodes``, which operations on whole graphs call."""
    if is_partitioned(self):
        return originals["dgl.heterograph:DGLGraph.batch_num_nodes"](self, ntype)
    from dgl_mgpu.dgl.patches.readout import refuse_for_partition

    raise refuse_for_partition(
        "count the nodes of all graphs in a batch",
        "use num_nodes() for this rank's, or ownership[ntype].num_nodes for all",
    )


@override("dgl.heterograph:DGLGraph.batch_num_edges", DISTRIBUTED)
def batch_num_edges(self: Any, etype: Any = None) -> Any:
    """In place of ``DGLGraph.batch_num_edges``."""
    if is_partitioned(self):
        return originals["dgl.heterograph:DGLGraph.batch_num_edges"](self, etype)
    from dgl_mgpu.dgl.patches.readout import refuse_for_partition

    raise refuse_for_partition(
        "count the edges of all graphs in a batch", "use num_edges() for this rank's"
    )


def clone(self: Any) -> Any:
    """In place of ``DGLGraph.clone``: the copy of a view of the whole graph is one, too."""
    if is_partitioned(self):
        return self.local_var()
    return originals["dgl.heterograph:DGLGraph.clone"](self)


def add_nodes(self: Any, num: Any, data: Any = None, ntype: Any = None) -> None:
    """In place of ``DGLGraph.add_nodes``: of a view of the whole graph, too."""
    _change("add_nodes", self, num, data, ntype)


def add_edges(self: Any, u: Any, v: Any, data: Any = None, etype: Any = None) -> None:
    """In place of ``DGLGraph.add_edges``: of a view of the whole graph, too."""
    _change("add_edges", self, u, v, data, etype)


def remove_nodes(self: Any, nids: Any, ntype: Any = None, store_ids: bool = False) -> None:
    """In place of ``DGLGraph.remove_nodes``: of a view of the whole graph, too."""
    _change("remove_nodes", self, nids, ntype, store_ids)


def _change(name: str, graph: Any, *arguments: Any) -> None:
    """Change a graph in place."""
    change = originals[f"dgl.heterograph:DGLGraph.{name}"]
    if not is_partitioned(graph):
        change(graph, *arguments)
        return

    @on_whole_graph
    def changed(whole: Any, *arguments: Any) -> Any:
        change(whole, *arguments)
        return whole

    view = changed(graph, *arguments)
    graph._graph = view._graph
    graph._node_frames, graph._edge_frames = view._node_frames, view._edge_frames


@on_whole_graph
def to_int32(self: Any) -> Any:
    """In place of ``DGLGraph.int``."""
    return originals["dgl.heterograph:DGLGraph.int"](self)


@on_whole_graph
def to_int64(self: Any) -> Any:
    """In place of ``DGLGraph.long``."""
    return originals["dgl.heterograph:DGLGraph.long"](self)

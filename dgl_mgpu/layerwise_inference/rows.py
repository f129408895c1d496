"""Rows of nodes, which models take and give, alone or in dicts, lists and tuples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import dgl
import torch
from dgl import DGLGraph

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.pinning.pinning import PinnedMemory, gather_pinned_tensor_rows
from dgl_mgpu.store.feature_storage import TableStorage
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.store.memory.segment import Segment

Graph: TypeAlias = DGLGraph | StoreGraph
#: Tensors, columns or outlines in dicts, lists and tuples, as models take and give them.
Tree = Any

ASKED = "infer all nodes of a graph"


@dataclass(frozen=True)
class Outline:
    """What rows of nodes of one type look like."""

    ntype: str
    row_shape: torch.Size
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows that nobody needs; NaN, or zeros of integers, to be noticed if somebody does."""
        fill = math.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
        shape = (len(ids), *self.row_shape)
        return torch.full(shape, fill, dtype=self.dtype, device=ids.device)


@dataclass(frozen=True)
class Column:
    """A row for each node of a type, wherever these are kept."""

    ntype: str
    rows: torch.Tensor | TableStorage
    #: Holds the rows pinned.
    pin: PinnedMemory | None = None
    #: Where ranks share the rows.
    memory: Segment | None = None

    @property
    def outline(self) -> Outline:
        return Outline(self.ntype, self.rows.shape[1:], self.rows.dtype)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of some nodes, on the device of ``ids``."""
        if not isinstance(self.rows, torch.Tensor):
            return self.rows.fetch(ids, ids.device)
        if self.rows.device == ids.device:
            return self.rows.index_select(0, ids)
        if ids.is_cuda and self.rows.is_pinned() and self.rows.is_contiguous():
            return gather_pinned_tensor_rows(self.rows, ids)
        return self.rows.index_select(0, ids.to(self.rows.device)).to(ids.device)

    def own_rows(self) -> torch.Tensor:
        """The rows of all nodes, which other ranks do not see changes of."""
        assert isinstance(self.rows, torch.Tensor)
        if self.memory is None:
            return self.rows
        own = torch.from_numpy(self.memory.own_bytes())
        return own.view(self.rows.dtype).view(self.rows.shape)

    def all_rows(self, device: torch.device) -> torch.Tensor:
        """The rows of all nodes, on a device."""
        if isinstance(self.rows, torch.Tensor):
            return self.rows.to(device)
        return self.rows.fetch(torch.arange(len(self.rows)), device)


@dataclass(frozen=True, kw_only=True)
class OwnColumn(Column):
    """Of which each machine has the rows of the nodes that it owns; all ranks take together."""

    g: StoreGraph
    #: What they are, for errors.
    name: str

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.rows, torch.Tensor)
        rows = self.g.rows_of_owners(self.name, self.ntype, self.rows, ids.to(self.g.device))
        return rows.to(ids.device)


_LEAVES = torch.Tensor | Outline | Column


def map_tree(change: Callable[[Any], Any], tree: Tree) -> Tree:
    """A tree with all its tensors or columns changed; what is neither stays."""
    if isinstance(tree, Mapping):
        return {key: map_tree(change, item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([map_tree(change, item) for item in tree])
    return change(tree) if isinstance(tree, _LEAVES) else tree


def leaves(tree: Tree) -> list[Any]:
    """The tensors or columns in a tree, in the order in which `mapped` meets them."""
    items: list[Any] = []
    map_tree(items.append, tree)
    return items


def on_host(tree: Tree) -> Tree:
    return map_tree(lambda rows: rows.cpu(), tree)


def as_columns(g: Graph, x: Any) -> Tree:
    """A model's input as a tree of columns, checked."""
    single = len(g.ntypes) == 1
    if isinstance(x, str):
        by_type = {ntype: _feature(g, x, ntype) for ntype in g.ntypes}
        columns = {n: Column(n, rows) for n, rows in by_type.items() if rows is not None}
        if not columns:
            raise InvalidInputError(
                ASKED, f"the graph has no node feature {x!r}", "pass x, a tensor of the input rows"
            )
        return columns[g.ntypes[0]] if single else columns
    if isinstance(x, torch.Tensor) and single:
        return _checked(g, g.ntypes[0], x)
    if isinstance(x, Mapping) and x:
        if set(x) <= set(g.ntypes):
            return {ntype: _checked(g, ntype, rows) for ntype, rows in x.items()}
        return {name: as_columns(g, rows) for name, rows in x.items()}
    if isinstance(x, Sequence) and x and all(isinstance(name, str) for name in x):
        return {name: as_columns(g, name) for name in x}
    raise InvalidInputError(
        ASKED,
        f"x is of type {type(x).__name__}",
        "pass a tensor or a feature's name"
        if single
        else f"pass a dict of tensors by node type, of {g.ntypes}, or a feature's name",
    )


def _feature(g: Graph, name: str, ntype: str) -> torch.Tensor | TableStorage | None:
    is_dgls = isinstance(g, DGLGraph)
    if name == dgl.NID and not (is_dgls and name in g.nodes[ntype].data):
        return torch.arange(g.num_nodes(ntype), device=g.device)
    if is_dgls:
        return g.nodes[ntype].data.get(name)
    try:
        return g.get_node_storage(name, ntype)
    except InvalidInputError:
        return None


def _checked(g: Graph, ntype: str, rows: torch.Tensor) -> Column:
    shape = tuple(rows.shape) if isinstance(rows, torch.Tensor) else None
    if not shape or shape[0] != g.num_nodes(ntype):
        raise InvalidInputError(
            ASKED,
            f"x has shape {shape}, but there are {g.num_nodes(ntype)} nodes of type {ntype!r}",
            "pass a row for each node",
        )
    return Column(ntype, rows)

"""Blocks, the bipartite graphs of mini-batches, of graphs made of tensors.

Making a DGLBlock the ordinary way takes DGL longer than a GPU takes to sample one, and most of it
is the same for every block of a graph: see `BlockTypes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from dgl import utils
from dgl.base import EID, NID
from dgl.frame import Column, Frame, Scheme
from dgl.heterograph import DGLBlock, DGLGraph

from dgl_mgpu.graph.dispatch import as_tensor
from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.index import GraphSchema, TensorIndex
from dgl_mgpu.graph.relation import Compressed, Coo, Relation
from dgl_mgpu.ops.unique import append_unique
from dgl_mgpu.utils.types import CanonicalEtype

#: What a column has that holds a tensor and nothing else, and one of ids.
_PLAIN_COLUMN = dict(vars(Column(torch.empty(0))))
_ID_COLUMNS = {
    dtype: {**_PLAIN_COLUMN, "storage": None, "scheme": Scheme((), dtype)}
    for dtype in (torch.int32, torch.int64)
}


def graph_to_block(
    g: DGLGraph,
    dst_nodes: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
    include_dst_in_src: bool = True,
    src_nodes: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
) -> DGLBlock:
    """``dgl.to_block`` of a graph made of tensors.

    Raises `InvalidCallError` if an edge ends at a node that is not among ``dst_nodes``, or begins
    at one that is not among ``src_nodes``.
    """
    index: TensorIndex = g._graph
    if dst_nodes is None:
        ends: dict[str, list[torch.Tensor]] = {}
        for etype, relation in zip(g.canonical_etypes, index.relations, strict=True):
            ends.setdefault(etype[2], []).append(relation.coo().col)
        dst_nodes = {ntype: torch.cat(nodes).unique() for ntype, nodes in ends.items()}
    dst_ids = _by_type(g, dst_nodes, "dst_nodes")
    src_ids = [] if src_nodes is None else _by_type(g, src_nodes, "src_nodes")
    relations, sources, eids = _relabel(index, dst_ids, include_dst_in_src, src_ids)
    return block_types(g.ntypes, g.canonical_etypes).block(relations, sources, dst_ids, eids, g)


def to_block(
    index: TensorIndex,
    dst_nodes: Sequence[torch.Tensor],
    include_dst_in_src: bool,
    src_nodes: Sequence[torch.Tensor],
) -> tuple[TensorIndex, list[torch.Tensor], list[torch.Tensor]]:
    """``_CAPI_DGLToBlock``, which raises as `graph_to_block`.

    Nodes are given by type; without ``src_nodes`` the sources are found, in the order of their
    first occurrence and, with ``include_dst_in_src``, after the destinations.  Returns the block,
    its sources of every node type, and the ids of its edges of every type.
    """
    targets = [as_tensor(nodes) for nodes in dst_nodes]
    given = [as_tensor(nodes) for nodes in src_nodes]
    relations, sources, eids = _relabel(index, targets, include_dst_in_src, given)
    counts = [len(nodes) for nodes in (*sources, *targets)]
    return TensorIndex(index.schema.block, counts, relations), sources, eids


def _by_type(g: DGLGraph, nodes: Any, name: str) -> list[torch.Tensor]:
    """Node ids that a user gives, one tensor a node type."""
    if not isinstance(nodes, Mapping):
        if len(g.ntypes) > 1:
            raise InvalidCallError(
                "make a block",
                f"{name} is not a dict, but the graph has the node types {g.ntypes}",
                f"pass {name} as a dict of tensors by node type",
            )
        nodes = {g.ntypes[0]: nodes}
    return [
        utils.toindex(nodes.get(ntype, []), g._idtype_str).tousertensor(ctx=g.device)
        for ntype in g.ntypes
    ]


def _relabel(
    index: TensorIndex,
    targets: list[torch.Tensor],
    include_dst_in_src: bool,
    given: list[torch.Tensor],
) -> tuple[list[Relation], list[torch.Tensor], list[torch.Tensor]]:
    """The relations of a block, its source nodes and the ids of its edges."""
    ends = index.schema.ends
    edges = [
        # Without destinations, a type has no edges: those that it has in the graph are left out.
        relation.coo() if targets[dst].numel() else Coo(targets[dst], targets[dst])
        for relation, (_, dst) in zip(index.relations, ends, strict=True)
    ]
    sources = []
    rows: dict[int, torch.Tensor] = {}
    cols: dict[int, torch.Tensor] = {}
    for ntype, nodes in enumerate(targets):
        outgoing = {n: edges[n].row for n, (src, _) in enumerate(ends) if src == ntype}
        incoming = {n: edges[n].col for n, (_, dst) in enumerate(ends) if dst == ntype}
        if include_dst_in_src and not given:
            # Destinations are all known, so the first new nodes are sources.
            unique, numbers = _number(nodes, [*incoming.values(), *outgoing.values()])
            by_col, by_row = numbers[: len(incoming)], numbers[len(incoming) :]
        else:
            unique, by_row = _number(given[ntype] if given else nodes[:0], [*outgoing.values()])
            _, by_col = _number(nodes, [*incoming.values()])
        sources.append(given[ntype] if given else unique)
        rows.update(zip(outgoing, by_row, strict=True))
        cols.update(zip(incoming, by_col, strict=True))
    local = [Coo(rows[n], cols[n]) for n in range(len(edges))]
    sizes = [(sources[src].numel(), targets[dst].numel()) for src, dst in ends]
    facts = torch.stack(list(map(_facts, local, sizes))).tolist()
    relations = []
    for whole, coo, size, (no_source, no_target, grouped) in zip(
        edges, local, sizes, facts, strict=True
    ):
        if no_target:
            raise _unknown("dst_nodes", "end", whole.col[coo.col >= size[1]])
        if no_source:
            raise _unknown("src_nodes", "begin", whole.row[coo.row >= size[0]])
        csc = Compressed(_bounds(coo.col, size[1]), coo.row, None) if grouped else None
        relations.append(Relation(*size, coo=coo, csc=csc))
    ids = [torch.arange(row.numel(), dtype=row.dtype, device=row.device) for row, _ in local]
    return relations, sources, ids


def _number(
    nodes: torch.Tensor, ends: list[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Nodes and what the ends of edges add to them; the number of each end."""
    if not ends:
        return nodes, []
    unique, numbers = append_unique(nodes, ends[0] if len(ends) == 1 else torch.cat(ends))
    return unique, numbers.split([len(end) for end in ends])


def _facts(local: Coo, size: tuple[int, int]) -> torch.Tensor:
    """Whether edges begin or end where they must not, and whether they are grouped by their end."""
    row, col = local
    return torch.stack(
        [(row >= size[0]).any(), (col >= size[1]).any(), (col[1:] >= col[:-1]).all()]
    )


def _unknown(name: str, verb: str, nodes: torch.Tensor) -> InvalidCallError:
    return InvalidCallError(
        "make a block",
        f"there are edges that {verb} at node {int(nodes[0])}, which is not in {name}",
        f"pass all nodes at which edges {verb}",
    )


def _bounds(cols: torch.Tensor, num_dst: int) -> torch.Tensor:
    """Where the edges of each destination begin, of edges grouped by it."""
    places = torch.arange(num_dst + 1, dtype=cols.dtype, device=cols.device)
    return torch.searchsorted(cols, places, out_int32=cols.dtype == torch.int32)


class BlockTypes:
    """Makes blocks of graphs with these node and edge types."""

    def __init__(self, ntypes: Sequence[str], canonical_etypes: Sequence[CanonicalEtype]) -> None:
        numbers = {ntype: number for number, ntype in enumerate(ntypes)}
        #: The numbers of the node types that each edge type goes from and to.
        self.ends = [(numbers[src], numbers[dst]) for src, _, dst in canonical_etypes]
        self._schema = GraphSchema.of(len(ntypes), self.ends).block
        none = torch.empty(0, dtype=torch.int64)
        relations = [Relation(0, 0, coo=Coo(none, none)) for _ in self.ends]
        index = TensorIndex(self._schema, [0] * (2 * len(ntypes)), relations)
        names = list(ntypes)
        pattern = DGLBlock(index, (names, names), [etype for _, etype, _ in canonical_etypes])
        #: Of every block, but for what is set in :meth:`block`.
        self._attributes = dict(vars(pattern))

    def block(
        self,
        relations: Sequence[Relation],
        src_nodes: Sequence[torch.Tensor],
        dst_nodes: Sequence[torch.Tensor],
        eids: Sequence[torch.Tensor],
        parent: DGLGraph | None = None,
    ) -> DGLBlock:
        """A block with the original ids of its nodes and edges, and with ``parent``'s features."""
        ids = src_nodes[0]
        return self.blank(ids.dtype, ids.device, parent).fill(relations, src_nodes, dst_nodes, eids)

    def blank(
        self, idtype: torch.dtype, device: torch.device, parent: DGLGraph | None = None
    ) -> BlankBlock:
        """A block whose nodes and edges, with ids on ``device``, are filled in later.

        It has the features of ``parent``, which are gathered when they are first looked at.
        """
        node_frames = [_BlankFrame(NID, idtype) for _ in range(self._schema.num_ntypes)]
        edge_frames = [_BlankFrame(EID, idtype) for _ in self.ends]
        if parent is not None:
            for frame, whole in zip(node_frames, 2 * parent._node_frames, strict=True):
                frame.add_features(whole, device)
            for frame, whole in zip(edge_frames, parent._edge_frames, strict=True):
                frame.add_features(whole)
        block = DGLBlock.__new__(DGLBlock)
        block.__dict__ = {
            **self._attributes,
            "_node_frames": [frame.frame for frame in node_frames],
            "_edge_frames": [frame.frame for frame in edge_frames],
        }
        return BlankBlock(block, self._schema, node_frames + edge_frames)


class BlankBlock:
    """A block except for its nodes and edges, which may take a GPU a while to find."""

    def __init__(self, block: DGLBlock, schema: GraphSchema, frames: Sequence[_BlankFrame]) -> None:
        self._block, self._schema = block, schema
        #: Of its node types, sources first, and of its edge types.
        self._frames = frames

    def fill(
        self,
        relations: Sequence[Relation],
        src_nodes: Sequence[torch.Tensor],
        dst_nodes: Sequence[torch.Tensor],
        eids: Sequence[torch.Tensor],
    ) -> DGLBlock:
        """The block with these nodes and edges, one tensor a type; for one call."""
        ids_of_all = (*src_nodes, *dst_nodes, *eids)
        counts = [frame.fill(ids) for frame, ids in zip(self._frames, ids_of_all, strict=True)]
        num_nodes = counts[: self._schema.num_ntypes]
        self._block._graph = TensorIndex(self._schema, num_nodes, relations)
        return self._block


class _BlankFrame:
    """``Frame({name: ids})``, in a third of its time, with the ids of its rows left open."""

    __slots__ = ("_ids", "_nested", "_others", "_sliced", "frame")

    def __init__(self, name: str, idtype: torch.dtype) -> None:
        self._ids = Column.__new__(Column)
        self._ids.__dict__ = _ID_COLUMNS[idtype].copy()
        #: Columns that lack but the ids, and by name those that are made of them.
        self._sliced: list[Column] = []
        self._nested: dict[str, Column] = {}
        #: By name, those that know themselves how to have fewer rows.
        self._others: dict[str, Column] = {}
        self.frame = Frame.__new__(Frame)
        self.frame.__dict__ = {
            "_columns": {name: self._ids},
            "_num_rows": 0,
            "_initializers": {},
            "_default_initializer": None,
        }

    def add_features(self, whole: Frame, device: torch.device | None = None) -> None:
        """Add rows of another frame, as its ``subframe`` does.

        With a device, they are copied there, where they are elsewhere, when they are looked at.
        """
        frame = self.frame
        frame._initializers = whole._initializers
        frame._default_initializer = whole._default_initializer
        rows = {}
        for name, column in whole._columns.items():
            if type(column) is not Column:
                rows[name] = self._others[name] = column
                continue
            rows[name] = row = _column(
                storage=column.storage,
                scheme=column.scheme,
                device=column.device,
                deferred_dtype=column.deferred_dtype,
            )
            if device is not None and column.device is None and column.storage.device != device:
                row.device = (device, {})
            if column.index is None:
                self._sliced.append(row)
            else:
                self._nested[name] = column
        frame._columns = {**rows, **frame._columns}

    def fill(self, ids: torch.Tensor) -> int:
        self._ids.storage = ids
        for column in self._sliced:
            column.index = ids
        for name, column in self._nested.items():
            self.frame._columns[name].index = column.subcolumn(ids).index
        for name, column in self._others.items():
            self.frame._columns[name] = column.subcolumn(ids)
        count = self.frame._num_rows = ids.shape[0]
        return count


@lru_cache(maxsize=64)
def _block_types(
    ntypes: tuple[str, ...], canonical_etypes: tuple[CanonicalEtype, ...]
) -> BlockTypes:
    return BlockTypes(ntypes, canonical_etypes)


def block_types(ntypes: Sequence[str], canonical_etypes: Sequence[CanonicalEtype]) -> BlockTypes:
    return _block_types(tuple(ntypes), tuple(canonical_etypes))


def _column(**attributes: Any) -> Column:
    """``Column``, with all attributes that are not plain."""
    column = Column.__new__(Column)
    column.__dict__ = {**_PLAIN_COLUMN, **attributes}
    return column

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
from dgl.frame import Frame
from dgl.heterograph import DGLBlock, DGLGraph

from dgl_mgpu.graph.block_frames import BlockFrame, Features
from dgl_mgpu.graph.dispatch import as_tensor
from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.index import GraphSchema, TensorIndex
from dgl_mgpu.graph.relation import Compressed, Coo, Relation
from dgl_mgpu.ops.unique import append_unique
from dgl_mgpu.utils.types import CanonicalEtype


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
    counts = [nodes.shape[0] for nodes in dst_ids]
    features = Features.of_graph(g, sources[0].device)
    types = block_types(g.ntypes, g.canonical_etypes)
    return types.block(relations, sources, dst_ids, counts, eids, features)


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
    facts = torch.stack(list(map(_facts, local))).tolist()
    relations = []
    for whole, coo, size, (last_row, last_col, descents) in zip(
        edges, local, sizes, facts, strict=True
    ):
        if last_col >= size[1]:
            raise _unknown("dst_nodes", "end", whole.col[coo.col >= size[1]])
        if last_row >= size[0]:
            raise _unknown("src_nodes", "begin", whole.row[coo.row >= size[0]])
        csc = Compressed(_bounds(coo.col, size[1]), coo.row, None) if not descents else None
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


def _facts(local: Coo) -> torch.Tensor:
    """The last nodes at which edges begin and end; how many end at an earlier one than before."""
    row, col = local
    if not row.numel():
        return row.new_tensor([-1, -1, 0])
    return torch.stack([row.max(), col.max(), (col[1:] < col[:-1]).sum(dtype=col.dtype)])


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
    """Makes blocks of graphs with these edge types, from and to nodes of these types."""

    def __init__(
        self,
        srctypes: Sequence[str],
        dsttypes: Sequence[str],
        canonical_etypes: Sequence[CanonicalEtype],
    ) -> None:
        #: The numbers of the node types that each edge type goes from and to, on their sides.
        self.ends = [(srctypes.index(src), dsttypes.index(dst)) for src, _, dst in canonical_etypes]
        count = len(srctypes) + len(dsttypes)
        self._schema = GraphSchema.of(count, [(s, len(srctypes) + d) for s, d in self.ends])
        none = torch.empty(0, dtype=torch.int64)
        relations = [Relation(0, 0, coo=Coo(none, none)) for _ in self.ends]
        index = TensorIndex(self._schema, [0] * count, relations)
        etypes = [etype for _, etype, _ in canonical_etypes]
        pattern = DGLBlock(index, ([*srctypes], [*dsttypes]), etypes)
        #: Of every block, but for what is set in :meth:`of_frames`.
        self._attributes = dict(vars(pattern))

    def block(
        self,
        relations: Sequence[Relation],
        src_nodes: Sequence[torch.Tensor],
        dst_nodes: Sequence[torch.Tensor],
        num_dst: Sequence[int],
        eids: Sequence[torch.Tensor],
        features: Features | None = None,
    ) -> DGLBlock:
        """A block with the original ids of its nodes and edges, and features of its graph.

        By type, the first ``num_dst`` of ``dst_nodes`` are the destinations.
        """
        num_src = [nodes.shape[0] for nodes in src_nodes]
        of_nodes = features.of_nodes if features is not None else [None] * len(num_src)
        of_edges = features.of_edges if features is not None else [None] * len(eids)
        ids = (*src_nodes, *dst_nodes)
        counts = [*num_src, *num_dst]
        return self.of_frames(
            relations,
            counts,
            [BlockFrame(NID, *of) for of in zip(ids, counts, (*of_nodes, *of_nodes), strict=True)],
            [
                BlockFrame(EID, edges, edges.shape[0], columns)
                for edges, columns in zip(eids, of_edges, strict=True)
            ],
        )

    def of_frames(
        self,
        relations: Sequence[Relation],
        counts: Sequence[int],
        node_frames: Sequence[Frame],
        edge_frames: Sequence[Frame],
    ) -> DGLBlock:
        """A block with these frames; counts and frames of nodes are those of sources first."""
        block = DGLBlock.__new__(DGLBlock)
        block.__dict__ = {
            **self._attributes,
            "_graph": TensorIndex(self._schema, counts, relations),
            "_node_frames": node_frames,
            "_edge_frames": edge_frames,
        }
        return block


_block_types = lru_cache(maxsize=64)(BlockTypes)


def block_types(
    ntypes: Sequence[str],
    canonical_etypes: Sequence[CanonicalEtype],
    dsttypes: Sequence[str] | None = None,
) -> BlockTypes:
    """What makes blocks with these types; those of destinations are those of sources by default."""
    srctypes = tuple(ntypes)
    targets = srctypes if dsttypes is None else tuple(dsttypes)
    return _block_types(srctypes, targets, tuple(canonical_etypes))

"""Parts of a graph: those between nodes, of edges, and of the edges at nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from dgl_mgpu.graph.dispatch import as_tensor
from dgl_mgpu.graph.index import SubgraphIndex, TensorIndex
from dgl_mgpu.graph.relation import Compressed, Coo, Relation, check_ids
from dgl_mgpu.ops.unique import append_unique


def number(ids: torch.Tensor, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number nodes, ids below ``num_nodes``, by their first occurrence.

    Returns each node once, and the number of each id: ``nodes[local]`` is ``ids``.
    """
    if ids.numel() < num_nodes:
        return append_unique(ids[:0], ids)
    # Fewer nodes than ids: a table of all nodes is smaller than a hash table.
    places = torch.arange(ids.numel(), device=ids.device)
    at = ids.long()
    first = places.new_full((num_nodes,), ids.numel())
    first.scatter_reduce_(0, at, places, "amin")
    nodes = ids[first[at] == places]
    numbers = torch.empty(num_nodes, dtype=ids.dtype, device=ids.device)
    numbers[nodes.long()] = torch.arange(nodes.numel(), dtype=ids.dtype, device=ids.device)
    return nodes, numbers[at]


def compact(
    indexes: Sequence[TensorIndex],
    edges: Sequence[Sequence[Coo]],
    always: Sequence[torch.Tensor] | None = None,
) -> tuple[list[TensorIndex], list[torch.Tensor]]:
    """Graphs with the given edges of each graph and type, without the nodes that are at no edge.

    The graphs have the same node types, with as many nodes of each.  Also returns the nodes of each
    type that stay: first those of ``always``, then the others by their first occurrence.
    """
    num_ntypes = indexes[0].schema.num_ntypes
    parts: list[list[torch.Tensor]] = [[] for _ in range(num_ntypes)]
    for ntype, nodes in enumerate(always or ()):
        parts[ntype].append(nodes)
    for index, of_graph in zip(indexes, edges, strict=True):
        for (src, dst), (row, col) in zip(index.schema.ends, of_graph, strict=True):
            parts[src].append(row)
            parts[dst].append(col)
    empty = torch.empty(0, dtype=indexes[0].idtype, device=indexes[0].device)
    remaining, numbers = [], []
    for ntype, ids in enumerate(parts):
        nodes, local = number(torch.cat([empty, *ids]), indexes[0].num_nodes(ntype))
        remaining.append(nodes)
        numbers.append(_in_turn(local, ids))
    for ntype in range(len(always or ())):
        next(numbers[ntype])
    sizes = [nodes.numel() for nodes in remaining]
    graphs = []
    for index in indexes:
        ends = index.schema.ends
        # A row and a column at a time, in the order in which they were put in.
        relations = [
            Relation(
                sizes[src], sizes[dst], coo=Coo(row=next(numbers[src]), col=next(numbers[dst]))
            )
            for src, dst in ends
        ]
        graphs.append(TensorIndex(index.schema, sizes, relations))
    return graphs, remaining


def _in_turn(local: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    return iter(local.split([part.numel() for part in parts]))


def node_subgraph(index: TensorIndex, induced_nodes: Sequence[torch.Tensor]) -> SubgraphIndex:
    """The edges between given nodes; node ``i`` of the part is the ``i``-th of its type.

    Edges are sorted by source, and at one source as they are in the graph's CSR.  Where a node is
    given twice, edges go out of both and into the first.
    """
    nodes = [as_tensor(ids) for ids in induced_nodes]
    sizes = [ids.numel() for ids in nodes]
    finders = [_Finder(ids) for ids in nodes]
    relations, eids = [], []
    for (src, dst), relation in zip(index.schema.ends, index.relations, strict=True):
        csr = relation.csr()
        positions, counts = csr.entries(nodes[src])
        local = finders[dst].places(csr.indices[positions])
        inside = (local >= 0).nonzero().squeeze(1)
        # How many of the entries before each node's are inside.
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        indptr = torch.searchsorted(inside, ends, out_int32=index.idtype == torch.int32)
        matrix = Compressed(indptr, local[inside].to(index.idtype), None)
        relations.append(Relation(sizes[src], sizes[dst], csr=matrix))
        eids.append(csr.ids_at(positions[inside]))
    return SubgraphIndex(TensorIndex(index.schema, sizes, relations), nodes, eids)


class _Finder:
    """Where in a list of nodes a node is, by binary search."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self._sorted, self._order = nodes.sort(stable=True)

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """The first place of each, int64; -1 where a node is not in the list."""
        if self._sorted.numel() == 0:
            return torch.full_like(ids, -1, dtype=torch.int64)
        at = torch.searchsorted(self._sorted, ids).clamp_(max=self._sorted.numel() - 1)
        return torch.where(self._sorted[at] == ids, self._order[at], -1)


def edge_subgraph(
    index: TensorIndex, induced_edges: Sequence[torch.Tensor], preserve_nodes: bool
) -> SubgraphIndex:
    """Given edges of each type, in the order in which they are given.

    With ``preserve_nodes`` all nodes stay, under their ids, and the list of induced nodes is empty.
    Else those at the edges are numbered by their first occurrence: in the sources of the first
    type, in its destinations, and so on.
    """
    eids = [as_tensor(ids) for ids in induced_edges]
    for relation, ids in zip(index.relations, eids, strict=True):
        check_ids(ids, relation.num_edges, "edges")
    edges = [Coo(*relation.find(ids)) for relation, ids in zip(index.relations, eids, strict=True)]
    return _of_edges(index, edges, eids, relabel=not preserve_nodes)


def in_subgraph(
    index: TensorIndex, nodes: Sequence[torch.Tensor], relabel_nodes: bool
) -> SubgraphIndex:
    """The edges into given nodes of each type, node after node: ``_CAPI_DGLInSubgraph``."""
    return _at_nodes(index, nodes, relabel_nodes, Relation.in_edges, end=1)


def out_subgraph(
    index: TensorIndex, nodes: Sequence[torch.Tensor], relabel_nodes: bool
) -> SubgraphIndex:
    """The edges out of given nodes, as `in_subgraph`: ``_CAPI_DGLOutSubgraph``."""
    return _at_nodes(index, nodes, relabel_nodes, Relation.out_edges, end=0)


def _at_nodes(
    index: TensorIndex,
    nodes: Sequence[torch.Tensor],
    relabel: bool,
    edges_at: Callable[[Relation, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    end: int,
) -> SubgraphIndex:
    edges, eids = [], []
    for ends, relation in zip(index.schema.ends, index.relations, strict=True):
        row, col, ids = edges_at(relation, as_tensor(nodes[ends[end]]))
        edges.append(Coo(row, col))
        eids.append(ids)
    return _of_edges(index, edges, eids, relabel)


def _of_edges(
    index: TensorIndex, edges: list[Coo], eids: list[torch.Tensor], relabel: bool
) -> SubgraphIndex:
    if relabel:
        (graph,), nodes = compact([index], [edges])
        return SubgraphIndex(graph, nodes, eids)
    relations = [
        Relation(relation.num_src, relation.num_dst, coo=coo)
        for relation, coo in zip(index.relations, edges, strict=True)
    ]
    return SubgraphIndex(TensorIndex(index.schema, index._num_nodes, relations), [], eids)

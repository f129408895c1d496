"""Parts of a graph: those between nodes, of edges, and of the edges at nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dgl_mgpu.graph.arrays import as_tensor
from dgl_mgpu.graph.index import SubgraphIndex, TensorIndex
from dgl_mgpu.graph.numbering import compact
from dgl_mgpu.graph.relation import Compressed, Coo, Relation, check_ids


def node_subgraph(index: TensorIndex, induced_nodes: Sequence[torch.Tensor]) -> SubgraphIndex:
    """The edges between given nodes.

    Parameters
    ----------
    index : TensorIndex
    induced_nodes : list of Tensor
        For every node type its nodes: node ``i`` of the part is the ``i``-th.

    Returns
    -------
    SubgraphIndex
        Edges are sorted by source, and at one source as they are in the graph's CSR.  Where a
        node is given twice, edges go out of both and into the first.

    Raises
    ------
    UnknownIdError
        If a node does not exist.
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
        eids.append(_edge_ids(csr, positions[inside]))
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


def _edge_ids(matrix: Compressed, positions: torch.Tensor) -> torch.Tensor:
    if matrix.eids is None:
        return positions.to(matrix.indices.dtype)
    return matrix.eids[positions]


def edge_subgraph(
    index: TensorIndex, induced_edges: Sequence[torch.Tensor], preserve_nodes: bool
) -> SubgraphIndex:
    """Given edges, in the order in which they are given.

    Parameters
    ----------
    index : TensorIndex
    induced_edges : list of Tensor
        Edge ids, for every edge type.
    preserve_nodes : bool
        Whether all nodes stay, under their ids.  Else those at the edges are numbered by their
        first occurrence: in the sources of the first type, in its destinations, and so on.

    Returns
    -------
    SubgraphIndex
        With ``preserve_nodes`` the list of induced nodes is empty.

    Raises
    ------
    UnknownIdError
        If an edge does not exist.
    """
    eids = [as_tensor(ids) for ids in induced_edges]
    for relation, ids in zip(index.relations, eids, strict=True):
        check_ids(ids, relation.num_edges, "edges")
    found = [Coo(*relation.find(ids)) for relation, ids in zip(index.relations, eids, strict=True)]
    return _of_edges(index, found, eids, relabel=not preserve_nodes)


def in_subgraph(
    index: TensorIndex, nodes: Sequence[torch.Tensor], relabel_nodes: bool
) -> SubgraphIndex:
    """The edges into given nodes, node after node: ``_CAPI_DGLInSubgraph``.

    Parameters
    ----------
    index : TensorIndex
    nodes : list of Tensor
        For every node type.
    relabel_nodes : bool
        Whether nodes at no edge are left out, as in `edge_subgraph`.

    Raises
    ------
    UnknownIdError
        If a node does not exist.
    """
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
    found, eids = [], []
    for ends, relation in zip(index.schema.ends, index.relations, strict=True):
        row, col, ids = edges_at(relation, as_tensor(nodes[ends[end]]))
        found.append(Coo(row, col))
        eids.append(ids)
    return _of_edges(index, found, eids, relabel)


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

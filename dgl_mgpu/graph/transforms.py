"""Graphs made from graphs: C functions of DGL's ``transform``, but for blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgl_mgpu.graph.arrays import as_tensor
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.numbering import compact
from dgl_mgpu.graph.relation import Compressed, Coo, Relation


def compact_graphs(
    indexes: Sequence[TensorIndex], always_preserve: Sequence[torch.Tensor]
) -> tuple[list[TensorIndex], list[torch.Tensor]]:
    """Graphs without the nodes that are at no edge of any of them: ``_CAPI_DGLCompactGraphs``.

    Parameters
    ----------
    indexes : list of TensorIndex
        Of the same nodes.
    always_preserve : list of Tensor
        For every node type, nodes that stay in any case.

    Returns
    -------
    list of TensorIndex
    nodes : list of Tensor
        For every node type the nodes that stay: those of ``always_preserve``, then the others
        by their first occurrence.
    """
    edges = [[relation.coo() for relation in index.relations] for index in indexes]
    return compact(indexes, edges, [as_tensor(nodes) for nodes in always_preserve])


def to_simple(
    index: TensorIndex,
) -> tuple[TensorIndex, list[torch.Tensor], list[torch.Tensor]]:
    """The graph with one edge for all that are parallel: ``_CAPI_DGLToSimpleHetero``.

    Returns
    -------
    TensorIndex
        Its edges are sorted by source and destination.
    counts : list of Tensor, of the ids' dtype
        How many edges of the graph each of these was, for every edge type.
    edge_maps : list of Tensor, of the ids' dtype
        Which of these each edge of the graph is.
    """
    relations, counts, maps = [], [], []
    for relation in index.relations:
        pairs = relation.pairs()
        row, col, eids = pairs.owners(), pairs.indices, pairs.edge_ids()
        is_new = torch.ones_like(row, dtype=torch.bool)
        is_new[1:] = (row[1:] != row[:-1]) | (col[1:] != col[:-1])
        first = is_new.nonzero().squeeze(1)
        edges = Coo(row[first], col[first])
        relations.append(Relation(relation.num_src, relation.num_dst, coo=edges))
        end = first.new_full((1,), row.numel())
        counts.append(torch.cat([first, end]).diff().to(index.idtype))
        number = (is_new.cumsum(0) - 1).to(index.idtype)
        maps.append(torch.empty_like(number).index_copy_(0, eids.long(), number))
    return TensorIndex(index.schema, index._num_nodes, relations), counts, maps


def line_graph(index: TensorIndex, backtracking: bool) -> TensorIndex:
    """The graph whose nodes are this one's edges: ``_CAPI_DGLHeteroLineGraph``.

    An edge leads to those that begin where it ends, but not to itself; with ``backtracking`` off
    neither to those that lead back to where it begins.
    """
    relation = index.relations[0]
    row, col = relation.coo()
    csr = relation.csr()
    positions, counts = csr.entries(col)
    edge = torch.arange(relation.num_edges, device=index.device).repeat_interleave(
        counts, output_size=positions.numel()
    )
    following = csr.edge_ids()[positions]
    kept = following != edge
    if not backtracking:
        kept &= csr.indices[positions] != row[edge]
    at = kept.nonzero().squeeze(1)
    edges = Coo(edge[at].to(index.idtype), following[at])
    return TensorIndex.single(Relation(relation.num_edges, relation.num_edges, coo=edges), 1)


def sort_out_edges(
    index: TensorIndex, tags: torch.Tensor, num_tags: int
) -> tuple[TensorIndex, torch.Tensor]:
    """Sort the edges of every node in the CSR by their tags: ``_CAPI_DGLHeteroSortOutEdges``.

    Parameters
    ----------
    index : TensorIndex
        Of one edge type.
    tags : Tensor, integer, shape (num_edges,)
        Of every edge, below ``num_tags``.
    num_tags : int

    Returns
    -------
    TensorIndex
        With its CSR alone.
    offsets : Tensor, of the ids' dtype, shape (num_nodes, num_tags + 1)
        Edges of tag ``t`` of a node are its ``offsets[t]``-th to before its ``offsets[t + 1]``-th.
    """
    relation = index.relations[0]
    matrix, offsets = _sorted_by_tag(relation.csr(), as_tensor(tags), num_tags)
    return _with_matrix(index, Relation(relation.num_src, relation.num_dst, csr=matrix)), offsets


def sort_in_edges(
    index: TensorIndex, tags: torch.Tensor, num_tags: int
) -> tuple[TensorIndex, torch.Tensor]:
    """The same in the CSC: ``_CAPI_DGLHeteroSortInEdges``."""
    relation = index.relations[0]
    matrix, offsets = _sorted_by_tag(relation.csc(), as_tensor(tags), num_tags)
    return _with_matrix(index, Relation(relation.num_src, relation.num_dst, csc=matrix)), offsets


def _with_matrix(index: TensorIndex, relation: Relation) -> TensorIndex:
    return TensorIndex(index.schema, index._num_nodes, [relation])


def _sorted_by_tag(
    matrix: Compressed, tags: torch.Tensor, num_tags: int
) -> tuple[Compressed, torch.Tensor]:
    eids = matrix.edge_ids()
    # Entries are grouped by node already: nodes and tags are one key.
    keys, order = (matrix.owners().long() * num_tags + tags[eids.long()]).sort(stable=True)
    num_nodes = matrix.indptr.numel() - 1
    wanted = torch.arange(num_nodes * num_tags, device=keys.device)
    starts = torch.searchsorted(keys, wanted).view(num_nodes, num_tags)
    ends = torch.cat([starts, matrix.indptr[1:, None].long()], dim=1)
    offsets = (ends - matrix.indptr[:-1, None]).to(matrix.indptr.dtype)
    return Compressed(matrix.indptr, matrix.indices[order], eids[order]), offsets

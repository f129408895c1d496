"""Graphs made from graphs: C functions of DGL's ``transform``, except for blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgl_mgpu.graph.dispatch import as_tensor
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.relation import Compressed, Coo, Relation
from dgl_mgpu.graph.subgraph import compact


def compact_graphs(
    indexes: Sequence[TensorIndex], always_preserve: Sequence[torch.Tensor]
) -> tuple[list[TensorIndex], list[torch.Tensor]]:
    """Graphs without the nodes that are at no edge of any of them: ``_CAPI_DGLCompactGraphs``.

    Also returns the nodes of each type that stay: those of ``always_preserve``, then the others by
    their first occurrence.
    """
    edges = [[relation.coo() for relation in index.relations] for index in indexes]
    return compact(indexes, edges, [as_tensor(nodes) for nodes in always_preserve])


def to_simple(
    index: TensorIndex,
) -> tuple[TensorIndex, list[torch.Tensor], list[torch.Tensor]]:
    """The graph with one edge for all that are parallel: ``_CAPI_DGLToSimpleHetero``.

    Its edges are sorted by source and destination.  Also returns, for each edge type, how many
    edges each of these was, and which of these each edge of the graph is; of the ids' dtype.
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
    is_kept = following != edge
    if not backtracking:
        is_kept &= csr.indices[positions] != row[edge]
    at = is_kept.nonzero().squeeze(1)
    edges = Coo(edge[at].to(index.idtype), following[at])
    return TensorIndex.single(Relation(relation.num_edges, relation.num_edges, coo=edges), 1)


def sort_out_edges(
    index: TensorIndex, tags: torch.Tensor, num_tags: int
) -> tuple[TensorIndex, torch.Tensor]:
    """Sort the edges of every node in the CSR by their tags: ``_CAPI_DGLHeteroSortOutEdges``.

    The graph has one edge type, and a tag below ``num_tags`` for each edge.  The result has its CSR
    alone. Offsets have shape (num_nodes, num_tags + 1): a node's edges of tag ``t`` are its
    ``offsets[t]``-th to before its ``offsets[t + 1]``-th.
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


def coo_is_sorted(row: torch.Tensor, col: torch.Tensor, num_rows: int, num_cols: int) -> int:
    """0, 1 if edges are sorted by row, 2 if also by column: ``_CAPI_DGLCOOIsSorted``."""
    ascend = (row[:-1] <= row[1:]).all()
    both = ((row[:-1] < row[1:]) | (col[:-1] <= col[1:])).all()
    by_row, by_both = torch.stack([ascend, ascend & both]).tolist()
    return int(by_row) + int(by_both)

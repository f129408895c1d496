"""Graphs cut into parts for files on disk: C functions of DGL's ``partition``."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from dgl import ndarray as nd
from scipy import sparse
from scipy.sparse.csgraph import reverse_cuthill_mckee

from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.index import SubgraphIndex, TensorIndex
from dgl_mgpu.graph.relation import Compressed, Coo, Relation
from dgl_mgpu.graph.subgraph import number

log = logging.getLogger(__name__)


def make_symmetric(index: TensorIndex) -> TensorIndex:
    """The edges of a graph and those back, each once."""
    relation = index.relations[0]
    row, col = relation.coo()
    count = relation.num_src
    ends = torch.cat([row * count + col, col * count + row]).unique()
    edges = Coo(ends.div(max(count, 1), rounding_mode="floor"), ends % max(count, 1))
    return TensorIndex(index.schema, index._num_nodes, [Relation(count, count, coo=edges)])


def assign_nodes(
    index: TensorIndex, num_parts: int, weights: torch.Tensor, mode: str, by_cut: bool
) -> torch.Tensor:
    """A part for each node, where DGL has METIS.

    Nodes that weigh the same are put into an order in which neighbours are near each other, that
    of Cuthill and McKee, and cut into pieces of equal sizes.  Parts are as balanced as METIS's;
    more edges lie between them.
    """
    log.warning(
        "METIS is in DGL's binary, which is not used: parts of equal sizes are cut from an order of"
        " the nodes, with more edges between them"
    )
    relation = index.relations[0]
    count = relation.num_src
    row, col = (end.numpy() for end in relation.coo())
    matrix = sparse.csr_matrix((np.ones(len(row), np.int8), (row, col)), shape=(count, count))
    order = reverse_cuthill_mckee(matrix, symmetric_mode=True)
    kinds = weights.reshape(count, -1).numpy() if weights.numel() else np.zeros((count, 1))
    # In-degrees as weights differ between nodes: only those of types tell nodes apart.
    of_types = np.unique(kinds > 0, axis=0, return_inverse=True)[1].reshape(-1)
    parts = np.empty(count, dtype=np.int64)
    for kind in range(int(of_types.max(initial=-1)) + 1):
        nodes = order[of_types[order] == kind]
        parts[nodes] = np.arange(len(nodes)) * num_parts // max(1, len(nodes))
    return torch.from_numpy(parts)


def reorder(index: TensorIndex, new_ids: torch.Tensor) -> TensorIndex:
    """The same graph with other numbers of its nodes; edges keep theirs."""
    relation = index.relations[0]
    row, col = relation.coo()
    edges = Coo(new_ids[row.long()].to(row.dtype), new_ids[col.long()].to(col.dtype))
    renumbered = Relation(relation.num_src, relation.num_dst, coo=edges, formats=relation.formats)
    return TensorIndex(index.schema, index._num_nodes, [renumbered])


def reassign_edges(
    index: TensorIndex, etypes: torch.Tensor, parts: torch.Tensor, by_destination: bool
) -> torch.Tensor:
    """Number edges by the part of their node, in a part by type, else as they are at nodes.

    Changes the graph itself, and returns the edges' numbers before.
    """
    relation = index.relations[0]
    matrix = relation.csc() if by_destination else relation.csr()
    before = matrix.edge_ids()
    order = torch.arange(before.numel())
    if etypes.numel():
        owners = parts[matrix.owners().long()].long()
        keys = owners * (int(etypes.max()) + 1) + etypes[before.long()].long()
        order = keys.argsort(stable=True)
    numbers = torch.empty_like(before).index_copy_(
        0, order, torch.arange(before.numel(), dtype=before.dtype)
    )
    held: dict[str, Any] = {"csc" if by_destination else "csr": Compressed(*matrix[:2], numbers)}
    index.relations[0] = Relation(
        relation.num_src, relation.num_dst, formats=relation.formats, **held
    )
    index._cache.clear()
    return before[order]


class HaloSubgraphIndex(SubgraphIndex):
    """A part of a graph with nodes of other parts around it."""

    inner_nodes: torch.Tensor


def partition_with_halo(
    index: TensorIndex, parts: torch.Tensor, num_hops: int
) -> list[HaloSubgraphIndex]:
    """For each part its nodes with their in-edges, and what is some hops away against the edges.

    With at least one hop, also out-edges to nodes of other parts.  Nodes of the part come first.
    """
    if parts.dtype != torch.int64 or index.idtype != torch.int64:
        raise InvalidCallError(
            "cut a graph into parts with halos",
            f"its ids are {index.idtype}, those of parts {parts.dtype}",
            "convert the graph with g.long(), and the parts to int64",
        )
    count = int(parts.max()) + 1 if parts.numel() else 0
    return [_part(index, (parts == part).nonzero().squeeze(1), num_hops) for part in range(count)]


def _part(index: TensorIndex, inner: torch.Tensor, num_hops: int) -> HaloSubgraphIndex:
    relation = index.relations[0]
    is_inner = torch.zeros(relation.num_src, dtype=torch.bool)
    is_inner[inner] = True
    is_known = is_inner.clone()
    taken = []

    def take(edges: tuple[torch.Tensor, ...], mask: torch.Tensor) -> None:
        taken.append(tuple(part[mask] for part in edges))

    edges = relation.in_edges(inner)
    take(edges, is_inner[edges[0]] | (num_hops > 0))
    for _ in range(1, num_hops):
        found = edges[0][~is_known[edges[0]]]
        frontier = number(found, relation.num_src)[0]
        is_known[frontier] = True
        edges = relation.in_edges(frontier)
        take(edges, ~is_inner[edges[0]])
    if num_hops > 0:
        out = relation.out_edges(inner)
        take(out, ~is_inner[out[1]])
    src, dst, eids = (torch.cat(parts) for parts in zip(*taken, strict=True))
    nodes, local = number(torch.cat([inner, src, dst]), relation.num_src)
    _, row, col = local.split([len(inner), len(src), len(dst)])
    part = TensorIndex(
        index.schema, [len(nodes)], [Relation(len(nodes), len(nodes), coo=Coo(row, col))]
    )
    subgraph = HaloSubgraphIndex(part, [nodes], [eids])
    subgraph.inner_nodes = is_inner[nodes].int()
    return subgraph


def inner_nodes(subgraph: HaloSubgraphIndex) -> nd.NDArray:
    """Whether each node is of the part itself, int32."""
    return nd.NDArray(subgraph.inner_nodes)

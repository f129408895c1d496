"""Numbers for the nodes of a part of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.relation import Coo, Relation
from dgl_mgpu.ops.unique import append_unique


def number(ids: torch.Tensor, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number nodes by their first occurrence.

    Parameters
    ----------
    ids : Tensor, int32 or int64, shape (n,)
        Below ``num_nodes``.
    num_nodes : int

    Returns
    -------
    nodes : Tensor, same dtype, shape (m,)
        Each node once.
    local : Tensor, same dtype, shape (n,)
        The number of each: ``nodes[local]`` is ``ids``.
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
    """Graphs with the given edges and without the nodes that are at no edge.

    Parameters
    ----------
    indexes : list of TensorIndex
        Of the same node types, with as many nodes of each.
    edges : list of list of Coo
        For every graph the edges of every type.
    always : list of Tensor, optional
        For every node type, nodes that stay in any case and come first.

    Returns
    -------
    list of TensorIndex
    nodes : list of Tensor
        For every node type the nodes that stay; the others by their first occurrence.
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
    kept, numbers = [], []
    for ntype, ids in enumerate(parts):
        nodes, local = number(torch.cat([empty, *ids]), indexes[0].num_nodes(ntype))
        kept.append(nodes)
        numbers.append(_in_turn(local, ids))
    for ntype in range(len(always or ())):
        next(numbers[ntype])
    sizes = [nodes.numel() for nodes in kept]
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
    return graphs, kept


def _in_turn(local: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    return iter(local.split([part.numel() for part in parts]))

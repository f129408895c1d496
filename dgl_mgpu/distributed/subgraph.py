"""Small subgraphs of a partitioned graph, which every rank then has as a graph of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dgl
import torch
from dgl import DGLGraph

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError


def khop_in_subgraph(
    graph: PartitionedGraph, nodes: Any, k: int
) -> tuple[DGLGraph, dict[str, torch.Tensor]]:
    """The nodes from which ``k`` edges or fewer lead to some, and all edges between these.

    Collective: every rank passes the same nodes, by their ids in the whole graph, and gets the same
    graph, with the features of its nodes and edges, and by node type the numbers there of the nodes
    that were passed.  Else as ``dgl.khop_in_subgraph``.
    """
    wanted = _as_ids(graph, nodes)
    index = graph._graph
    reached = {
        ntype: torch.isin(index.node_ids(number).long(), wanted[ntype]).double()
        for number, ntype in enumerate(graph.ntypes)
    }
    last = reached
    outgoing = index.reverse()
    for _ in range(k):
        following = {ntype: torch.zeros_like(marks) for ntype, marks in reached.items()}
        for number, (src, _, dst) in enumerate(graph.canonical_etypes):
            relation = outgoing.get_relation_graph(number)
            following[src] += relation.gspmm("copy_lhs", "sum", last[dst].unsqueeze(1), None)[:, 0]
        last = {ntype: marks.clamp(max=1) for ntype, marks in following.items()}
        reached = {ntype: torch.maximum(marks, last[ntype]) for ntype, marks in reached.items()}
    own_ids = {ntype: index.node_ids(number).long() for number, ntype in enumerate(graph.ntypes)}
    ids = {
        ntype: _of_all_ranks(own[reached[ntype] > 0]).sort().values
        for ntype, own in own_ids.items()
    }
    edges, places = {}, {}
    for number, etype in enumerate(graph.canonical_etypes):
        src, _, dst = etype
        relation = index.get_relation_graph(number)
        inside = (relation.gather_src(reached[src]) * relation.gather_dst(reached[dst])).bool()
        ends = [relation.gather_src(own_ids[src]), relation.gather_dst(own_ids[dst])]
        found = torch.stack([index.edge_ids(number).long(), *ends])[:, inside]
        found = _of_all_ranks(found.T).T
        places[etype], source, destination = found[:, found[0].argsort()]
        edges[etype] = (
            torch.searchsorted(ids[src], source),
            torch.searchsorted(ids[dst], destination),
        )
    counts = {ntype: len(of_type) for ntype, of_type in ids.items()}
    subgraph = dgl.heterograph(edges, counts, idtype=graph.idtype, device=graph.device)
    for ntype in graph.ntypes:
        for key, rows in graph.nodes[ntype].data.items():
            subgraph.nodes[ntype].data[key] = rows_of_nodes(graph, rows, ids[ntype], ntype)
    for etype in graph.canonical_etypes:
        for key, rows in graph.edges[etype].data.items():
            subgraph.edges[etype].data[key] = rows_of_edges(graph, rows, places[etype], etype)
    inverse = {
        ntype: torch.searchsorted(ids[ntype], of_type).to(graph.idtype)
        for ntype, of_type in wanted.items()
    }
    return subgraph, inverse


def rows_of_nodes(
    graph: PartitionedGraph, rows: torch.Tensor, ids: torch.Tensor, ntype: str | None = None
) -> torch.Tensor:
    """All ranks' rows of some nodes, by their ids in the whole graph in ascending order."""
    own = graph._graph.node_ids(graph.get_ntype_id(ntype))
    return _picked(graph, rows, own, ids)


def rows_of_edges(
    graph: PartitionedGraph, rows: torch.Tensor, ids: torch.Tensor, etype: Any = None
) -> torch.Tensor:
    """All ranks' rows of some edges, by their ids in the whole graph in ascending order."""
    return _picked(graph, rows, graph._graph.edge_ids(graph.get_etype_id(etype)), ids)


def _picked(
    graph: PartitionedGraph, rows: torch.Tensor, own: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    chosen = torch.isin(own.long(), ids)
    picked = rows.new_zeros(len(ids), *rows.shape[1:])
    picked = picked.index_put((torch.searchsorted(ids, own[chosen].long()),), rows[chosen])
    return graph._graph.all_gather(picked).sum(0, dtype=rows.dtype)


def _of_all_ranks(rows: torch.Tensor) -> torch.Tensor:
    everyones = Communicator.of_all_machines().all_gather(rows.cpu())
    return torch.cat(everyones).to(rows.device)


def _as_ids(graph: PartitionedGraph, nodes: Any) -> dict[str, torch.Tensor]:
    """By node type, ids that are there; of types that are not asked for none."""
    action = "find the nodes around some of a partitioned graph"
    if not isinstance(nodes, Mapping):
        if len(graph.ntypes) > 1:
            raise InvalidInputError(
                action,
                "the graph has several types of nodes",
                f"pass a dict of ids by type: {', '.join(graph.ntypes)}",
            )
        nodes = {graph.ntypes[0]: nodes}
    ids = {ntype: torch.empty(0, dtype=torch.int64, device=graph.device) for ntype in graph.ntypes}
    for ntype, of_type in nodes.items():
        graph.get_ntype_id(ntype)  # raises for one that is not there
        ids[ntype] = torch.as_tensor(of_type, device=graph.device).long().reshape(-1)
        count = graph.ownership[ntype].num_nodes
        outside = ids[ntype][(ids[ntype] < 0) | (ids[ntype] >= count)]
        if len(outside):
            raise IdOutOfRangeError(
                action,
                f"there is no node {int(outside[0])} of type {ntype!r}",
                f"pass ids in the whole graph, in [0, {count})",
            )
    return ids

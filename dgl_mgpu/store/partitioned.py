"""A graph in parts, of which each machine reads its own: DGL's partitions.

A machine has the features and in-edges of its own nodes, by ids of the whole graph, and features of
these edges.  What it keeps of others' nodes, the replicas, and of their edges, the features of all,
it asks their owners for while the store is filled, some at a time.
"""

from __future__ import annotations

import numpy as np
import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.store.content import Content, StoreSchema
from dgl_mgpu.store.graph_structure import edge_table, node_table, topology_table
from dgl_mgpu.store.memory import FeatureSource, TopologySource
from dgl_mgpu.store.memory.format import Source
from dgl_mgpu.store.part_exchange import PartExchange
from dgl_mgpu.store.part_files import ACTION, EdgeSummary, Part, facts_of
from dgl_mgpu.store.span import require_same
from dgl_mgpu.utils.types import CanonicalEtype

#: Nodes whose neighbours are counted at a time.
_CHUNK_NODES = 1 << 20


def content_of(part: Part, machines: Communicator) -> Content:
    """A graph as tables, of which this machine has a part; collective of machines' first ranks."""
    require_same(machines, facts_of(part))  # before what parts have is added up
    exchange = PartExchange(machines)
    num_nodes = {ntype: int(ids.bounds[-1]) for ntype, ids in part.nodes.items()}
    out_degrees = {ntype: np.zeros(count, np.int64) for ntype, count in num_nodes.items()}
    tables: dict[str, Source] = {}
    for etype, own in part.in_edges.items():
        summary = machines.run_all(ACTION, own.summary)
        out_degrees[etype[0]] += _sum(summary.out_degrees, machines)
        tables[topology_table(etype)] = _topology(part, etype, summary, exchange, machines)
    for ntype, features in part.features.items():
        for name, rows in features.items():
            table = node_table(ntype, name)
            bounds = part.nodes[ntype].bounds
            tables[table] = FeatureSource(exchange.rows(table, rows, bounds), ntype)
    for etype, features in part.edge_features.items():
        for name, rows in features.items():
            table = edge_table(etype, name)
            tables[table] = FeatureSource(exchange.rows(table, rows, part.edges[etype].bounds))
    return Content(
        StoreSchema(num_nodes, list(part.edges)),
        tables,
        torch.empty(0, dtype=torch.int64),
        bounds={ntype: ids.bounds.tolist() for ntype, ids in part.nodes.items()},
        degrees=out_degrees,
        exchange=exchange,
    )


def _topology(
    part: Part,
    etype: CanonicalEtype,
    summary: EdgeSummary,
    exchange: PartExchange,
    machines: Communicator,
) -> TopologySource:
    own, bounds = part.in_edges[etype], part.nodes[etype[2]].bounds
    (degrees,) = machines.all_gather_cat(ACTION, [torch.from_numpy(own.degrees)])
    indptr = np.zeros(int(bounds[-1]) + 1, np.int64)
    np.cumsum(degrees.numpy(), out=indptr[1:])
    num_edges = int(part.edges[etype].bounds[-1])

    def check() -> None:
        if indptr[-1] != num_edges:
            raise InvalidInputError(
                ACTION,
                f"its parts have {indptr[-1]:,} edges of type {etype}, of {num_edges:,}",
                "partition the graph anew",
            )

    machines.run_all(ACTION, check)
    table, firsts = topology_table(etype), indptr[bounds]
    sources = exchange.rows(table, own.sources, firsts, (summary.lowest, summary.highest))
    eids = None
    if not all(machines.all_gather(summary.in_order)):
        eids = exchange.rows(f"ids of {table}", own.eids, firsts)
    return TopologySource(
        indptr,
        sources,  # type: ignore[arg-type]
        eids,  # type: ignore[arg-type]
        own.num_sources,
        torch.int64,
        etype[2],
    )


def _sum(own: np.ndarray, machines: Communicator) -> np.ndarray:
    """Of all machines, some numbers at a time."""
    total = np.empty_like(own)
    for begin in range(0, len(own), _CHUNK_NODES):
        chunk = torch.from_numpy(own[begin : begin + _CHUNK_NODES])
        (counts,) = machines.all_gather_cat(ACTION, [chunk])
        total[begin : begin + len(chunk)] = counts.view(machines.size, -1).sum(0).numpy()
    return total

"""Subgraphs of partitioned graphs, as graphs of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgl_mgpu.dgl.patches import DISTRIBUTED, on_whole_graph, override
from dgl_mgpu.dgl.patches.readout import refuse_for_partition
from dgl_mgpu.graph.originals import originals


@override("dgl.subgraph:khop_in_subgraph", DISTRIBUTED)
@on_whole_graph
def khop_in_subgraph(
    graph: Any, nodes: Any, k: int, *, relabel_nodes: bool = True, store_ids: bool = True,
    output_device: Any = None,
) -> Any:  # fmt: skip
    """In place of ``dgl.khop_in_subgraph``: every process gets the same graph, with ids."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    if not isinstance(graph._graph, DistributedGraphIndex):  # the whole graph behind a view of it
        return originals["dgl.subgraph:khop_in_subgraph"](
            graph, nodes, k, relabel_nodes=relabel_nodes, store_ids=store_ids,
            output_device=output_device,
        )  # fmt: skip
    if not relabel_nodes:
        raise refuse_for_partition(
            "make a subgraph with all nodes of a partitioned graph", "use relabel_nodes=True"
        )
    from dgl_mgpu.distributed.subgraph import khop_in_subgraph as around

    subgraph, numbers = around(graph, nodes, k)
    if output_device is not None:
        subgraph = subgraph.to(output_device)
    if isinstance(nodes, Mapping):
        return subgraph, {ntype: numbers[ntype] for ntype in nodes}
    return subgraph, numbers[graph.ntypes[0]]


@on_whole_graph
def node_subgraph(
    graph: Any, nodes: Any, *, relabel_nodes: bool = True, store_ids: bool = True,
    output_device: Any = None,
) -> Any:  # fmt: skip
    """In place of ``dgl.node_subgraph``."""
    return originals["dgl.subgraph:node_subgraph"](
        graph, nodes, relabel_nodes=relabel_nodes, store_ids=store_ids, output_device=output_device
    )


@on_whole_graph
def edge_subgraph(
    graph: Any, edges: Any, *, relabel_nodes: bool = True, store_ids: bool = True,
    output_device: Any = None,
) -> Any:  # fmt: skip
    """In place of ``dgl.edge_subgraph``."""
    return originals["dgl.subgraph:edge_subgraph"](
        graph, edges, relabel_nodes=relabel_nodes, store_ids=store_ids, output_device=output_device
    )

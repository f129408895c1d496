"""Subgraphs of graphs that are partitioned under ``--partition``."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import on_whole_graph
from dgl_mgpu.graph.originals import originals


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

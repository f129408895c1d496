"""Blocks of graphs made of tensors."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.originals import originals


def to_block(
    g: Any, dst_nodes: Any = None, include_dst_in_src: bool = True, src_nodes: Any = None
) -> Any:
    """In place of ``dgl.to_block``, which asks arrays where they are as tensors cannot tell."""
    from dgl_mgpu.graph.index import TensorIndex

    if isinstance(g._graph, TensorIndex):
        from dgl_mgpu.graph.blocks import graph_to_block

        return graph_to_block(g, dst_nodes, include_dst_in_src, src_nodes)
    original = originals["dgl.transforms.to_block:to_block"]
    return original(g, dst_nodes, include_dst_in_src, src_nodes)

"""Blocks of graphs made of tensors."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import TENSOR_INDEX, override


@override("dgl.transforms.to_block:to_block", TENSOR_INDEX)
def to_block(
    g: Any, dst_nodes: Any = None, include_dst_in_src: bool = True, src_nodes: Any = None
) -> Any:
    """In place of ``dgl.to_block``, which reads the context that only arrays have."""
    from dgl_mgpu.graph.blocks import graph_to_block

    return graph_to_block(g, dst_nodes, include_dst_in_src, src_nodes)

"""GATConv with residuals where there is no node: on a rank, or of some type in a block."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches.nn.pytorch.conv import forward_with_residual


def forward(
    self: Any, graph: Any, feat: Any, edge_weight: Any = None, get_attention: bool = False
) -> Any:
    """In place of ``GATConv.forward``."""
    return forward_with_residual("gatconv:GATConv", self, graph, feat, edge_weight, get_attention)

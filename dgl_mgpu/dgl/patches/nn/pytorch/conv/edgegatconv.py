"""EdgeGATConv with residuals where there is no node: on a rank, or of some type in a block."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches.nn.pytorch.conv import forward_with_residual


def forward(self: Any, graph: Any, feat: Any, edge_feat: Any, get_attention: bool = False) -> Any:
    """In place of ``EdgeGATConv.forward``."""
    return forward_with_residual(
        "edgegatconv:EdgeGATConv", self, graph, feat, edge_feat, get_attention
    )

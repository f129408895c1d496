"""GatedGCNConv with batch normalisation over the nodes or edges of all processes."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches.nn.pytorch.conv import forward_over_all_rows


def forward(self: Any, graph: Any, feat: Any, edge_feat: Any) -> Any:
    """In place of ``GatedGCNConv.forward``."""
    return forward_over_all_rows("gatedgcnconv:GatedGCNConv", self, graph, feat, edge_feat)

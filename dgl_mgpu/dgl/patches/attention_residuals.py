"""Attention with residuals where there is no node: on a rank, or of some type in a block."""

from __future__ import annotations

import copy
from typing import Any

from dgl_mgpu.graph.originals import originals


def gat(
    self: Any, graph: Any, feat: Any, edge_weight: Any = None, get_attention: bool = False
) -> Any:
    """In place of ``GATConv.forward``."""
    return _forward("gatconv:GATConv", self, graph, feat, edge_weight, get_attention)


def gatv2(self: Any, graph: Any, feat: Any, get_attention: bool = False) -> Any:
    """In place of ``GATv2Conv.forward``."""
    return _forward("gatv2conv:GATv2Conv", self, graph, feat, get_attention)


def edge_gat(self: Any, graph: Any, feat: Any, edge_feat: Any, get_attention: bool = False) -> Any:
    """In place of ``EdgeGATConv.forward``."""
    return _forward("edgegatconv:EdgeGATConv", self, graph, feat, edge_feat, get_attention)


def _forward(name: str, module: Any, graph: Any, feat: Any, *others: Any) -> Any:
    original = originals[f"dgl.nn.pytorch.conv.{name}.forward"]
    residual = module.res_fc
    if residual is None or graph.num_dst_nodes():
        return original(module, graph, feat, *others)
    # DGL views residuals as rows of so many heads, of which there is no telling without rows.
    without = copy.copy(module)
    without._modules = {**module._modules, "res_fc": None}
    found = original(without, graph, feat, *others)
    # Its parameters have a gradient, as those of other ranks: of zeros.
    nothing = 0 * residual((feat[1] if isinstance(feat, tuple) else feat)[:0]).sum()
    return (found[0] + nothing, *found[1:]) if isinstance(found, tuple) else found + nothing

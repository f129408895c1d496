"""Shared by several of DGL's convolutions: residuals without nodes."""

from __future__ import annotations

import copy
from typing import Any

from dgl_mgpu.graph.originals import originals


def forward_with_residual(name: str, module: Any, graph: Any, feat: Any, *others: Any) -> Any:
    """The original ``forward``, also where there is no node: on a rank, or of a type in a block."""
    original = originals[f"dgl.nn.pytorch.conv.{name}.forward"]
    residual = module.res_fc
    if residual is None or graph.num_dst_nodes():
        return original(module, graph, feat, *others)
    # DGL views residuals as rows of so many heads, a number that no rows do not determine.
    without = copy.copy(module)
    without._modules = {**module._modules, "res_fc": None}
    result = original(without, graph, feat, *others)
    # Gives its parameters a gradient of zeros, since on other ranks they have one.
    zero = 0 * residual((feat[1] if isinstance(feat, tuple) else feat)[:0]).sum()
    return (result[0] + zero, *result[1:]) if isinstance(result, tuple) else result + zero

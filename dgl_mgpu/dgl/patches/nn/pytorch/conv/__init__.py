"""Shared by several of DGL's convolutions: residuals without nodes, and projected rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

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


def projected(module: Any, feat: Any, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Rows of sources by head, and of destinations if ``feat`` is a pair, else None."""
    shape = module._num_heads, module._out_feats
    if not isinstance(feat, tuple):
        return module.fc(rows[0]).view(len(rows[0]), *shape), None
    of_source, of_destination = (
        (module.fc_src, module.fc_dst) if hasattr(module, "fc_src") else (module.fc, module.fc)
    )
    return (
        of_source(rows[0]).view(len(rows[0]), *shape),
        of_destination(rows[1]).view(len(rows[1]), *shape),
    )

"""GraphConv, which counts edges once for a graph and puts no features into it."""

from __future__ import annotations

from typing import Any

import torch
from dgl.utils import expand_as_pair
from torch import Tensor

from dgl_mgpu.dgl.patches.nn.pytorch.conv import reduced, relation_of
from dgl_mgpu.graph.originals import originals


def forward(self: Any, graph: Any, feat: Any, weight: Any = None, edge_weight: Any = None) -> Any:
    """In place of ``GraphConv.forward``."""
    is_served = relation_of(graph) is not None and edge_weight is None
    is_refused = weight is not None and self.weight is not None
    if is_served and not is_refused and not self._allow_zero_in_degree:
        is_refused = graph._graph.lacks_in_edges(0)
    if not is_served or is_refused:
        original = originals["dgl.nn.pytorch.conv.graphconv:GraphConv.forward"]
        return original(self, graph, feat, weight, edge_weight)
    sources, destinations = expand_as_pair(feat, graph)
    if self._norm in ("left", "both"):
        sources = sources * factors_of(graph, "out", self._norm, sources)
    weight = self.weight if weight is None else weight
    if weight is not None and self._in_feats > self._out_feats:
        sources, weight = sources @ weight, None
    out = reduced(graph, "sum", sources)
    if weight is not None:
        out = out @ weight
    if self._norm in ("right", "both"):
        out = out * factors_of(graph, "in", self._norm, destinations)
    if self.bias is not None:
        out = out + self.bias
    return out if self._activation is None else self._activation(out)


def factors_of(graph: Any, side: str, norm: str, rows: Tensor) -> Tensor:
    """What rows are multiplied by for their nodes' "in"- or "out"-degrees."""

    def make(counts: Tensor) -> Tensor:
        counts = counts.to(rows).clamp(min=1)
        return counts.pow(-0.5) if norm == "both" else 1.0 / counts

    # Autocast makes powers in another dtype than that of the rows.
    is_autocast = torch.is_autocast_enabled(graph.device.type)
    name = norm, rows.dtype, rows.device, is_autocast
    factors = graph._graph.of_degrees(0, side, name, make)
    return factors.view(-1, *[1] * (rows.dim() - 1))

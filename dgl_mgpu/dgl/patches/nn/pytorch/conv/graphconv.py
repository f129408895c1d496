"""GraphConv, which counts each side's edges once and puts no features into the graph."""

from __future__ import annotations

from typing import Any

from dgl.utils import expand_as_pair
from torch import Tensor

from dgl_mgpu.dgl.patches.nn.pytorch.conv import degrees, reduced, relation_of
from dgl_mgpu.graph.originals import originals


def forward(self: Any, graph: Any, feat: Any, weight: Any = None, edge_weight: Any = None) -> Any:
    """In place of ``GraphConv.forward``."""
    relation = relation_of(graph)
    is_refused = weight is not None and self.weight is not None
    in_degrees = None
    if relation is not None and not self._allow_zero_in_degree:
        in_degrees = degrees(relation, "in")
        is_refused = is_refused or bool((in_degrees == 0).any())
    if relation is None or edge_weight is not None or is_refused:
        original = originals["dgl.nn.pytorch.conv.graphconv:GraphConv.forward"]
        return original(self, graph, feat, weight, edge_weight)
    sources, destinations = expand_as_pair(feat, graph)
    if self._norm in ("left", "both"):
        sources = sources * factors_of(self._norm, degrees(relation, "out"), sources)
    weight = self.weight if weight is None else weight
    if weight is not None and self._in_feats > self._out_feats:
        sources, weight = sources @ weight, None
    out = reduced(graph, "sum", sources)
    if weight is not None:
        out = out @ weight
    if self._norm in ("right", "both"):
        in_degrees = degrees(relation, "in") if in_degrees is None else in_degrees
        out = out * factors_of(self._norm, in_degrees, destinations)
    if self.bias is not None:
        out = out + self.bias
    return out if self._activation is None else self._activation(out)


def factors_of(norm: str, counts: Tensor, rows: Tensor) -> Tensor:
    """What rows are multiplied by for their degrees."""
    counts = counts.to(rows).clamp(min=1)
    factors = counts.pow(-0.5) if norm == "both" else 1.0 / counts
    return factors.view(-1, *[1] * (rows.dim() - 1))

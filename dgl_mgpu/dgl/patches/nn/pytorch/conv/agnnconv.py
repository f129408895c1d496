"""AGNNConv in one pass."""

from __future__ import annotations

from typing import Any

from dgl.utils import expand_as_pair
from torch.nn.functional import normalize

from dgl_mgpu.graph.originals import originals


def forward(self: Any, graph: Any, feat: Any) -> Any:
    """In place of ``AGNNConv.forward``."""
    from dgl_mgpu.graph.message_passing import attention

    features = feat if isinstance(feat, tuple) else (feat,)
    width = features[0].shape[-1]
    if attention.overwrites_sources(graph, feat) or not attention.serves(
        graph, 1, width, *features
    ):
        return originals["dgl.nn.pytorch.conv.agnnconv:AGNNConv.forward"](self, graph, feat)
    attention.refuse_nodes_without_edges(self, graph)
    values, of_destinations = expand_as_pair(feat, graph)
    left = normalize(values)
    is_same = of_destinations is values
    right = self.beta * (left if is_same else normalize(of_destinations))
    out = attention.of_rows(
        attention.relation_of(graph),
        values.unsqueeze(1),
        left.unsqueeze(1),
        right.to(values.dtype).unsqueeze(1),
        "dot",
    )
    return out.squeeze(1)

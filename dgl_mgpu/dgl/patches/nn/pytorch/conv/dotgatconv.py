"""DotGatConv in one pass."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.originals import originals


def forward(self: Any, graph: Any, feat: Any, get_attention: bool = False) -> Any:
    """In place of ``DotGatConv.forward``."""
    from dgl_mgpu.graph.message_passing import attention

    features = feat if isinstance(feat, tuple) else (feat,)
    if (
        get_attention
        or attention.overwrites_sources(graph, feat)
        or not attention.serves(graph, self._num_heads, self._out_feats, *features)
    ):
        original = originals["dgl.nn.pytorch.conv.dotgatconv:DotGatConv.forward"]
        return original(self, graph, feat, get_attention)
    attention.refuse_nodes_without_edges(self, graph)
    shape = self._num_heads, self._out_feats
    if isinstance(feat, tuple):
        values = self.fc_src(feat[0]).view(len(feat[0]), *shape)
        right = self.fc_dst(feat[1]).view(len(feat[1]), *shape)
    else:
        values = self.fc(feat).view(len(feat), *shape)
        right = None  # the first of the values
    scale = self._out_feats**-0.5
    return attention.of_rows(attention.relation_of(graph), values, None, right, "dot", scale=scale)

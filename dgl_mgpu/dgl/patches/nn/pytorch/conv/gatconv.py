"""GATConv in one pass; with residuals where there is no node: on a rank, or of some type."""

from __future__ import annotations

from typing import Any

from torch.nn import Dropout, LeakyReLU

from dgl_mgpu.dgl.patches.nn.pytorch.conv import forward_with_residual, projected


def forward(
    self: Any, graph: Any, feat: Any, edge_weight: Any = None, get_attention: bool = False
) -> Any:
    """In place of ``GATConv.forward``."""
    from dgl_mgpu.graph.message_passing import attention

    features = feat if isinstance(feat, tuple) else (feat,)
    shape = self._num_heads, self._out_feats
    if (
        get_attention
        or self.attn_l.shape != self.attn_r.shape
        or self.attn_l.shape != (1, self._num_heads, self._out_feats)
        or not attention.is_plain(self.leaky_relu, LeakyReLU)
        or not attention.is_plain(self.attn_drop, Dropout)
        or not attention.serves(graph, *shape, *features)
        or not attention.are_weights(graph, edge_weight, features[0].dtype)
    ):
        return forward_with_residual(
            "gatconv:GATConv", self, graph, feat, edge_weight, get_attention
        )
    attention.refuse_nodes_without_edges(self, graph)
    rows = [self.feat_drop(it) for it in features]
    sources, destinations = projected(self, feat, rows)
    bias = self.bias.view(shape) if self.has_explicit_bias else None
    # Else the sum is of the wider type; and of half types it is rounded too soon for gradients.
    is_bias_added = bias is not None and bias.dtype == sources.dtype and bias.itemsize > 2
    out = attention.additive(
        attention.relation_of(graph),
        sources,
        destinations,
        self.attn_l,
        self.attn_r,
        bias if is_bias_added else None,
        attention.by_edge(edge_weight, sources),
        self.leaky_relu.negative_slope,
        attention.dropped(self.attn_drop),
    )
    if self.res_fc is not None:
        residual = self.res_fc(rows[-1][: len(out)])
        # Heads of an identity may be fewer: they are the same for all.
        out = out + residual.view(len(out), residual.shape[1] // shape[1], shape[1])
    if bias is not None and not is_bias_added:
        out = out + bias
    return self.activation(out) if self.activation else out

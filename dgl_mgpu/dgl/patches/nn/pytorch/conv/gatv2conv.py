"""GATv2Conv in one pass; with residuals where there is no node: on a rank, or of a type."""

from __future__ import annotations

from typing import Any

from torch.nn import Dropout, LeakyReLU

from dgl_mgpu.dgl.patches.nn.pytorch.conv import forward_with_residual


def forward(self: Any, graph: Any, feat: Any, get_attention: bool = False) -> Any:
    """In place of ``GATv2Conv.forward``."""
    from dgl_mgpu.graph.message_passing import attention

    features = feat if isinstance(feat, tuple) else (feat,)
    if (
        get_attention
        or self.attn.shape != (1, self._num_heads, self._out_feats)
        or not attention.is_plain(self.leaky_relu, LeakyReLU)
        or not attention.is_plain(self.attn_drop, Dropout)
        or not attention.serves(graph, self._num_heads, self._out_feats, *features)
    ):
        return forward_with_residual("gatv2conv:GATv2Conv", self, graph, feat, get_attention)
    attention.refuse_nodes_without_edges(self, graph)
    shape, num_dst = (self._num_heads, self._out_feats), graph.num_dst_nodes()
    rows = [self.feat_drop(it) for it in features]
    values = self.fc_src(rows[0]).view(len(rows[0]), *shape)
    if self.share_weights and not isinstance(feat, tuple):
        right = None  # the first of the values
    else:
        right = self.fc_dst(rows[-1][:num_dst]).view(num_dst, *shape)
    out = attention.of_rows(
        attention.relation_of(graph),
        values,
        None,
        right,
        "gatv2",
        vector=self.attn[0].to(attention.computed_in(values.dtype)),
        negative_slope=self.leaky_relu.negative_slope,
        dropout=attention.dropped(self.attn_drop),
    )
    if self.res_fc is not None:
        residual = self.res_fc(rows[-1][:num_dst])
        out = out + residual.view(num_dst, residual.shape[1] // shape[1], shape[1])
    return self.activation(out) if self.activation else out

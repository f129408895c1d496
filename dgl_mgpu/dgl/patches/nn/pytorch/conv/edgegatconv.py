"""EdgeGATConv without rows of edges and heads; with residuals where there is no node: on a rank, or
of some type in a block.

Weights multiply an edge's feature before its matrix does.
"""

from __future__ import annotations

from typing import Any

import torch
from dgl import ops
from torch.nn import Dropout, LeakyReLU, Linear

from dgl_mgpu.dgl.patches.nn.pytorch.conv import forward_with_residual, projected


def forward(self: Any, graph: Any, feat: Any, edge_feat: Any, get_attention: bool = False) -> Any:
    """In place of ``EdgeGATConv.forward``."""
    from dgl_mgpu.graph.message_passing import attention

    features = feat if isinstance(feat, tuple) else (feat,)
    shape = self._num_heads, self._out_feats
    if (
        get_attention
        or any(it.shape != (1, *shape) for it in (self.attn_l, self.attn_r, self.attn_edge))
        or not attention.is_plain(self.leaky_relu, LeakyReLU)
        or not attention.is_plain(self.attn_drop, Dropout)
        or not attention.is_plain(self.fc_edge, Linear)
        or not attention.serves(graph, *shape, *features)
        or not attention.are_of_edges(graph, edge_feat, features[0].dtype, 2)
    ):
        return forward_with_residual(
            "edgegatconv:EdgeGATConv", self, graph, feat, edge_feat, get_attention
        )
    attention.refuse_nodes_without_edges(self, graph)
    rows = [self.feat_drop(it) for it in features]
    sources, destinations = projected(self, feat, rows)
    if destinations is None:
        destinations = sources[: graph.num_dst_nodes()]
    edges = edge_feat.to(sources.dtype)
    with torch.autocast(sources.device.type, enabled=False):
        matrices = self.fc_edge.weight.view(*shape, -1)
        scorers = (matrices * self.attn_edge[0].unsqueeze(2)).sum(1)
        # Scores are of the wider type, as in DGL.
        left, right = (sources * self.attn_l).sum(2), (destinations * self.attn_r).sum(2)
        scores = ops.u_add_v(graph, left, right) + edges @ scorers.to(edges.dtype).t()
        weights = self.attn_drop(ops.edge_softmax(graph, self.leaky_relu(scores)))
        weights = weights.to(sources.dtype)
        of_edges = attention.sums_of_edges(graph, edges, weights)
        out = ops.u_mul_e_sum(graph, sources, weights.unsqueeze(2))
        out = out + torch.einsum("nhw,how->nho", of_edges, matrices.to(out.dtype))
    if self.res_fc is not None:
        out = out + self.res_fc(rows[-1][: len(out)]).view(len(out), *shape)
    if self.bias is not None:
        out = out + self.bias.view(shape)
    return self.activation(out) if self.activation else out

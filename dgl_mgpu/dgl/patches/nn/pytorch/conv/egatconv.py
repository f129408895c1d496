"""EGATConv, whose softmax and sum take one pass."""

from __future__ import annotations

from typing import Any

import torch
from dgl import ops
from torch import Tensor
from torch.nn.functional import leaky_relu

from dgl_mgpu.graph.originals import originals


def forward(
    self: Any,
    graph: Any,
    nfeats: Any,
    efeats: Any,
    edge_weight: Any = None,
    get_attention: bool = False,
) -> Any:
    """In place of ``EGATConv.forward``."""
    from dgl_mgpu.graph.message_passing import attention
    from dgl_mgpu.ops.tall import tall_product

    features = nfeats if isinstance(nfeats, tuple) else (nfeats,)
    if (
        get_attention
        or self.attn.shape != (1, self._num_heads, self._out_edge_feats)
        or not attention.serves(graph, self._num_heads, self._out_node_feats, *features)
        or not attention.are_weights(graph, edge_weight, features[0].dtype)
        # DGL's layer refuses the rest: one feature for both ends of a block, other numbers of
        # edges, and nodes without in-edges.
        or (graph.is_block and len(features) == 1)
        or not isinstance(efeats, Tensor)
        or efeats.shape[:-1] != (graph.num_edges(),)
        or (graph.in_degrees() == 0).any()
    ):
        original = originals["dgl.nn.pytorch.conv.egatconv:EGATConv.forward"]
        return original(self, graph, nfeats, efeats, edge_weight, get_attention)
    edges = ops.u_add_v(graph, self.fc_ni(features[0]), self.fc_nj(features[-1]))
    edges = _added(edges, self.fc_fij(efeats))
    if self.bias is not None:
        edges = _added(edges, self.bias)
    edges = leaky_relu(edges, inplace=True)
    edges = edges.view(-1, self._num_heads, self._out_edge_feats)
    with torch.autocast(edges.device.type, enabled=False):
        # A product of matrices, each head's numbers in rows of its own and zeros in the others':
        # elementwise, it would write one more of the edges' size.
        scorers = torch.block_diag(*self.attn[0].to(edges.dtype).unsqueeze(2))
        logits = tall_product(edges.flatten(1), scorers)
    values = self.fc_node_src(features[0]).view(-1, self._num_heads, self._out_node_feats)
    out = attention.of_logits(
        attention.relation_of(graph), values, logits, attention.by_edge(edge_weight, values)
    )
    return out, edges


def _added(total: Tensor, term: Tensor) -> Tensor:
    """The sum, in place of the first unless it is wider."""
    return total.add_(term) if torch.result_type(total, term) == total.dtype else total + term

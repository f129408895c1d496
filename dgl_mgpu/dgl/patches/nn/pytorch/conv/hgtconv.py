"""HGTConv in one pass over the edges: a relation's matrices multiply rows of sources."""

from __future__ import annotations

from typing import Any

import torch
from dgl.nn.pytorch.linear import TypedLinear
from torch import Tensor

from dgl_mgpu.graph.originals import originals

#: Types of edges up to which each has a matrix product of its own: more take the host too long.
_MOST_TYPES = 64


def forward(self: Any, g: Any, x: Any, ntype: Any, etype: Any, *, presorted: bool = False) -> Any:
    """In place of ``HGTConv.forward``."""
    sources = _typed_sources(self, g, x, etype)
    if sources is None:
        original = originals["dgl.nn.pytorch.conv.hgtconv:HGTConv.forward"]
        return original(self, g, x, ntype, etype, presorted=presorted)
    from dgl_mgpu.graph.message_passing import attention
    from dgl_mgpu.ops.tall import tall_product

    self.presorted = presorted
    k, q, v = (it(x, ntype, presorted) for it in (self.linear_k, self.linear_q, self.linear_v))
    priorities = torch.stack(list(self.relation_pri), 1) / self.sqrt_d
    keys = self.relation_att, priorities[:, :, None, None]
    h = attention.of_rows(
        sources.edges,
        _multiplied(self, sources, v, self.relation_msg),
        _multiplied(self, sources, k, *keys),
        q.view(-1, self.num_heads, self.head_size),
        "dot",
    )
    # As in DGL: what a node was is mixed in.
    h = self.drop(self.linear_a(h.flatten(1), ntype, presorted))
    # Rows of nodes' types times a column: to take numbers by type, as DGL does, would add up the
    # gradients of all nodes of a type one by one.
    of_types = torch.arange(len(self.skip), device=ntype.device)
    is_type = (ntype.unsqueeze(1) == of_types).to(self.skip.dtype)
    alpha = tall_product(is_type, torch.sigmoid(self.skip).unsqueeze(1))
    residual = x if x.shape == h.shape else x @ self.residual_w
    h = h * alpha + residual * (1 - alpha)
    return self.norm(h) if self.use_norm else h


def _typed_sources(layer: Any, graph: Any, x: Any, etype: Any) -> Any:
    """Pairs of a source and a type if a graph has fewer of them than edges, of few types; else
    None.

    A block of a mini-batch is not asked, for which the host would wait: few of its edges have the
    same source.
    """
    from dgl.nn.pytorch.conv.hgtconv import HGTConv

    from dgl_mgpu.graph.message_passing import attention

    matrices = [*layer.relation_att, *layer.relation_msg]
    if (
        type(layer).message is not HGTConv.message
        or "message" in vars(layer)
        or not all(attention.is_plain(it, TypedLinear) and not it.regularizer for it in matrices)
        or not attention.serves(graph, layer.num_heads, layer.head_size, x)
        or graph.is_block
        or not isinstance(etype, Tensor)
        or etype.shape != (graph.num_edges(),)
        or etype.device != graph.device
    ):
        return None
    sources = attention.relation_of(graph).typed_sources(etype)
    has_fewer = (
        sources is not None
        and sources.are_few
        and len(sources.counts) <= _MOST_TYPES
        and max(sources.counts) < len(layer.relation_att[0].W)
    )
    return sources if has_fewer else None


def _multiplied(
    layer: Any, sources: Any, rows: Tensor, matrices: Any, factors: Tensor | float = 1.0
) -> Tensor:
    """Each head's rows of sources times the matrix of their type; (pairs, heads, width)."""
    from dgl_mgpu.graph.message_passing import operators
    from dgl_mgpu.ops.tall import tall_product

    of_pairs = operators.aggregate(sources.pairs, "sum", rows)
    of_pairs = of_pairs.view(-1, layer.num_heads, layer.head_size)
    of_types = torch.stack([it.W for it in matrices], 1) * factors
    parts, weights = of_pairs.split(list(sources.counts.values())), of_types.to(rows.dtype).unbind()
    with torch.autocast(rows.device.type, enabled=False):
        return torch.cat(
            [
                tall_product(part, weights[etype])
                for etype, part in zip(sources.counts, parts, strict=True)
            ]
        )

"""What DGL's attention layers compute of nodes' features, in one pass over the edges.

DGL composes them of operators that each write something for every edge and head, or every edge and
column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from dgl.base import DGLError
from dgl.heterograph import DGLGraph
from torch import Tensor, nn

from dgl_mgpu.graph.distributed import DistributedGraphIndex
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.message_passing.edge_sums import edge_sums
from dgl_mgpu.graph.relation import Relation
from dgl_mgpu.ops.attention import (
    AttentionOperands,
    AttentionScore,
    Draws,
    EdgeGradients,
    EdgeTerms,
    Entries,
    KeptOutput,
    attention,
    attention_backward,
    attention_forward,
    attention_products,
    attention_vectors,
    attention_vectors_backward,
    check_attention,
    check_sources,
    computed_in,
    drawn_key,
)
from dgl_mgpu.ops.attention_cuda import can_attend
from dgl_mgpu.ops.autograd import differentiable_once, is_transformed
from dgl_mgpu.ops.check import DTYPES


def serves(graph: Any, heads: int, width: int, *features: Any) -> bool:
    """Whether nodes of a graph can attend in one pass to values of this shape.

    ``features`` are what a layer is given: of nodes, of two dimensions.
    """
    if not isinstance(graph, DGLGraph):
        return False
    ends = _ends_of(graph._graph)
    if ends is None:
        return False
    counts = list(ends[: len(features)])
    # Of a graph that is no block, both ends have the one feature: they are the same nodes.
    has_both = len(features) == 2 or graph.is_block or len(graph.ntypes) == 1
    return (
        has_both
        and [it.shape[0] for it in features if isinstance(it, Tensor)] == counts
        and not has_any_global_hook()
        and all(
            isinstance(rows, Tensor) and rows.dim() == 2 and rows.dtype in DTYPES
            for rows in features
        )
        and all(can_attend(heads, width, dtype) for dtype in (torch.float32, features[0].dtype))
        and not is_transformed()
    )


def has_any_global_hook() -> bool:
    """Whether some hook is called for all modules; torch has this function since 2.5."""
    return bool(
        torch.nn.modules.module._global_forward_hooks
        or torch.nn.modules.module._global_forward_pre_hooks
        or torch.nn.modules.module._global_backward_hooks
        or torch.nn.modules.module._global_backward_pre_hooks
    )


def _ends_of(index: Any) -> tuple[int, int] | None:
    """Numbers of sources and destinations of a graph's only relation; None of other graphs."""
    if isinstance(index, DistributedGraphIndex):
        return index.attention_ends()
    if type(index) is not TensorIndex or len(index.relations) != 1:
        return None
    (relation,) = index.relations
    return relation.num_src, relation.num_dst


def are_weights(graph: DGLGraph, edge_weight: Any, dtype: torch.dtype) -> bool:
    """Whether a layer is given a number for each edge of a graph, or None for all of them.

    ``dtype`` is that of features: what numbers are computed in goes by it.
    """
    return edge_weight is None or are_of_edges(graph, edge_weight, dtype, 1)


def are_of_edges(graph: DGLGraph, given: Any, dtype: torch.dtype, dimensions: int) -> bool:
    """Whether a layer is given a tensor of so many dimensions for the edges of a graph."""
    return (
        isinstance(given, Tensor)
        and given.dim() == dimensions
        and given.shape[0] == graph.num_edges()
        and given.device == graph.device
        and given.dtype in DTYPES
        and computed_in(given.dtype) == computed_in(dtype)
    )


def by_edge(numbers: Tensor | None, values: Tensor) -> Tensor | None:
    """What edges have of their own, for all heads of values alike, as attention takes it."""
    return None if numbers is None else numbers.to(computed_in(values.dtype)).unsqueeze(1)


def overwrites_sources(graph: Any, feat: Any) -> bool:
    """Whether a layer that gives both ends of edges a feature of one name, as DGL's do, has the
    second one for both: the ends are the same nodes, and the features are two."""
    return isinstance(feat, tuple) and len(graph.ntypes) == 1 and not graph.is_block


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether a part of a layer does what it does in DGL: nobody replaced it or watches it."""
    if type(module) is not kind or "forward" in vars(module):
        return False
    watches = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    drops_all = isinstance(module, nn.Dropout) and module.p >= 1
    return not any(watches) and not drops_all


def relation_of(graph: DGLGraph) -> Relation | DistributedGraphIndex:
    """The one relation of a graph that :func:`serves` accepts."""
    index: Any = graph._graph
    return index if isinstance(index, DistributedGraphIndex) else index.relations[0]


def refuse_nodes_without_edges(layer: Any, graph: DGLGraph) -> None:
    """Raise DGLError if a layer does not allow nodes without in-edges, and there are some."""
    if layer._allow_zero_in_degree:
        return
    index = graph._graph
    is_whole = type(index) is TensorIndex
    if index.lacks_in_edges(0) if is_whole else (graph.in_degrees() == 0).any():
        raise DGLError(
            "some nodes have no in-edges, and no output: add self-loops, dgl.add_self_loop(g), or"
            " make the layer with allow_zero_in_degree=True"
        )


def dropped(dropout: nn.Dropout) -> float:
    """The probability with which a layer drops weights now."""
    return dropout.p if dropout.training else 0.0


def additive(
    relation: Relation | DistributedGraphIndex,
    sources: Tensor,
    destinations: Tensor | None,
    attn_l: Tensor,
    attn_r: Tensor,
    bias: Tensor | None,
    edge_weights: Tensor | None,
    negative_slope: float,
    dropout: float,
) -> Tensor:
    """Sum values by the softmax of additive scores, which are linear in the values.

    Parameters
    ----------
    sources : Tensor, shape (num_src, heads, width)
    destinations : Tensor or None, shape (num_dst, heads, width)
        None if destinations are the first of the sources.
    attn_l, attn_r : Tensor, shape (1, heads, width)
    bias : Tensor or None, shape (heads, width)
    edge_weights : Tensor or None, shape (num_edges, 1)
        What the softmax is multiplied by; float64 if the sources are so, else float32.

    Returns
    -------
    Tensor, dtype of the sources, shape (num_dst, heads, width)
        See :func:`dgl_mgpu.ops.attention.attention`.
    """
    score = AttentionScore("additive", negative_slope, 1.0, dropout)
    with torch.autocast(sources.device.type, enabled=False):
        vectors = torch.cat([attn_l, attn_r]).to(computed_in(sources.dtype))
        if isinstance(relation, DistributedGraphIndex):
            terms = EdgeTerms(None, edge_weights)
            return relation.attend(sources, None, destinations, vectors, bias, score, terms)
        out: Tensor = _Additive.apply(
            _Pass(relation, score),
            drawn_key(sources, dropout),
            sources,
            destinations,
            vectors,
            bias,
            edge_weights,
        )
    return out


def of_rows(
    relation: Relation | DistributedGraphIndex,
    values: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    score: str,
    *,
    vector: Tensor | None = None,
    negative_slope: float = 0.2,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """:func:`dgl_mgpu.ops.attention.attention` along a relation's edges."""
    with torch.autocast(values.device.type, enabled=False):
        if isinstance(relation, DistributedGraphIndex):
            kind = AttentionScore(score, negative_slope, scale, dropout)
            return relation.attend(values, left, right, vector, None, kind)
        indptr, indices, eids = relation.csc()
        return attention(
            indptr, indices, eids, values, left, right, score=score, vector=vector,
            negative_slope=negative_slope, scale=scale, dropout=dropout, by_source=relation.csr,
        )  # fmt: skip


def of_logits(
    relation: Relation | DistributedGraphIndex,
    values: Tensor,
    logits: Tensor,
    edge_weights: Tensor | None,
) -> Tensor:
    """Sum values by the softmax of numbers that edges have, shape (num_edges, heads)."""
    heads, dtype = values.shape[1], computed_in(values.dtype)
    terms = EdgeTerms(logits.to(dtype), edge_weights)
    with torch.autocast(values.device.type, enabled=False):
        if isinstance(relation, DistributedGraphIndex):
            score = AttentionScore("additive", 1.0, 1.0, 0.0)
            return relation.attend(values, None, None, None, None, score, terms)
        left, right = (
            values.new_zeros(count, heads, dtype=dtype)
            for count in (relation.num_src, relation.num_dst)
        )
        indptr, indices, eids = relation.csc()
        return attention(
            indptr, indices, eids, values, left, right, score="additive", negative_slope=1.0,
            **terms._asdict(), by_source=relation.csr,
        )  # fmt: skip


def sums_of_edges(graph: DGLGraph, rows: Tensor, weights: Tensor) -> Tensor:
    """:func:`dgl_mgpu.graph.message_passing.edge_sums.edge_sums` of a graph with one relation."""
    relation = relation_of(graph)
    if isinstance(relation, DistributedGraphIndex):
        return relation.edge_sums(rows, weights)
    return edge_sums(relation, rows, weights)


class _Pass(NamedTuple):
    relation: Relation
    score: AttentionScore


class _Additive(torch.autograd.Function):
    """Attention whose scores are made of values: no temporary has their size."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        request: _Pass,
        key: Tensor | None,
        sources: Tensor,
        destinations: Tensor | None,
        vectors: Tensor,
        bias: Tensor | None,
        edge_weights: Tensor | None,
    ) -> Tensor:
        relation, score = request
        sources = sources.contiguous()
        bias = None if bias is None else bias.contiguous()
        if destinations is None:
            left, right = attention_vectors(sources, vectors, relation.num_dst)
        else:
            destinations = destinations.contiguous()
            left, _ = attention_vectors(sources, vectors, 0)
            right, _ = attention_vectors(destinations, vectors.flip(0), 0)
        operands = AttentionOperands(sources, left, right, None)
        terms = EdgeTerms(None, None if edge_weights is None else edge_weights.contiguous())
        entries = Entries(*relation.csc())
        check_attention(entries, operands, terms, bias, score.kind, score.dropout)
        draws = Draws(key, None)
        out, kept = attention_forward(entries, operands, terms, bias, draws, score)
        ctx.request, ctx.output = request, KeptOutput(out)
        # A copy: a bias may be updated meanwhile.
        bias = None if bias is None else bias.clone()
        ctx.save_for_backward(
            key, sources, destinations, vectors, bias, left, right, kept, terms.edge_weights
        )
        return out

    @staticmethod
    @differentiable_once("attention", "compose it of dgl.ops")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key, sources, destinations, vectors, bias, left, right, kept, weights = ctx.saved_tensors
        relation, score = ctx.request
        operands, terms = AttentionOperands(sources, left, right, None), EdgeTerms(None, weights)
        entries, edges = Entries(*relation.csc()), Entries(*relation.csr())
        check_sources(edges, len(sources))
        draws = Draws(key, None)
        out = ctx.output.unchanged_or(
            lambda: attention_forward(entries, operands, terms, bias, draws, score)[0]
        )
        gradient = attention_products(grad.contiguous(), out, kept, right, bias, score)
        of_terms = EdgeGradients.zeros(terms, grad.shape[1], (False, ctx.needs_input_grad[6]))
        of_sources, of_left, of_right, _ = attention_backward(
            entries, edges, operands, terms, gradient, of_terms, draws, score
        )
        _, of_weights = of_terms.shaped_as(terms)
        assert of_sources is not None
        assert of_left is not None
        assert of_right is not None
        of_destinations = None
        if destinations is None:
            of_vectors = attention_vectors_backward(of_sources, sources, of_left, of_right, vectors)
        else:
            of_vectors = attention_vectors_backward(of_sources, sources, of_left, None, vectors)
            of_destinations = torch.zeros_like(destinations)
            of_right_vector, _ = attention_vectors_backward(
                of_destinations, destinations, of_right, None, vectors.flip(0)
            )
            of_vectors[1] = of_right_vector
        of_bias = None if bias is None else grad.sum(0)
        return None, None, of_sources, of_destinations, of_vectors, of_bias, of_weights

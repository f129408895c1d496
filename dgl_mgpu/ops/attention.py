"""Attention over the in-edges of nodes in one pass: scores, their softmax and the weighted sum.

Nothing of the size of the edges is written: the softmax keeps a running maximum and sum, and the
backward pass computes scores again from what each destination keeps (Dao et al., FlashAttention,
NeurIPS 2022, section 3.1, for the rows of a graph).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.autograd import differentiable_once
from dgl_mgpu.ops.check import DTYPES, ID_DTYPES, check_tensor
from dgl_mgpu.ops.library import Operator, Size, Written, call
from dgl_mgpu.ops.transpose import transpose

#: What destinations keep of a softmax: the largest score; the sum of exponentials of scores less
#: that; and, for kernels, the size of the largest value.
LARGEST, SUM, SIZE, KEPT = range(4)
#: What the backward pass reads of them: additive scores' number; the largest score; the sum's
#: inverse; and the product of the output with its gradient.
RIGHT, LARGEST_SCORE, INVERSE, PRODUCT, PRODUCTS = range(5)
#: Scores of an edge, of its source's and its destination's operands.
SCORES = ("additive", "gatv2", "dot")


class Entries(NamedTuple):
    """Edges grouped by one end: those of row i are entries [indptr[i], indptr[i + 1])."""

    indptr: Tensor
    #: The other end.
    indices: Tensor
    #: None where entry ``i`` is edge ``i``.
    eids: Tensor | None


class AttentionOperands(NamedTuple):
    """What scores and sums are made of, as :func:`attention` takes it."""

    values: Tensor
    left: Tensor | None
    right: Tensor | None
    vector: Tensor | None


class AttentionScore(NamedTuple):
    """How scores are computed, and how many weights are dropped."""

    kind: str
    slope: float
    scale: float
    dropout: float


class EdgeTerms(NamedTuple):
    """What edges have of their own, shape (num_edges, heads) or (num_edges, 1)."""

    #: Added to scores.
    edge_scores: Tensor | None
    #: The softmax is multiplied by them.
    edge_weights: Tensor | None


NO_TERMS = EdgeTerms(None, None)


class EdgeGradients(NamedTuple):
    """Gradients of edges' terms, shape (num_edges, heads); None of those that nobody wants.

    The backward pass writes those of its edges alone: where it goes over some edges after others,
    all write to the same.
    """

    of_edge_scores: Written | None
    of_edge_weights: Written | None

    @classmethod
    def zeros(cls, terms: EdgeTerms, heads: int, wanted: Sequence[bool]) -> EdgeGradients:
        """Memory for gradients of those terms that there are and whose gradients are wanted."""
        return cls(
            *(
                term.new_zeros(len(term), heads) if term is not None and is_wanted else None
                for term, is_wanted in zip(terms, wanted, strict=True)
            )
        )

    def shaped_as(self, terms: EdgeTerms) -> tuple[Tensor | None, Tensor | None]:
        """Gradients in the shapes of the terms, which may be the same for all heads."""
        of_scores, of_weights = map(_summed_as, self, terms)
        return of_scores, of_weights


NO_GRADIENTS = EdgeGradients(None, None)


class Draws(NamedTuple):
    """What weights are dropped by; without a key none are."""

    key: Tensor | None
    #: By edge, int64: the number that its draws depend on.  None where that is the edge's own.
    edge_numbers: Tensor | None


NO_DRAWS = Draws(None, None)


class AttentionGradient(NamedTuple):
    """The output's gradient, and what :func:`attention_products` makes of it."""

    grad: Tensor
    products: Tensor
    exponents: Tensor | None


@Operator
def attention_op(
    entries: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    bias: Tensor | None,
    draws: Draws,
    score: AttentionScore,
) -> tuple[Tensor, Tensor]:
    return outputs(entries, operands)


@Operator
def add_attention_op(
    out: Written,
    kept: Written,
    entries: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    bias: Tensor | None,
    draws: Draws,
    score: AttentionScore,
) -> None:
    pass


@Operator
def attention_products_op(
    grad: Tensor,
    out: Tensor,
    kept: Tensor,
    right: Tensor | None,
    bias: Tensor | None,
    score: AttentionScore,
) -> tuple[Tensor, Tensor]:
    return products_of(grad, kept, score)


@Operator
def attention_backward_op(
    by_destination: Entries,
    by_source: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    gradient: AttentionGradient,
    of_terms: EdgeGradients,
    draws: Draws,
    score: AttentionScore,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return gradients(operands)


@Operator
def attention_vectors_op(values: Tensor, vectors: Tensor, num_dst: Size) -> tuple[Tensor, Tensor]:
    heads = values.shape[1]
    return vectors.new_empty(values.shape[0], heads), vectors.new_empty(num_dst, heads)


@Operator
def attention_vectors_backward_op(
    of_values: Written, values: Tensor, of_left: Tensor, of_right: Tensor | None, vectors: Tensor
) -> Tensor:
    return torch.empty_like(vectors)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """What numbers of a dtype are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def outputs(entries: Entries, operands: AttentionOperands) -> tuple[Tensor, Tensor]:
    """Allocate the output and, for each destination and head, what the backward pass needs."""
    values, num_dst = operands.values, entries.indptr.shape[0] - 1
    out = values.new_empty(num_dst, *values.shape[1:])
    return out, values.new_empty(*out.shape[:2], KEPT, dtype=computed_in(values.dtype))


def products_of(grad: Tensor, kept: Tensor, score: AttentionScore) -> tuple[Tensor, Tensor]:
    """Allocate what passes backward read of destinations, shape (num_dst, heads, PRODUCTS).

    And, if scores are additive, exponents of the units of their numbers' gradients, shape (num_dst,
    heads).
    """
    num_dst, heads, _ = grad.shape
    units = (num_dst, heads) if score.kind == "additive" else (0,)
    products = kept.new_empty(num_dst, heads, PRODUCTS)
    return products, kept.new_empty(units, dtype=torch.int32)


def gradients(operands: AttentionOperands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate gradients of the operands, without elements where there is no operand.

    No list: an operator that writes to an argument may not return one.
    """
    values, left, right, vector = (
        operands.values.new_empty(0) if it is None else torch.empty_like(it) for it in operands
    )
    return values, left, right, vector


def attention(
    indptr: Tensor,
    indices: Tensor,
    eids: Tensor | None,
    values: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    *,
    score: str,
    vector: Tensor | None = None,
    negative_slope: float = 0.2,
    scale: float = 1.0,
    edge_scores: Tensor | None = None,
    edge_weights: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    by_source: Callable[[], tuple[Tensor, Tensor, Tensor | None]] | None = None,
) -> Tensor:
    """Sum the values of every node's in-neighbors by the softmax of its in-edges' scores.

    With ``act(x)`` for ``x if x > 0 else negative_slope * x``, the score of an edge from u to v is,
    in each head by itself,

    - ``'additive'``: ``act(left[u] + right[v])`` (GAT: Veličković et al., ICLR 2018, section 2.1),
    - ``'gatv2'``: ``sum(vector * act(values[u] + right[v]))`` (GATv2: Brody et al., ICLR 2022,
      section 3.1),
    - ``'dot'``: ``scale * sum(left[u] * right[v])`` (Vaswani et al., NeurIPS 2017, section 3.2.1).

    Parameters
    ----------
    indptr : Tensor, int32 or int64, shape (num_dst + 1,)
        Where each destination's entries begin, and the end of the last.
    indices : Tensor, dtype of ``indptr``, shape (nnz,)
        Source of each entry.  Not checked: it must be a row.
    eids : Tensor, dtype of ``indptr``, shape (nnz,), or None
        Edge of each entry; None where entry ``i`` is edge ``i``.  Not checked: it must be a row of
        ``edge_scores`` and ``edge_weights``.
    values : Tensor, float32, float64, float16 or bfloat16, shape (num_src, heads, width)
    left : Tensor, shape (num_src, heads) or (num_src, heads, width), or None
        Of an additive score a number, float32, or float64 if the values are so.  Of a dot product
        a row of the values' dtype; None for the values themselves, as of GATv2's score.
    right : Tensor, shape (num_dst, heads) or (num_dst, heads, width), or None
        The same of destinations; None for the first of the values, unless scores are additive.
    score : {'additive', 'gatv2', 'dot'}
    vector : Tensor or None, float32 or float64, shape (heads, width)
        Of GATv2's scores alone; float64 if the values are so.
    negative_slope, scale : float
        A slope of 0 or less leaves out no edges of additive scores (see ``edge_scores``).
    edge_scores : Tensor or None, float32 or float64, shape (num_edges, heads) or (num_edges, 1)
        By edge: added to scores, within ``act`` where they are additive.  Minus infinity leaves an
        edge out.  float64 if the values are so.
    edge_weights : Tensor or None, dtype and shape as of ``edge_scores``
        By edge: what the softmax is multiplied by.
    bias : Tensor or None, dtype of the values, shape (heads, width)
        Added to each sum.
    dropout : float
        The probability in [0, 1) with which an edge's weight in a head is left out; others are
        divided by ``1 - dropout``.  Draws depend on torch's generator and the edge's id alone.
    by_source : callable, optional
        Returns the same edges as a CSR, by source, which the backward pass goes along.  By default
        it is made of the CSC; edges are then to be numbered from 0 on.

    Returns
    -------
    Tensor, dtype of the values, shape (num_dst, heads, width)
        Half types are computed in float32 and rounded once.  A node without in-edges, or whose
        edges are all left out, has 0, and the bias.  The same bits on every run.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype, shape or device, or a second derivative is asked for.
    """
    entries = Entries(indptr, indices, eids)
    operands = AttentionOperands(values, left, right, vector)
    terms = EdgeTerms(edge_scores, edge_weights)
    check_attention(entries, operands, terms, bias, score, dropout)
    if by_source is None:
        num_src = len(values)

        def by_source() -> tuple[Tensor, Tensor, Tensor | None]:
            return transpose(*entries, num_src)

    request = _Request(entries, by_source, AttentionScore(score, negative_slope, scale, dropout))
    key = drawn_key(values, dropout)
    out: Tensor = _Attention.apply(request, key, *operands, *terms, bias)
    return out


def drawn_key(values: Tensor, dropout: float) -> Tensor | None:
    """A key by torch's generator, where weights are dropped."""
    if not dropout:
        return None
    return torch.empty(1, dtype=torch.int64, device=values.device).random_()


def check_attention(
    entries: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    bias: Tensor | None,
    score: str,
    dropout: float,
) -> None:
    """Raise InvalidInputError if arguments of :func:`attention` do not fit each other."""
    action = f"compute {score!r} attention"
    values, left, right, vector = operands
    indptr, indices, eids = entries
    if score not in SCORES:
        raise InvalidInputError(
            action, "there is no such score", f"pass one of {', '.join(SCORES)}"
        )
    if not 0 <= dropout < 1:
        raise InvalidInputError(action, f"dropout is {dropout}", "pass a probability in [0, 1)")
    if values.dtype not in DTYPES or values.dim() != 3:
        raise InvalidInputError(
            action,
            f"values has shape {tuple(values.shape)} and dtype {values.dtype}",
            "pass float32, float64, float16 or bfloat16 of shape (num_src, heads, width)",
        )
    if indptr.dtype not in ID_DTYPES or indptr.dim() != 1 or len(indptr) == 0:
        raise InvalidInputError(
            action,
            f"indptr has shape {tuple(indptr.shape)} and dtype {indptr.dtype}",
            "pass a vector of int32 or int64, one longer than there are destinations",
        )
    num_src, heads, width = values.shape
    num_dst, device, dtype = len(indptr) - 1, values.device, values.dtype
    check_tensor(indptr, "indptr", action, indptr.dtype, indptr.shape, device)
    for name, ids in (("indices", indices), ("eids", eids)):
        if ids is not None:
            check_tensor(ids, name, action, indptr.dtype, (len(indices),), device)
    is_additive = score == "additive"
    if (left is None and is_additive) or (left is not None and score == "gatv2"):
        raise InvalidInputError(
            action,
            "left is None" if left is None else "left is given",
            "pass it for additive scores, and not for GATv2's",
        )
    if (vector is None) == (score == "gatv2"):
        raise InvalidInputError(
            action,
            "vector is None" if vector is None else "vector is given",
            "pass it for GATv2's scores alone",
        )
    shape, of_score = ((heads,), computed_in(dtype)) if is_additive else ((heads, width), dtype)
    if left is not None:
        check_tensor(left, "left", action, of_score, (num_src, *shape), device)
    if right is not None:
        check_tensor(right, "right", action, of_score, (num_dst, *shape), device)
    elif is_additive or num_dst > num_src:
        raise InvalidInputError(
            action,
            "right is None"
            if is_additive
            else f"there are {num_dst} destinations and {num_src} sources",
            "pass right",
        )
    for name, tensor, of in (("vector", vector, computed_in(dtype)), ("bias", bias, dtype)):
        if tensor is not None:
            check_tensor(tensor, name, action, of, (heads, width), device)
    check_terms(terms, values, len(indices), score, may_be_more=eids is not None)


def check_terms(
    terms: EdgeTerms, values: Tensor, num_edges: int, score: str, *, may_be_more: bool = False
) -> None:
    """Raise InvalidInputError unless edges' terms have a row for each of so many edges.

    Or for more, where edges may be numbered higher than there are entries.
    """
    for name, tensor in terms._asdict().items():
        if tensor is None:
            continue
        rows = max(num_edges, len(tensor)) if may_be_more and tensor.dim() else num_edges
        columns = 1 if tensor.dim() == 2 and tensor.shape[1] == 1 else values.shape[1]
        check_tensor(
            tensor,
            name,
            f"compute {score!r} attention",
            computed_in(values.dtype),
            (rows, columns),
            values.device,
        )


class _Request(NamedTuple):
    entries: Entries
    by_source: Callable[[], tuple[Tensor, Tensor, Tensor | None]]
    score: AttentionScore


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        request: _Request,
        key: Tensor | None,
        values: Tensor,
        left: Tensor | None,
        right: Tensor | None,
        vector: Tensor | None,
        edge_scores: Tensor | None,
        edge_weights: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        operands = AttentionOperands(values.contiguous(), *map(_contiguous, (left, right, vector)))
        terms = EdgeTerms(_contiguous(edge_scores), _contiguous(edge_weights))
        bias = _contiguous(bias)
        draws = Draws(key, None)
        out, kept = attention_forward(request.entries, operands, terms, bias, draws, request.score)
        ctx.request, ctx.output = request, KeptOutput(out)
        ctx.set_materialize_grads(False)
        # A copy: a bias may be updated meanwhile.
        bias = None if bias is None else bias.clone()
        ctx.save_for_backward(key, bias, kept, *operands, *terms)
        return out

    @staticmethod
    @differentiable_once("attention", "compose it of dgl.ops")
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        key, bias, kept, *tensors = ctx.saved_tensors
        entries, by_source, score = ctx.request
        edges, operands = Entries(*by_source()), AttentionOperands(*tensors[:4])
        terms, draws = EdgeTerms(*tensors[4:]), Draws(key, None)
        check_sources(edges, len(operands.values))
        out = ctx.output.unchanged_or(
            lambda: attention_forward(entries, operands, terms, bias, draws, score)[0]
        )
        right = operands.right if score.kind == "additive" else None
        gradient = attention_products(grad.contiguous(), out, kept, right, bias, score)
        of_terms = EdgeGradients.zeros(terms, grad.shape[1], ctx.needs_input_grad[6:8])
        found = attention_backward(
            entries, edges, operands, terms, gradient, of_terms, draws, score
        )
        of_bias = grad.sum(0) if ctx.needs_input_grad[8] else None
        return None, None, *found, *of_terms.shaped_as(terms), of_bias


class KeptOutput:
    """The output of a forward pass, which a script may write to before the backward pass.

    It is not kept by ``save_for_backward``, which raises then; it is computed again instead.  So it
    stays where it is, also where hooks move or drop saved tensors.
    """

    def __init__(self, out: Tensor) -> None:
        self._out = out.detach()
        self._version = None if out.is_inference() else out._version

    def unchanged_or(self, again: Callable[[], Tensor]) -> Tensor:
        """The output as the forward pass returned it, computed again if it was written to."""
        return self._out if self._out._version == self._version else again()


def check_sources(edges: Entries, count: int) -> None:
    """Raise InvalidInputError unless edges by source are those of so many sources."""
    if len(edges.indptr) != count + 1:
        raise InvalidInputError(
            "take the gradient of attention",
            f"by_source returned an indptr of {len(edges.indptr) - 1} rows, and there are {count}"
            " values",
            "pass the same edges by source",
        )


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def attention_forward(
    entries: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    bias: Tensor | None,
    draws: Draws,
    score: AttentionScore,
) -> tuple[Tensor, Tensor]:
    """The output, and what the backward pass needs, shape (num_dst, heads, KEPT)."""
    return call("attention", (*entries, *operands, *terms, bias, *draws), *score)


def add_attention(
    out: Tensor,
    kept: Tensor,
    entries: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    bias: Tensor | None,
    draws: Draws,
    score: AttentionScore,
) -> None:
    """Have further in-edges of the same destinations take part in what earlier ones gave.

    ``out`` and ``kept`` are those of :func:`attention_forward` for the earlier edges, without a
    bias, and become those for all of them.  Half types are rounded each time.
    """
    call("add_attention", (out, kept, *entries, *operands, *terms, bias, *draws), *score)


def attention_products(
    grad: Tensor,
    out: Tensor,
    kept: Tensor,
    right: Tensor | None,
    bias: Tensor | None,
    score: AttentionScore,
) -> AttentionGradient:
    """What :func:`attention_backward` reads of destinations; ``right`` is None unless scores are
    additive."""
    found = call("attention_products", (grad, out, kept, right, bias), *score)
    return AttentionGradient(grad, *found)


def attention_backward(
    by_destination: Entries,
    by_source: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    gradient: AttentionGradient,
    of_terms: EdgeGradients,
    draws: Draws,
    score: AttentionScore,
) -> tuple[Tensor | None, ...]:
    """Gradients of the operands, None of those that there are not; ``of_terms`` is written to."""
    tensors = (
        *by_destination, *by_source, *operands, *terms, *gradient, *of_terms, *draws
    )  # fmt: skip
    found = call("attention_backward", tensors, *score)
    return tuple(None if it is None else of for it, of in zip(operands, found, strict=True))


def _summed_as(gradient: Tensor | None, term: Tensor | None) -> Tensor | None:
    """The gradient of a term that may be the same for all heads."""
    if gradient is None or term is None or gradient.shape == term.shape:
        return gradient
    return gradient.sum(1, keepdim=True)


def attention_vectors(values: Tensor, vectors: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
    """Products of values with vectors, as operands of additive scores.

    Parameters
    ----------
    values : Tensor, shape (num_src, heads, width)
    vectors : Tensor, float32 or float64, shape (2, heads, width)
    num_dst : int
        Of how many of the first sources the second product is wanted.

    Returns
    -------
    left : Tensor, dtype of the vectors, shape (num_src, heads)
    right : Tensor, dtype of the vectors, shape (num_dst, heads)
    """
    return call("attention_vectors", (values, vectors), num_dst)


def attention_vectors_backward(
    of_values: Tensor, values: Tensor, of_left: Tensor, of_right: Tensor | None, vectors: Tensor
) -> Tensor:
    """Go on from gradients of additive scores' operands that are products of values with vectors.

    Parameters
    ----------
    of_values : Tensor, shape (num_src, heads, width)
        The gradient of the values, to which theirs is added.
    values : Tensor, shape (num_src, heads, width)
    of_left : Tensor, shape (num_src, heads)
    of_right : Tensor or None, shape (num_dst, heads)
        Of destinations that are the first of the sources.
    vectors : Tensor, float32 or float64, shape (2, heads, width)
        Of the left and of the right operand.

    Returns
    -------
    Tensor, dtype and shape of ``vectors``
        Their gradient.
    """
    return call("attention_vectors_backward", (of_values, values, of_left, of_right, vectors))

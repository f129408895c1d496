"""Attention on the CPU, one row after another; see :mod:`dgl_mgpu.ops.attention`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.ops import cpu
from dgl_mgpu.ops.attention import (
    INVERSE,
    KEPT,
    LARGEST,
    LARGEST_SCORE,
    PRODUCT,
    SCORES,
    SIZE,
    SUM,
    AttentionGradient,
    AttentionOperands,
    AttentionScore,
    Draws,
    EdgeGradients,
    EdgeTerms,
    Entries,
    add_attention_op,
    attention_backward_op,
    attention_op,
    attention_products_op,
    attention_vectors_backward_op,
    attention_vectors_op,
    computed_in,
    products_of,
)
from dgl_mgpu.ops.cpu import inline, kernel, load_id
from dgl_mgpu.ops.philox import ATTENTION_STREAM, philox

#: Rows that are worth waking a thread for.
_GRAIN = 64
#: Blocks of rows, at most, of which each has its own sum for the gradient of ``vector``.
_MAX_BLOCKS = 256

_ADDITIVE, _GATV2, _DOT = range(len(SCORES))
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


class _Edges(NamedTuple):
    """Addresses of entries, 0 where there is none."""

    indptr: int
    indices: int
    eids: int
    id_width: int


class _Operands(NamedTuple):
    """Matrices with a row for each node; ``left`` is ``values`` where there is none."""

    values: np.ndarray
    left: np.ndarray
    right: np.ndarray
    vector: np.ndarray


class _Terms(NamedTuple):
    """What edges have of their own, by edge and column; matrices without rows if they have none."""

    scores: np.ndarray
    weights: np.ndarray


class _Gradient(NamedTuple):
    """The gradient of the output, and what the backward pass reads of destinations besides."""

    rows: np.ndarray
    products: np.ndarray


class _Score(NamedTuple):
    kind: int
    slope: float
    scale: float
    heads: int
    width: int


class _Mask(NamedTuple):
    """Weights whose word is below the threshold are dropped, others multiplied by ``keep``."""

    key: int
    numbers: np.ndarray  # by edge, those that draws depend on; none where they are the edges' own
    threshold: int
    keep: float


@inline
def _act(x: float, slope: float) -> float:
    return x if x > 0.0 else slope * x


@inline
def _act_slope(x: float, slope: float) -> float:
    return 1.0 if x > 0.0 else slope


@inline
def _term_of(terms: np.ndarray, edge: int, head: int, absent: float) -> float:
    if len(terms) == 0:
        return absent
    return terms[edge, head if terms.shape[1] > 1 else 0]


@inline
def _pre_of(
    source: int, destination: int, edge: int, head: int, operands: _Operands, terms: _Terms
) -> float:
    """An additive score before the slope."""
    pre = operands.left[source, head] + operands.right[destination, head]
    return pre + _term_of(terms.scores, edge, head, 0.0)


@inline
def _score_of(
    source: int, destination: int, edge: int, head: int, operands: _Operands, terms: _Terms,
    score: _Score,
) -> Any:  # fmt: skip
    left, right = operands.left, operands.right
    rounded = operands.values.dtype.type  # as the largest is kept
    if score.kind == _ADDITIVE:
        pre = _pre_of(source, destination, edge, head, operands, terms)
        return rounded(_act(pre, score.slope))
    added = _term_of(terms.scores, edge, head, 0.0)
    total = 0.0
    if score.kind == _GATV2:
        for place in range(head * score.width, (head + 1) * score.width):
            pre = left[source, place] + right[destination, place]
            total += operands.vector[place] * _act(pre, score.slope)
        return rounded(total + added)
    for place in range(head * score.width, (head + 1) * score.width):
        total += np.float64(left[source, place]) * right[destination, place]
    return rounded(score.scale * total + added)


@inline
def _draws_of(edge: int, head: int, mask: _Mask) -> tuple[np.uint64, np.uint64]:
    """The words of four heads, of which ``head`` is the first."""
    number = edge if len(mask.numbers) == 0 else mask.numbers[edge]
    return philox(number, head // 4, ATTENTION_STREAM, mask.key)


@inline
def _keep_of(draws: tuple[np.uint64, np.uint64], head: int, mask: _Mask) -> float:
    """What dropout multiplies a weight by; ``draws`` are those of the head's four heads."""
    draw = draws[0] if head % 4 < 2 else draws[1]
    word = draw & _LOW if head % 2 == 0 else draw >> _32
    return 0.0 if np.int64(word) < mask.threshold else mask.keep


@inline
def _weight_and_gradient(
    source: int, destination: int, edge: int, head: int, keep: float, operands: _Operands,
    terms: _Terms, grad: _Gradient, score: _Score,
) -> tuple[float, float, float]:  # fmt: skip
    """An edge's softmax, the gradient of its score, and its value's product with the output's
    gradient."""
    value = _score_of(source, destination, edge, head, operands, terms, score)
    of_row = grad.products[destination, head]
    weight = math.exp(value - of_row[LARGEST_SCORE]) * of_row[INVERSE]
    product = 0.0
    for place in range(head * score.width, (head + 1) * score.width):
        product += np.float64(grad.rows[destination, place]) * operands.values[source, place]
    return weight, weight * (keep * product - of_row[PRODUCT]), product


@kernel
def _attention(
    begin: int, end: int, edges: _Edges, operands: _Operands, terms: _Terms, bias: np.ndarray,
    score: _Score, mask: _Mask, adds: bool, out: np.ndarray, kept: np.ndarray,
) -> None:  # fmt: skip
    """Rows ``[begin, end)`` of the output and of what destinations keep.

    With ``adds`` they go on from what is there.
    """
    heads, width = score.heads, score.width
    largest, total, row_sum = np.empty(heads), np.empty(heads), np.empty(heads * width)
    draws = np.uint64(0), np.uint64(0)
    for row in range(begin, end):
        largest[:] = -np.inf
        total[:] = 0.0
        row_sum[:] = 0.0
        for head in range(heads):
            if adds and kept[row, head, SUM] != 0.0:
                largest[head] = kept[row, head, LARGEST]
                total[head] = kept[row, head, SUM]
                for place in range(head * width, (head + 1) * width):
                    row_sum[place] = out[row, place] * total[head]
        first = load_id(edges.indptr, row, edges.id_width)
        last = load_id(edges.indptr, row + 1, edges.id_width)
        for entry in range(first, last):
            source = load_id(edges.indices, entry, edges.id_width)
            edge = load_id(edges.eids, entry, edges.id_width) if edges.eids != 0 else entry
            for head in range(heads):
                if mask.threshold > 0 and head % 4 == 0:
                    draws = _draws_of(edge, head, mask)
                value = _score_of(source, row, edge, head, operands, terms, score)
                if value > largest[head]:
                    shrunk = math.exp(largest[head] - value)
                    total[head] *= shrunk
                    for place in range(head * width, (head + 1) * width):
                        row_sum[place] *= shrunk
                    largest[head] = value
                # Not by exp: nothing larger than minus infinity may have come yet.
                weight = 0.0 if value == -np.inf else math.exp(value - largest[head])
                total[head] += weight
                weight *= _keep_of(draws, head, mask) * _term_of(terms.weights, edge, head, 1.0)
                for place in range(head * width, (head + 1) * width):
                    row_sum[place] += weight * operands.values[source, place]
        for head in range(heads):
            divisor = total[head]
            is_empty = divisor == 0.0 and (first == last or len(terms.scores) > 0)
            if is_empty:
                divisor = 1.0
            elif divisor == 0.0:  # all scores are minus infinity, which nobody asked for
                divisor = np.nan
            for place in range(head * width, (head + 1) * width):
                out[row, place] = row_sum[place] / divisor + bias[place]
            kept[row, head, LARGEST] = 0.0 if is_empty else largest[head]
            kept[row, head, SUM] = total[head]
            kept[row, head, SIZE] = 0.0


@kernel
def _of_destinations(
    begin: int, end: int, rows_per_block: int, edges: _Edges, operands: _Operands, terms: _Terms,
    grad: _Gradient, score: _Score, mask: _Mask, of_right: np.ndarray,
    of_vector: np.ndarray,
) -> None:  # fmt: skip
    """Blocks ``[begin, end)`` of rows; ``of_vector`` has a row for each block."""
    heads, width, slope = score.heads, score.width, score.slope
    row_sum = np.empty(of_right.shape[1])
    draws = np.uint64(0), np.uint64(0)
    for row in range(begin * rows_per_block, min(end * rows_per_block, len(of_right))):
        block = row // rows_per_block
        row_sum[:] = 0.0
        first = load_id(edges.indptr, row, edges.id_width)
        last = load_id(edges.indptr, row + 1, edges.id_width)
        for entry in range(first, last):
            source = load_id(edges.indices, entry, edges.id_width)
            edge = load_id(edges.eids, entry, edges.id_width) if edges.eids != 0 else entry
            for head in range(heads):
                if mask.threshold > 0 and head % 4 == 0:
                    draws = _draws_of(edge, head, mask)
                keep = _keep_of(draws, head, mask) * _term_of(terms.weights, edge, head, 1.0)
                _, of_score, _ = _weight_and_gradient(
                    source, row, edge, head, keep, operands, terms, grad, score
                )
                if score.kind == _ADDITIVE:
                    pre = _pre_of(source, row, edge, head, operands, terms)
                    row_sum[head] += of_score * _act_slope(pre, slope)
                elif score.kind == _GATV2:
                    for place in range(head * width, (head + 1) * width):
                        pre = operands.left[source, place] + operands.right[row, place]
                        row_sum[place] += of_score * operands.vector[place] * _act_slope(pre, slope)
                        of_vector[block, place] += of_score * _act(pre, slope)
                else:
                    for place in range(head * width, (head + 1) * width):
                        row_sum[place] += of_score * score.scale * operands.left[source, place]
        for place in range(len(row_sum)):
            of_right[row, place] = row_sum[place]


@kernel
def _of_sources(
    begin: int, end: int, edges: _Edges, operands: _Operands, terms: _Terms, grad: _Gradient,
    score: _Score, mask: _Mask, left_is_values: bool, of_values: np.ndarray, of_left: np.ndarray,
    of_terms: _Terms,
) -> None:  # fmt: skip
    """Rows ``[begin, end)``; ``of_left`` is left alone where scores are made of the values."""
    heads, width, slope = score.heads, score.width, score.slope
    values_sum, left_sum = np.empty(heads * width), np.empty(operands.left.shape[1])
    draws = np.uint64(0), np.uint64(0)
    for row in range(begin, end):
        values_sum[:] = 0.0
        left_sum[:] = 0.0
        first = load_id(edges.indptr, row, edges.id_width)
        last = load_id(edges.indptr, row + 1, edges.id_width)
        for entry in range(first, last):
            destination = load_id(edges.indices, entry, edges.id_width)
            edge = load_id(edges.eids, entry, edges.id_width) if edges.eids != 0 else entry
            for head in range(heads):
                if mask.threshold > 0 and head % 4 == 0:
                    draws = _draws_of(edge, head, mask)
                kept = _keep_of(draws, head, mask)
                keep = kept * _term_of(terms.weights, edge, head, 1.0)
                weight, of_score, product = _weight_and_gradient(
                    row, destination, edge, head, keep, operands, terms, grad, score
                )
                if len(of_terms.weights) > 0:
                    of_terms.weights[edge, head] = weight * kept * product
                if len(of_terms.scores) > 0:
                    of_edge = of_score
                    if score.kind == _ADDITIVE:
                        pre = _pre_of(row, destination, edge, head, operands, terms)
                        of_edge *= _act_slope(pre, slope)
                    of_terms.scores[edge, head] = of_edge
                weight *= keep
                for place in range(head * width, (head + 1) * width):
                    values_sum[place] += weight * grad.rows[destination, place]
                if score.kind == _ADDITIVE:
                    pre = _pre_of(row, destination, edge, head, operands, terms)
                    left_sum[head] += of_score * _act_slope(pre, score.slope)
                elif score.kind == _GATV2:
                    for place in range(head * width, (head + 1) * width):
                        pre = operands.left[row, place] + operands.right[destination, place]
                        left_sum[place] += (
                            of_score * operands.vector[place] * _act_slope(pre, score.slope)
                        )
                else:
                    for place in range(head * width, (head + 1) * width):
                        left_sum[place] += (
                            of_score * score.scale * operands.right[destination, place]
                        )
        if left_is_values:
            for place in range(len(values_sum)):
                of_values[row, place] = values_sum[place] + left_sum[place]
            continue
        for place in range(len(values_sum)):
            of_values[row, place] = values_sum[place]
        for place in range(len(left_sum)):
            of_left[row, place] = left_sum[place]


@attention_op.cpu
def _attention_cpu(
    entries: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    bias: Tensor | None,
    draws: Draws,
    score: AttentionScore,
) -> tuple[Tensor, Tensor]:
    values = operands.values
    number, num_dst = computed_in(values.dtype), len(entries.indptr) - 1
    out = torch.empty(num_dst, *values.shape[1:], dtype=number)
    kept = torch.empty(*out.shape[:2], KEPT, dtype=number)
    _attend(out, kept, entries, operands, terms, bias, draws, score, adds=False)
    return out.to(values.dtype), kept


@add_attention_op.cpu
def _add_attention_cpu(
    out: Tensor,
    kept: Tensor,
    entries: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    bias: Tensor | None,
    draws: Draws,
    score: AttentionScore,
) -> None:
    wide = out.to(computed_in(out.dtype))
    _attend(wide, kept, entries, operands, terms, bias, draws, score, adds=True)
    if wide is not out:
        out.copy_(wide)


def _attend(
    out: Tensor,
    kept: Tensor,
    entries: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    bias: Tensor | None,
    draws: Draws,
    score: AttentionScore,
    *,
    adds: bool,
) -> None:
    num_dst, heads, width = out.shape
    entries = _contiguous(entries)
    added = torch.zeros(heads * width, dtype=out.dtype) if bias is None else bias
    operands = operands._replace(right=_right_of(operands, num_dst))
    cpu.run(
        _attention, num_dst, _GRAIN, _edges(entries), _operands(operands), _terms(terms, out.dtype),
        _flat(added, out.dtype), _score(score, heads, width), _mask(draws, score), adds,
        out.flatten(1).numpy(), kept.numpy(),
    )  # fmt: skip


@attention_products_op.cpu
def _attention_products_cpu(
    grad: Tensor,
    out: Tensor,
    kept: Tensor,
    right: Tensor | None,
    bias: Tensor | None,
    score: AttentionScore,
) -> tuple[Tensor, Tensor]:
    number = kept.dtype
    attended = out.to(number) if bias is None else out.to(number) - bias.to(number)
    products, exponents = products_of(grad, kept, score)
    products.zero_()
    products[..., LARGEST_SCORE] = kept[..., LARGEST]
    # Of no edges, or none that is not left out.
    products[..., INVERSE] = torch.where(kept[..., SUM] == 0, 0, 1 / kept[..., SUM])
    products[..., PRODUCT] = (grad.to(number) * attended).sum(2)
    # There are no units: each row is summed by itself.
    return products, exponents.zero_()


@attention_backward_op.cpu
def _attention_backward_cpu(
    by_destination: Entries,
    by_source: Entries,
    operands: AttentionOperands,
    terms: EdgeTerms,
    gradient: AttentionGradient,
    of_terms: EdgeGradients,
    draws: Draws,
    score: AttentionScore,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, products, _ = gradient
    is_shared, num_dst = operands.right is None, len(grad)
    values, left, _, vector = operands
    right = _right_of(operands, num_dst)
    operands = operands._replace(right=right)
    number = computed_in(values.dtype)
    num_src, heads, width = values.shape
    of_out = _Gradient(_matrix(grad, number), products.detach().numpy())
    numbers = _operands(operands), _terms(terms, number), of_out
    shared = *numbers, _score(score, heads, width), _mask(draws, score)

    # Of the rows alone and not of the threads: so is the order in which sums are taken.
    rows_per_block = max(_GRAIN, -(-num_dst // _MAX_BLOCKS))
    blocks = -(-num_dst // rows_per_block)
    entries = _contiguous(by_destination)
    of_right = torch.empty(num_dst, right.shape[1:].numel(), dtype=number)
    of_vector = np.zeros((blocks if vector is not None else 0, heads * width))
    cpu.run(
        _of_destinations, blocks, 1, rows_per_block, _edges(entries), *shared, of_right.numpy(),
        of_vector,
    )  # fmt: skip

    entries = _contiguous(by_source)
    of_values = torch.empty(num_src, heads * width, dtype=number)
    of_left = torch.empty(0, 0) if left is None else left.new_empty(left.shape, dtype=number)
    cpu.run(
        _of_sources, num_src, _GRAIN, _edges(entries), *shared, left is None, of_values.numpy(),
        _matrix(of_left, number), _terms(EdgeTerms(*of_terms), number),
    )  # fmt: skip

    if is_shared:
        of_values[:num_dst] += of_right

    def shaped(gradient: Tensor, operand: Tensor | None) -> Tensor:
        if operand is None:
            return values.new_empty(0)
        return gradient.view(operand.shape).to(operand.dtype)

    # By NumPy, which has no threads.
    summed = torch.from_numpy(of_vector.sum(0))
    return (
        shaped(of_values, values),
        shaped(of_left, left),
        shaped(of_right, None if is_shared else right),
        shaped(summed, vector),
    )


@attention_vectors_op.cpu
def _attention_vectors_cpu(values: Tensor, vectors: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
    left, right = ((values.to(vectors.dtype) * vector).sum(-1) for vector in vectors)
    return left, right[:num_dst].clone()


@attention_vectors_backward_op.cpu
def _attention_vectors_backward_cpu(
    of_values: Tensor, values: Tensor, of_left: Tensor, of_right: Tensor | None, vectors: Tensor
) -> Tensor:
    number = computed_in(values.dtype)
    of_vectors = torch.zeros(vectors.shape, dtype=number)
    added = of_values.to(number)
    for side, numbers in enumerate((of_left, of_right)):
        if numbers is not None:
            columns = numbers.unsqueeze(-1)
            count = len(numbers)
            added[:count] += columns * vectors[side].to(number)
            of_vectors[side] = (columns * values[:count].to(number)).sum(0)
    of_values.copy_(added)
    return of_vectors.to(vectors.dtype)


def _contiguous(entries: Entries) -> Entries:
    """Entries whose addresses kernels may take, as long as the caller holds them."""
    indptr, indices, eids = entries
    return Entries(
        indptr.contiguous(), indices.contiguous(), None if eids is None else eids.contiguous()
    )


def _edges(entries: Entries) -> _Edges:
    indptr, indices, eids = entries
    return _Edges(
        indptr.data_ptr(),
        indices.data_ptr(),
        eids.data_ptr() if eids is not None else 0,
        indptr.element_size(),
    )


def _right_of(operands: AttentionOperands, num_dst: int) -> Tensor:
    """What is on the right: without it, the first of the values."""
    return operands.values[:num_dst] if operands.right is None else operands.right


def _operands(operands: AttentionOperands) -> _Operands:
    values, left, right, vector = operands
    number = computed_in(values.dtype)
    of_values = _matrix(values, number)
    return _Operands(
        of_values,
        of_values if left is None else _matrix(left, number),
        of_values if right is None else _matrix(right, number),
        _flat(values.new_empty(0) if vector is None else vector, number),
    )


def _terms(terms: EdgeTerms, number: torch.dtype) -> _Terms:
    none = torch.empty(0, 0)
    return _Terms(*(_matrix(none if it is None else it, number) for it in terms))


def _score(score: AttentionScore, heads: int, width: int) -> _Score:
    kind = SCORES.index(score.kind)
    return _Score(kind, float(score.slope), float(score.scale), heads, width)


def _mask(draws: Draws, score: AttentionScore) -> _Mask:
    key, numbers = draws
    own = np.empty(0, np.int64) if numbers is None else numbers.numpy()
    if key is None:
        return _Mask(0, own, 0, 1.0)
    return _Mask(int(key[0]), own, int(score.dropout * 2**32), 1 / (1 - score.dropout))


def _matrix(rows: Tensor, number: torch.dtype) -> np.ndarray:
    flat = rows.detach().to(number).reshape(len(rows), rows.shape[1:].numel())
    return flat.contiguous().numpy()


def _flat(row: Tensor, number: torch.dtype) -> np.ndarray:
    return row.detach().to(number).reshape(-1).contiguous().numpy()

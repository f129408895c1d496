"""Attention over in-edges in rounds: while one round's rows are attended to, the next one's arrive.

A destination's running maximum and sum go from one round to the next, and its rows are never all
there at once.  The backward pass fetches rows again, and returns their gradients as it goes: what a
rank holds besides its own rows does not depend on the number of ranks (SAR: Mostafa, MLSys 2022,
section 3).  What edges have of their own stays where it is: a rank has all in-edges of its nodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.distributed.exchange.schedule import CommSchedule, Tile
from dgl_mgpu.ops.attention import (
    NO_DRAWS,
    NO_TERMS,
    AttentionGradient,
    AttentionOperands,
    AttentionScore,
    Draws,
    EdgeGradients,
    EdgeTerms,
    Entries,
    KeptOutput,
    add_attention,
    attention_backward,
    attention_forward,
    attention_products,
    attention_vectors,
    attention_vectors_backward,
    check_attention,
    check_terms,
    computed_in,
    drawn_key,
)
from dgl_mgpu.ops.autograd import differentiable_once


def attend(
    rounds: CommSchedule,
    values: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    vector: Tensor | None,
    bias: Tensor | None,
    score: AttentionScore,
    terms: EdgeTerms = NO_TERMS,
) -> Tensor:
    """:func:`dgl_mgpu.ops.attention.attention` for a rank's own destinations; collective.

    Parameters
    ----------
    values : Tensor, shape (num_own_src, heads, width)
    left : Tensor or None, dtype and shape of the values
        Of dot products alone; None for the values themselves.
    right : Tensor or None, shape (num_own_dst, heads, width)
        None for the first of the values.
    vector : Tensor or None, float32 or float64
        Of GATv2's scores, shape (heads, width).  Additive scores are products of values with the
        first of two, shape (2, heads, width), and of ``right`` with the second; without them they
        are what edges have alone.
    terms : EdgeTerms, optional
        Of this rank's edges.

    Returns
    -------
    Tensor, dtype of the values, shape (num_own_dst, heads, width)
        Half types are rounded in each round.
    """
    check_terms(terms, values, rounds.part.relation.num_edges, score.kind)
    key = drawn_key(values, score.dropout)
    out: Tensor = _Attention.apply(
        _Rounds(rounds, score), key, values, left, right, vector, bias, *terms
    )
    return out


class _Rounds(NamedTuple):
    """Attention of one kind, in the rounds of a schedule."""

    schedule: CommSchedule
    score: AttentionScore

    @property
    def is_additive(self) -> bool:
        return self.score.kind == "additive"

    def operands(self, rows: Tensor, right: Tensor, vector: Tensor | None) -> AttentionOperands:
        """Operands of a round, given what comes in it and what destinations have."""
        if self.is_additive:
            return AttentionOperands(rows, self._numbers(rows, vector), right, None)
        width = right.shape[2]
        if rows.shape[2] == width:
            return AttentionOperands(rows, None, right, vector)
        values, left = (half.contiguous() for half in rows.split(width, 2))
        return AttentionOperands(values, left, right, vector)

    def right(self, values: Tensor, right: Tensor | None, vector: Tensor | None) -> Tensor:
        """What scores are made of on the right: rows, or numbers if they are additive."""
        num_dst = self.schedule.part.num_own_dst
        rows = values[:num_dst] if right is None else right
        if not self.is_additive:
            return rows
        return _zeros(values, num_dst) if vector is None else self._numbers(rows, vector.flip(0))

    @staticmethod
    def _numbers(rows: Tensor, vector: Tensor | None) -> Tensor:
        """Operands of additive scores: products with the first vector, zeros without vectors."""
        if vector is None:
            return _zeros(rows, len(rows))
        numbers, _ = attention_vectors(rows, vector, 0)
        return numbers

    def by_destination(self, tile: Tile, reads_edges: bool) -> Entries:
        """A tile's edges, with their numbers in the part if these are read."""
        indptr, indices, _ = tile.relation.csc()
        return Entries(indptr, indices, tile.entries if reads_edges else None)

    def by_source(self, tile: Tile, reads_edges: bool) -> Entries:
        """The same by source."""
        by_source, numbers = tile.relation.csr(), None
        if reads_edges:
            numbers = by_source.edge_ids()
            if tile.entries is not None:
                numbers = tile.entries.index_select(0, numbers)
        return Entries(by_source.indptr, by_source.indices, numbers)

    def draws(self, key: Tensor | None) -> Draws:
        """By edges' numbers in the whole graph: as on one rank."""
        return NO_DRAWS if key is None else Draws(key, self.schedule.part.edges)

    def forward(
        self,
        rows: Tensor,
        right: Tensor,
        vector: Tensor | None,
        terms: EdgeTerms,
        bias: Tensor | None,
        key: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs of destinations."""
        out = kept = None
        (kind, _, _, dropout), draws = self.score, self.draws(key)
        reads_edges, last = _reads_edges(terms, key), len(self.schedule.tiles) - 1

        def take(number: int, tile: Tile, arrived: Tensor) -> None:
            nonlocal out, kept
            operands = self.operands(arrived, right, vector)
            entries = self.by_destination(tile, reads_edges)
            added = bias if number == last else None
            if out is None or kept is None:
                check_attention(entries, operands, terms, bias, kind, dropout)
                out, kept = attention_forward(entries, operands, terms, added, draws, self.score)
            else:
                add_attention(out, kept, entries, operands, terms, added, draws, self.score)

        self.schedule.visit(rows, take)
        assert out is not None  # there is a round
        assert kept is not None
        return out, kept

    def backward(
        self,
        rows: Tensor,
        right: Tensor,
        vector: Tensor | None,
        terms: EdgeTerms,
        gradient: AttentionGradient,
        of_terms: EdgeGradients,
        key: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of own rows, of what there is on the right and of the vector.

        Each round writes those of its edges' terms.
        """
        of_right = of_vector = None
        draws, reads_edges = self.draws(key), _reads_edges(terms, key)

        def of_round(tile: Tile, arrived: Tensor) -> Tensor:
            nonlocal of_right, of_vector
            operands = self.operands(arrived, right, vector)
            entries = self.by_destination(tile, reads_edges), self.by_source(tile, reads_edges)
            of_values, of_left, right_part, vector_part = attention_backward(
                *entries, operands, terms, gradient, of_terms, draws, self.score
            )
            assert of_values is not None
            assert right_part is not None
            if self.is_additive:
                assert of_left is not None
                if vector is not None:
                    vector_part = attention_vectors_backward(
                        of_values, arrived, of_left, None, vector
                    )
            elif of_left is not None:
                of_values = torch.cat([of_values, of_left], 2)
            of_right = right_part if of_right is None else of_right.add_(right_part)
            if vector_part is not None:
                of_vector = vector_part if of_vector is None else of_vector.add_(vector_part)
            return of_values

        of_rows = self.schedule.round_trips(rows, of_round)
        assert of_right is not None  # there is a round
        return of_rows, of_right, of_vector


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        rounds: _Rounds,
        key: Tensor | None,
        values: Tensor,
        left: Tensor | None,
        right: Tensor | None,
        vector: Tensor | None,
        bias: Tensor | None,
        edge_scores: Tensor | None,
        edge_weights: Tensor | None,
    ) -> Tensor:
        values = values.contiguous()
        right, edge_scores, edge_weights = (
            None if it is None else it.contiguous() for it in (right, edge_scores, edge_weights)
        )
        terms = EdgeTerms(edge_scores, edge_weights)
        operand = rounds.right(values, right, vector)
        out, kept = rounds.forward(_joined(values, left), operand, vector, terms, bias, key)
        ctx.rounds, ctx.output = rounds, KeptOutput(out)
        # A copy: a bias may be updated meanwhile.
        bias = None if bias is None else bias.clone()
        ctx.save_for_backward(key, values, left, right, vector, bias, kept, *terms)
        return out

    @staticmethod
    @differentiable_once("attention", "compose it of dgl.ops")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key, values, left, right, vector, bias, kept, *of_edges = ctx.saved_tensors
        rounds, grad, terms = ctx.rounds, grad.contiguous(), EdgeTerms(*of_edges)
        operand, rows = rounds.right(values, right, vector), _joined(values, left)

        def again() -> Tensor:
            out, _ = rounds.forward(rows, operand, vector, terms, bias, key)
            return out

        out, is_additive = ctx.output.unchanged_or(again), rounds.is_additive
        numbers = operand if is_additive else None
        gradient = attention_products(grad, out, kept, numbers, bias, rounds.score)
        del out
        of_terms = EdgeGradients.zeros(terms, grad.shape[1], ctx.needs_input_grad[7:])
        of_rows, of_operand, of_vector = rounds.backward(
            rows, operand, vector, terms, gradient, of_terms, key
        )
        of_right = of_operand
        if vector is not None and is_additive:
            ends = values[: len(grad)] if right is None else right
            of_right = of_rows[: len(grad)] if right is None else torch.zeros_like(right)
            of_both = attention_vectors_backward(of_right, ends, of_operand, None, vector.flip(0))
            of_vector[1] = of_both[0]
        elif not is_additive and right is None:
            of_rows[: len(grad), :, : values.shape[2]] += of_operand
        of_left = None
        if left is not None:
            of_rows, of_left = of_rows.split(values.shape[2], 2)
        of_bias = grad.sum(0) if ctx.needs_input_grad[6] else None
        of_right = None if right is None else of_right
        of_operands = of_rows, of_left, of_right, of_vector
        return None, None, *of_operands, of_bias, *of_terms.shaped_as(terms)


def _reads_edges(terms: EdgeTerms, key: Tensor | None) -> bool:
    """Whether something depends on which edge an entry is."""
    return any(it is not None for it in (*terms, key))


def _zeros(rows: Tensor, count: int) -> Tensor:
    """Operands of additive scores that are what edges have alone."""
    return rows.new_zeros(count, rows.shape[1], dtype=computed_in(rows.dtype))


def _joined(values: Tensor, left: Tensor | None) -> Tensor:
    """What travels of a row."""
    return values if left is None else torch.cat([values, left], 2)

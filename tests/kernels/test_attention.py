"""The CUDA kernels of attention, against the CPU's operator in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import transpose
from dgl_mgpu.ops.attention import (
    NO_DRAWS,
    NO_GRADIENTS,
    NO_TERMS,
    SIZE,
    AttentionOperands,
    AttentionScore,
    Draws,
    EdgeGradients,
    EdgeTerms,
    Entries,
    attention_backward,
    attention_forward,
    attention_products,
    attention_vectors,
    attention_vectors_backward,
    computed_in,
)
from dgl_mgpu.ops.attention_cuda import (
    _add_attention,
    _attention,
    _attention_backward,
    _attention_products,
    _attention_vectors,
    _attention_vectors_backward,
    can_attend,
)

KINDS = ("additive", "gatv2", "dot", "dot of values")
#: Of destinations that are the first sources.
SHARED = ("gatv2", "dot")
NUM_SRC = 90


def degrees(kind: str) -> list[int]:
    random = np.random.default_rng(1)
    return {
        "skewed": (3 * random.random(150) ** (-1 / 1.5)).astype(int).clip(max=900).tolist(),
        "a hub": [3, 0, 3000, 0, 1, 2],
        "mostly empty": [2 if i % 150 == 0 else 0 for i in range(900)],
        "one entry": [1],
        "at bounds": [63, 63, 0, 127, 64, 0, 0, 191, 63, 0, 300],
    }[kind]


def entries_of(lengths: list[int], ids: torch.dtype, shuffled: bool) -> tuple[Entries, Entries]:
    """By destination and by source."""
    indptr = torch.tensor([0, *np.cumsum(lengths)]).to(ids)
    count = int(indptr[-1])
    # Some sources have no edges.
    indices = torch.randint(NUM_SRC - 5, (count,)).to(ids)
    eids = torch.randperm(count).to(ids) if shuffled else None
    return Entries(indptr, indices, eids), Entries(*transpose(indptr, indices, eids, NUM_SRC))


def operands_of(
    kind: str, num_dst: int, heads: int, width: int, dtype: torch.dtype
) -> AttentionOperands:
    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape).to(dtype)

    values, number = random(NUM_SRC, heads, width), computed_in(dtype)
    if kind == "additive":
        left, right = random(NUM_SRC, heads, dtype=number), random(num_dst, heads, dtype=number)
        return AttentionOperands(values, left, right, None)
    left = random(NUM_SRC, heads, width) if kind == "dot" else None
    vector = random(heads, width, dtype=number) if kind.startswith("gatv2") else None
    if kind.endswith("of itself"):
        return AttentionOperands(values, None, None, vector)
    return AttentionOperands(values, left, random(num_dst, heads, width), vector)


def moved(tensors: Any, where: torch.device) -> Any:
    return type(tensors)(*(None if it is None else it.to(where) for it in tensors))


def widened(tensors: Any) -> Any:
    return type(tensors)(*(None if it is None else it.double() for it in tensors))


def check(
    where: torch.device,
    kind: str,
    lengths: list[int],
    heads: int = 2,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
    ids: torch.dtype = torch.int32,
    *,
    shuffled: bool = False,
    biased: bool = True,
    dropout: float = 0.0,
    terms: EdgeTerms = NO_TERMS,
    rounding: float = 1e-4,
) -> None:
    """Compare the output and all gradients, with regard to what they are sums of."""
    torch.manual_seed(0)
    by_destination, by_source = entries_of(lengths, ids, shuffled)
    operands = operands_of(kind, len(lengths), heads, width, dtype)
    bias = torch.randn(heads, width).to(dtype) if biased else None
    grad = torch.randn(len(lengths), heads, width).to(dtype)
    draws = NO_DRAWS
    if dropout:
        draws = Draws(torch.tensor([123456789]), torch.randperm(sum(lengths)) if shuffled else None)
    score = AttentionScore(kind.partition(" ")[0], 0.2, 0.3, dropout)
    wide = None if bias is None else bias.double()
    given = widened(operands), widened(terms)
    expected, kept = attention_forward(by_destination, *given, wide, draws, score)

    at = [moved(it, where) for it in (by_destination, by_source, operands, terms, draws)]
    bias, grad = (None if it is None else it.to(where) for it in (bias, grad))
    out, found_kept = _attention(*at[0], *at[2], *at[3], bias, *at[4], *score)
    assert out.dtype == dtype
    close(out, expected, rounding)
    has_edges = torch.tensor(lengths, dtype=torch.int64) > 0
    close(found_kept[has_edges.to(where), :, :SIZE], kept[has_edges, :, :SIZE], rounding)

    # Of the output as it was rounded.
    rights = [it.right if score.kind == "additive" else None for it in (operands, at[2])]
    gradient = attention_products(
        grad.cpu().double(), out.cpu().double(), kept, rights[0], wide, score
    )
    of_terms = EdgeGradients.zeros(given[1], heads, (True, True))
    gradients = attention_backward(
        by_destination, by_source, *given, gradient, of_terms, draws, score
    )
    products = _attention_products(grad, out, found_kept, rights[1], bias, *score)
    found_terms = EdgeGradients.zeros(at[3], heads, (True, True))
    results = _attention_backward(
        *at[0], *at[1], *at[2], *at[3], grad, *products, *found_terms, *at[4], *score
    )
    for operand, result, gradient in zip(operands, results, gradients, strict=True):
        if operand is not None:
            assert result.dtype == operand.dtype
            close(result, gradient, 4 * rounding)
    for found, gradient in zip(found_terms, of_terms, strict=True):
        if gradient is not None:
            close(found, gradient, 4 * rounding)


def close(found: Tensor, expected: Tensor, rounding: float, size: float = 1.0) -> None:
    largest = max(size, float(expected.abs().max())) if expected.numel() else size
    torch.testing.assert_close(
        found.cpu().double(), expected.double(), rtol=rounding, atol=rounding * largest
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", ["skewed", "a hub", "mostly empty", "one entry", "at bounds"])
def test_rows_of_any_length(where, kind, lengths):
    check(where, kind, degrees(lengths))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "width", "dtype", "ids", "rounding"),
    [
        (1, 47, torch.float32, torch.int64, 1e-4),
        (4, 64, torch.float32, torch.int32, 1e-4),
        (3, 7, torch.float64, torch.int32, 1e-10),
        (8, 33, torch.float32, torch.int32, 1e-4),
        (1, 200, torch.float32, torch.int32, 1e-4),
        (5, 16, torch.bfloat16, torch.int32, 8e-3),
        (4, 64, torch.float16, torch.int64, 1e-3),
        (40, 1, torch.float32, torch.int32, 1e-4),
    ],
)
def test_shapes_and_dtypes(where, kind, heads, width, dtype, ids, rounding):
    lengths = [*degrees("skewed")[:40], 300]
    check(where, kind, lengths, heads, width, dtype, ids, shuffled=True, rounding=rounding)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_dropped_as_on_the_cpu(where, kind):
    check(where, kind, degrees("at bounds"), 6, 4, shuffled=True, biased=False, dropout=0.3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [(1, 6), (6, 1), (None, 6), (6, None)])
def test_terms_of_edges(where, kind, columns):
    """Scores that leave edges out, and weights, for each head and for all."""
    lengths, random = degrees("at bounds"), torch.Generator().manual_seed(3)
    terms = EdgeTerms(*(
        None if count is None else torch.randn(sum(lengths), count, generator=random)
        for count in columns
    ))  # fmt: skip
    if terms.edge_scores is not None:
        terms.edge_scores[torch.rand(terms.edge_scores.shape, generator=random) < 0.3] = -np.inf
        terms.edge_scores[60:130] = -np.inf  # all of a row's
    for shuffled, dropout in ((False, 0.0), (True, 0.3)):
        check(where, kind, lengths, 6, 4, shuffled=shuffled, dropout=dropout, terms=terms)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_terms", [False, True], ids=["", "with terms"])
@pytest.mark.parametrize(
    ("heads", "width", "dtype", "rounding"),
    [(2, 8, torch.float32, 1e-5), (3, 64, torch.float64, 1e-12), (4, 16, torch.bfloat16, 2e-2)],
)
def test_edges_in_two_parts(where, kind, has_terms, heads, width, dtype, rounding):
    """What further edges add, also to rows that had none before, or all."""
    torch.manual_seed(0)
    lengths = degrees("at bounds")
    entries, _ = entries_of(lengths, torch.int32, True)
    operands = moved(operands_of(kind, len(lengths), heads, width, dtype), where)
    bias, terms = torch.randn(heads, width).to(where, dtype), NO_TERMS
    draws = moved(Draws(torch.tensor([5]), torch.randperm(sum(lengths))), where)
    if has_terms:
        scores, weights = torch.randn(sum(lengths), heads), torch.randn(sum(lengths), 1)
        scores[torch.rand(len(scores)) < 0.3] = -np.inf
        terms = EdgeTerms(*(it.to(where, computed_in(dtype)) for it in (scores, weights)))
    score = AttentionScore(kind.partition(" ")[0], 0.2, 0.3, 0.4)
    parts = []
    is_first = torch.rand(sum(lengths)) < 0.5
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    is_first[rows < 2] = True
    is_first[rows == 3] = False
    for chosen in (is_first, ~is_first):
        counts = rows[chosen].bincount(minlength=len(lengths))
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        part = Entries(indptr, entries.indices[chosen], entries.eids[chosen])
        parts.append(moved(part, where))
    out, kept = _attention(*parts[0], *operands, *terms, None, *draws, *score)
    _add_attention(out, kept, *parts[1], *operands, *terms, bias, *draws, *score)
    expected = _attention(*moved(entries, where), *operands, *terms, bias, *draws, *score)
    close(out, expected[0].cpu(), rounding)
    close(kept, expected[1].cpu(), rounding)


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("lengths", [[3, 0, 300, 7], [4] * NUM_SRC])
def test_destinations_that_are_sources(where, kind, lengths):
    check(where, f"{kind} of itself", lengths, 3, 12)
    check(where, f"{kind} of itself", lengths, 3, 12, torch.bfloat16, rounding=8e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[], [0, 0, 0]])
def test_no_edges(where, kind, lengths):
    check(where, kind, lengths)


def entries_of_additive(lengths):
    torch.manual_seed(1)
    return entries_of(lengths, torch.int32, False)


def backward_of_additive(where, operands, grad, lengths):
    """Gradients, and those of the CPU in float64, on the same edges each time."""
    by_destination, by_source = entries_of_additive(lengths)
    at = [moved(it, where) for it in (by_destination, by_source, operands)]
    score = AttentionScore("additive", 0.2, 1.0, 0.0)
    grad = grad.to(where)
    out, kept = _attention(*at[0], *at[2], *NO_TERMS, None, *NO_DRAWS, *score)
    products = _attention_products(grad, out, kept, at[2].right, None, *score)
    args = (*at[0], *at[1], *at[2], *NO_TERMS, grad, *products, *NO_GRADIENTS, *NO_DRAWS, *score)
    found = [it.cpu() for it in _attention_backward(*args)]
    wide = widened(operands)
    exact, sums = attention_forward(by_destination, wide, NO_TERMS, None, NO_DRAWS, score)
    gradient = attention_products(grad.cpu().double(), exact, sums, wide.right, None, score)
    expected = attention_backward(
        by_destination, by_source, wide, NO_TERMS, gradient, NO_GRADIENTS, NO_DRAWS, score
    )
    return found, AttentionOperands(*expected)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e25, 1e34])
def test_gradients_of_any_size(where, scale):
    """Sums of integers have units of their own."""
    torch.manual_seed(0)
    lengths = degrees("at bounds")
    operands = operands_of("additive", len(lengths), 2, 8, torch.float32)
    grad = scale * torch.randn(len(lengths), 2, 8)
    found, expected = backward_of_additive(where, operands, grad, lengths)
    close(found[2], expected.right, 4e-4, size=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e6, 1e15, 1e30])
def test_values_elsewhere_do_not_matter(where, size, dtype):
    """The unit of a destination's sum is of what it reads alone."""
    torch.manual_seed(0)
    lengths = [3, 4, 0, 5, 30]
    operands = operands_of("additive", len(lengths), 2, 8, dtype)
    grad = torch.randn(len(lengths), 2, 8).to(dtype)
    before, _ = backward_of_additive(where, operands, grad, lengths)
    # Entries of the last destination alone.
    by_destination, _ = entries_of_additive(lengths)
    of_last = by_destination.indices[by_destination.indptr[-2] :].unique().long()
    read = by_destination.indices[: by_destination.indptr[-2]].unique().long()
    others = [source for source in of_last.tolist() if source not in set(read.tolist())]
    operands.values[others] *= size
    after, expected = backward_of_additive(where, operands, grad, lengths)
    assert len(others) > 0
    assert torch.equal(after[2][:-1], before[2][:-1])
    close(after[2][:-1], expected.right[:-1], 1e-13 if dtype == torch.float64 else 4e-4)


@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_begin_anywhere(where, kind, offset):
    """Also where rows are too wide to be read number by number; and a bias that is a view."""
    torch.manual_seed(0)
    by_destination, by_source = entries_of([5, 0, 9], torch.int32, False)
    operands = operands_of(kind, 3, 1, 200, torch.float32)
    bias, grad = torch.randn(1, 200), torch.randn(3, 1, 200)
    score = AttentionScore(kind.partition(" ")[0], 0.2, 0.3, 0.0)

    def results(move):
        given = (*map(move, operands), *NO_TERMS)
        out, kept = _attention(*by_destination, *given, move(bias), *NO_DRAWS, *score)
        right = given[2] if score.kind == "additive" else None
        products = _attention_products(move(grad), out, kept, right, move(bias), *score)
        of_output = (move(grad), *products, *NO_GRADIENTS)
        args = (*by_destination, *by_source, *given, *of_output, *NO_DRAWS, *score)
        return [out, *_attention_backward(*args)]

    def shifted(tensor):
        if tensor is None:
            return None
        memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=where)
        return memory[offset:].view(tensor.shape).copy_(tensor)

    by_destination, by_source = moved(by_destination, where), moved(by_source, where)
    expected = results(lambda it: None if it is None else it.to(where))
    for one, other in zip(results(shifted), expected, strict=True):
        assert torch.equal(one, other)


def test_gradients_that_are_not_finite_stay_with_their_destination(where):
    torch.manual_seed(0)
    lengths = degrees("at bounds")
    operands = operands_of("additive", len(lengths), 2, 8, torch.float32)
    grad = torch.randn(len(lengths), 2, 8)
    grad[3, 1, 2], grad[4, 0, 1] = float("nan"), float("inf")
    # Nodes without edges may hold anything.
    operands.values[NUM_SRC - 3 :] = float("nan")
    operands.values[NUM_SRC - 2 :] = 1e38
    (_, _, of_right, _), _ = backward_of_additive(where, operands, grad, lengths)
    grad[3, 1], grad[4, 0] = 0, 0
    (_, _, others, _), expected = backward_of_additive(where, operands, grad, lengths)
    bad = torch.zeros(len(lengths), 2, dtype=torch.bool)
    bad[3, 1] = bad[4, 0] = True
    assert torch.equal(of_right.isnan(), bad)
    assert torch.equal(of_right[~bad], others[~bad])
    close(others, expected.right, 4e-4)


@pytest.mark.parametrize("num_dst", [0, 30, NUM_SRC])
@pytest.mark.parametrize(
    ("heads", "width", "dtype", "rounding"),
    [
        (4, 64, torch.float32, 1e-5),
        (3, 7, torch.float64, 1e-12),
        (1, 600, torch.float32, 1e-5),
        (5, 16, torch.bfloat16, 8e-3),
    ],
)
def test_vectors_that_operands_are_made_of(where, heads, width, dtype, rounding, num_dst):
    torch.manual_seed(0)
    of_values, values = torch.randn(2, NUM_SRC, heads, width).to(dtype)
    of_left = torch.randn(NUM_SRC, heads).to(computed_in(dtype))
    of_right = torch.randn(num_dst, heads).to(computed_in(dtype)) if num_dst else None
    vectors = torch.randn(2, heads, width).to(computed_in(dtype))
    tensors = of_values, values, of_left, of_right, vectors
    expected, *others = (None if it is None else it.clone().double() for it in tensors)
    of_vectors = attention_vectors_backward(expected, *others)
    added = of_left.double().unsqueeze(-1) * vectors[0].double()
    torch.testing.assert_close(expected[num_dst:], (of_values.double() + added)[num_dst:])
    sums = (of_left.double().unsqueeze(-1) * values.double()).sum(0)
    torch.testing.assert_close(of_vectors[0], sums)
    tensors = [None if it is None else it.to(where) for it in tensors]
    found = _attention_vectors_backward(*tensors)
    assert found.dtype == vectors.dtype
    close(found, of_vectors, rounding)
    close(tensors[0], expected, rounding)
    products = attention_vectors(values.double(), vectors.double(), num_dst)
    found = _attention_vectors(values.to(where), vectors.to(where), num_dst)
    for one, other in zip(found, products, strict=True):
        assert one.dtype == vectors.dtype
        close(one, other, 1e-5)
    exact = (values.double() * vectors[0].double()).sum(-1)
    torch.testing.assert_close(products[0], exact)


def test_rows_that_are_too_wide(where):
    assert can_attend(1, 512, torch.float32)
    assert not can_attend(1, 516, torch.float32)
    with pytest.raises(InvalidInputError, match="516 columns"):
        check(where, "dot", [3, 4], 1, 516)

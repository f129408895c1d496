"""Attention against a composition of torch's own operations in float64, edge by edge."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import dgl
import pytest
import torch
from torch import Tensor

from dgl_mgpu.ops.attention import (
    LARGEST,
    NO_DRAWS,
    SUM,
    AttentionOperands,
    AttentionScore,
    Draws,
    EdgeGradients,
    EdgeTerms,
    Entries,
    add_attention,
    attention,
    attention_backward,
    attention_forward,
    attention_products,
)
from dgl_mgpu.ops.transpose import transpose
from tests.ops.attention_cases import (
    DTYPES,
    EMPTY,
    EMPTY_GRAPHS,
    INF,
    KINDS,
    NAMES,
    SCALE,
    SLOPE,
    add_op,
    attend,
    backward_op,
    case_of,
    close,
    compare,
    composed,
    graph_of,
    leaves_of,
    products_op,
    small_graph,
    sum_op,
)


@pytest.mark.parametrize("width", [1, 7, 16, 33])
@pytest.mark.parametrize("heads", [1, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_composition(kind, dtype, heads, width):
    for ids, eids in ((torch.int32, False), (torch.int64, True)):
        graph = small_graph(ids=ids, eids=eids)
        compare(case_of(kind, graph, heads, width, dtype, bias=eids))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("eids", [False, True])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_a_graph(kind, ids, eids, bias):
    compare(case_of(kind, small_graph(ids=ids, eids=eids), bias=bias))


@pytest.mark.parametrize("graph", EMPTY_GRAPHS)
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_without_edges(kind, graph):
    for eids in (False, True):
        empty = graph_of(EMPTY, EMPTY, *EMPTY_GRAPHS[graph], eids=eids)
        for dropout in (0.0, 0.5):
            compare(case_of(kind, empty), dropout=dropout)


@pytest.mark.parametrize("kind", KINDS)
def test_no_heads_or_no_width(kind):
    for heads, width in ((0, 3), (2, 0), (0, 0)):
        compare(case_of(kind, small_graph(), heads, width))


@pytest.mark.parametrize("kind", ["additive", "gatv2", "dot"])
def test_against_dgl(kind):
    case = case_of(kind, small_graph(ids=torch.int32), bias=False)
    src, dst, num_src, num_dst, _ = case.graph
    graph = dgl.heterograph(
        {("u", "to", "v"): (src.int(), dst.int())}, {"u": num_src, "v": num_dst}
    )
    values, right = case.arguments["values"], case.arguments["right"]
    left = case.arguments.get("left", values)
    if kind == "additive":
        scores = torch.nn.functional.leaky_relu(dgl.ops.u_add_v(graph, left, right), SLOPE)
    elif kind == "gatv2":
        pre = torch.nn.functional.leaky_relu(dgl.ops.u_add_v(graph, left, right), SLOPE)
        scores = (pre * case.arguments["vector"]).sum(2)
    else:
        scores = SCALE * dgl.ops.u_dot_v(graph, left, right).squeeze(2)
    weights = dgl.ops.edge_softmax(graph, scores).unsqueeze(2)
    expected = dgl.ops.u_mul_e_sum(graph, values, weights)
    torch.testing.assert_close(attend(case, case.arguments), expected)


def test_a_node_without_in_edges_has_the_bias():
    case = case_of("dot", small_graph())
    assert torch.equal(attend(case, case.arguments)[0], case.arguments["bias"])
    del case.arguments["bias"]
    assert not attend(case, case.arguments)[0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_slope_and_scale(kind):
    """Their defaults are DGL's slope and no scale."""
    case = case_of(kind, small_graph())
    plain = attend(case, case.arguments, negative_slope=0.2, scale=1.0)
    others = {"negative_slope": 0.9, "scale": 0.1}
    given = {name: case.arguments.get(name) for name in (*NAMES, "bias")}
    operands = [given.pop(name) for name in NAMES[:3]]
    by_default = attention(*case.graph.entries, *operands, score=case.score, **given)
    assert torch.equal(plain, by_default)
    assert not torch.allclose(plain, attend(case, case.arguments, **others))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_not_contiguous(kind):
    case = case_of(kind, small_graph(), heads=3, width=4)
    strided = {name: torch.stack((it, it), -1)[..., 0] for name, it in case.arguments.items()}
    by_source = transpose(*case.graph.entries, case.graph.num_src)
    ids, ids_by_source = (
        Entries(*(torch.stack((it, it), -1)[:, 0] for it in entries))
        for entries in (case.graph.entries, by_source)
    )
    assert not any(it.is_contiguous() for it in (*ids, *ids_by_source, *strided.values()))
    other = case._replace(graph=case.graph._replace(entries=ids))
    found = {name: it.requires_grad_() for name, it in strided.items()}
    expected = leaves_of(case.arguments)
    outs = attend(other, found, by_source=lambda: ids_by_source), attend(case, expected)
    assert torch.equal(*outs)
    grad = torch.randn(outs[0].shape[::-1]).double().permute(2, 1, 0)
    for gradients in zip(
        torch.autograd.grad(outs[0], list(found.values()), grad),
        torch.autograd.grad(outs[1], list(expected.values()), grad),
        strict=True,
    ):
        assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    src, dst = torch.randint(0, 4, (12,)), torch.randint(0, 3, (12,))
    case = case_of(kind, graph_of(src, dst, 5, 4, eids=True))
    names = list(case.arguments)
    for dropout in (0.0, 0.3):

        def function(*tensors: Tensor, dropout: float = dropout) -> Tensor:
            torch.manual_seed(1)
            return attend(case, dict(zip(names, tensors, strict=True)), dropout=dropout)

        assert torch.autograd.gradcheck(function, tuple(leaves_of(case.arguments).values()))


@pytest.mark.parametrize("kind", ["additive", "dot"])
def test_scores_of_minus_infinity(kind):
    """Beside finite ones they weigh nothing; a row of nothing else is NaN."""
    src = torch.tensor([0, 1, 2, 0, 0, 1, 2, 1, 3, 4])
    dst = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 4, 4])
    for dtype in (torch.float64, torch.float32):
        case = case_of(kind, graph_of(src, dst, 5, 6, eids=True), dtype=dtype)
        case.arguments["left"][0] = -INF
        case.arguments["right"].abs_()
        out = attend(case, case.arguments)
        assert out.isnan().all(2).all(1).tolist() == [False, True, False, False, False, False]
        assert out.isnan().any(2).any(1).tolist() == [False, True, False, False, False, False]
        if kind == "additive":
            compare(case)
        # In a dot product's gradient, as in torch's, 0 is multiplied by infinity.
        torch.testing.assert_close(out, composed(case, case.arguments), equal_nan=True)


@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_scores_of_infinity_and_nan(bad):
    """Such a row is NaN, as torch's softmax has it, and no other."""
    case = case_of("additive", small_graph())
    case.arguments["left"][5] = bad
    out = attend(case, case.arguments)
    torch.testing.assert_close(out, composed(case, case.arguments), equal_nan=True)
    assert out.isnan().any() and not out.isnan().all()
    compare(case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_large_scores_do_not_overflow(dtype):
    case = case_of("additive", small_graph(), dtype=dtype)
    case.arguments["left"] *= 1000
    case.arguments["left"] -= 5000
    out = attend(case, case.arguments)
    expected = composed(case, {name: it.double() for name, it in case.arguments.items()})
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_on_any_number_of_threads(kind, on_threads):
    count = 900
    src, dst = torch.randint(0, count, (2, 5000))
    dst[:500] = 17
    # In float64: sums of float32 are taken in it, and rounding would hide their order.
    case = case_of(kind, graph_of(src, dst, count, count, eids=True), 3, 5)
    grad = torch.randn(count, 3, 5).double()

    def results() -> list[Tensor]:
        leaves = leaves_of(case.arguments)
        torch.manual_seed(0)
        out = attend(case, leaves, dropout=0.3)
        return [out, *torch.autograd.grad(out, list(leaves.values()), grad)]

    first = on_threads(1, results)
    for number in (2, 3):
        assert all(map(torch.equal, first, on_threads(number, results)))


def test_the_vector_of_many_rows(on_threads):
    """More rows than blocks of the smallest size make."""
    count = 64 * 256 + 77
    src, dst = torch.randint(0, count, (2, 30_000))
    case = case_of("gatv2", graph_of(src, dst, count, count, eids=False), 1, 2)
    on_threads(2, lambda: compare(case))


@pytest.mark.parametrize("kind", KINDS)
def test_only_gradients_that_are_needed(kind):
    """Each is the same alone, and the edges by source are asked for once."""
    case = case_of(kind, small_graph())
    calls = []

    def by_source() -> Any:
        calls.append(1)
        return transpose(*case.graph.entries, case.graph.num_src)

    leaves = leaves_of(case.arguments)
    out = attend(case, leaves)
    wanted = dict(
        zip(leaves, torch.autograd.grad(out, list(leaves.values()), out.detach()), strict=True)
    )
    for name in leaves:
        calls.clear()
        only = {key: it.detach().requires_grad_(key == name) for key, it in leaves.items()}
        found = attend(case, only, by_source=by_source)
        assert not calls
        (gradient,) = torch.autograd.grad(found, only[name], out.detach())
        assert torch.equal(gradient, wanted[name])
        assert calls == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_must_not_be_overwritten(kind):
    case = case_of(kind, small_graph())
    for name in case.arguments.keys() - {"bias"}:
        leaves = leaves_of(case.arguments)
        copies = {key: it.clone() for key, it in leaves.items()}
        out = attend(case, copies)
        with torch.no_grad():
            copies[name].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_and_the_bias_may_be_written_to(kind):
    """As of a layer that adds its bias at last: activations work in place."""
    case = case_of(kind, small_graph())
    expected, found = leaves_of(case.arguments), leaves_of(case.arguments)
    attend(case, expected).relu().square().sum().backward()
    out = attend(case, found).relu_()
    with torch.no_grad():
        found["bias"].add_(1)
    out.square().sum().backward()
    for name, leaf in found.items():
        assert torch.equal(leaf.grad, expected[name].grad), name


@pytest.mark.parametrize("size", [1e4, 1e8, 1e20])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_any_size_have_weights_that_add_up(kind, size):
    """Two edges with equal scores have half of the gradient each, in float32."""
    edges = torch.tensor([0, 2]), torch.tensor([0, 1]), None
    values = torch.ones(2, 1, 1, requires_grad=True)
    score, _, rest = kind.partition(" ")
    options: dict[str, Any] = {"score": score, "negative_slope": 1.0}
    if rest == "with terms":
        options |= {"edge_scores": torch.ones(2, 1), "edge_weights": torch.ones(2, 1)}
    left, right = None, torch.full((1, 1, 1), size)
    if score == "additive":
        left, right = torch.zeros(2, 1), right[:, :, 0]
    elif score == "dot" and rest != "of values":
        left = torch.ones(2, 1, 1)
    if score == "gatv2":
        options["vector"] = torch.ones(1, 1)
    (gradient,) = torch.autograd.grad(attention(*edges, values, left, right, **options), values)
    torch.testing.assert_close(gradient.flatten(), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("kind", KINDS)
def test_what_destinations_keep(kind):
    """The largest score and the sum of exponentials of scores less that."""
    case = case_of(kind, small_graph(eids=False), heads=3)
    indptr, indices, _ = case.graph.entries
    given = list(map(case.arguments.get, (*NAMES, "bias")))
    values, left, right, vector, edge_scores, *_ = given
    tensors = (indptr, indices, None, *given, *NO_DRAWS)
    _, kept = sum_op(*tensors, case.score, SLOPE, SCALE, 0.0)
    for row, (first, last) in enumerate(pairwise(indptr.tolist())):
        sources = (values if left is None else left)[indices[first:last]]
        pre = sources + right[row]
        added = 0 if edge_scores is None else edge_scores[first:last]
        if case.score == "additive":
            pre = pre + added
            scores = torch.where(pre > 0, pre, SLOPE * pre)
        else:
            scores = SCALE * (sources * right[row]).sum(2) + added
            if case.score == "gatv2":
                scores = (vector * torch.where(pre > 0, pre, SLOPE * pre)).sum(2) + added
        if last > first:
            torch.testing.assert_close(kept[row, :, LARGEST], scores.amax(0))
            sums = (scores - scores.amax(0)).exp().sum(0)
            torch.testing.assert_close(kept[row, :, SUM], sums)


@pytest.mark.parametrize("kind", KINDS)
def test_registration(kind):
    for eids, dtype in ((False, torch.float32), (True, torch.float16)):
        case = case_of(kind, small_graph(eids=eids), dtype=dtype, bias=eids)
        bias, given = case.arguments.get("bias"), list(map(case.arguments.get, NAMES))
        draws = Draws(torch.tensor([5]), torch.randperm(250)) if eids else NO_DRAWS
        score = AttentionScore(case.score, SLOPE, SCALE, 0.5 if eids else 0.0)
        arguments = (*case.graph.entries, *given, bias, *draws, *score)
        torch.library.opcheck(sum_op, arguments)
        out, kept = sum_op(*arguments)
        torch.library.opcheck(add_op, (out.clone(), kept.clone(), *arguments))
        grad = torch.randn(out.shape).to(dtype)
        right = given[2] if case.score == "additive" else None
        arguments = (grad, out, kept, right, bias, *score)
        torch.library.opcheck(products_op, arguments)
        by_source = transpose(*case.graph.entries, case.graph.num_src)
        of_terms = EdgeGradients.zeros(EdgeTerms(*given[4:]), 2, (True, True))
        given += [grad, *products_op(*arguments), *of_terms, *draws, *score]
        torch.library.opcheck(backward_op, (*case.graph.entries, *by_source, *given))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dot of values"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_in_several_parts(kind, dtype):
    """Which source an edge is of decides its part; some destinations are without edges in some."""
    case = case_of(kind, small_graph(), heads=3, dtype=dtype)
    indptr, indices, eids = case.graph.entries
    by_destination = torch.arange(len(indptr) - 1).repeat_interleave(indptr.diff())
    score = AttentionScore(case.score, SLOPE, SCALE, 0.4)
    draws = Draws(torch.tensor([9]), torch.randperm(250))
    operands = AttentionOperands(*map(case.arguments.get, NAMES[:4]))
    terms = EdgeTerms(*map(case.arguments.get, NAMES[4:]))
    if terms.edge_scores is not None:
        # All of a destination's, and what others have in one part.
        terms.edge_scores[(case.graph.dst == 3) | (case.graph.src < 8)] = -INF
    bias, grad = case.arguments["bias"], torch.randn(case.graph.num_dst, 3, 3).to(dtype)
    bounds = (0, 8, 9, case.graph.num_src)
    parts = []
    for first, last in pairwise(bounds):
        chosen = (indices >= first) & (indices < last)
        counts = by_destination[chosen].bincount(minlength=len(indptr) - 1)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        entries = Entries(starts, indices[chosen] - first, eids[chosen])
        rows = [None if it is None else it[first:last] for it in operands[:2]]
        parts.append((entries, operands._replace(values=rows[0], left=rows[1]), terms))
    out, kept = attention_forward(*parts[0], None, draws, score)
    add_attention(out, kept, *parts[1], None, draws, score)
    add_attention(out, kept, *parts[2], bias, draws, score)
    expected, of_all = attention_forward(case.graph.entries, operands, terms, bias, draws, score)
    rounding = {8: 1e-12, 4: 1e-5, 2: 4 * torch.finfo(dtype).eps}[dtype.itemsize]
    close(out, expected.double(), rounding, rounding)
    close(kept, of_all.double(), rounding, rounding)
    right = operands.right if case.score == "additive" else None
    gradient = attention_products(grad, expected, of_all, right, bias, score)
    by_source = Entries(*transpose(*case.graph.entries, case.graph.num_src))
    # One memory for gradients of all parts' edges.
    of_whole, of_parts = (EdgeGradients.zeros(terms, 3, (True, True)) for _ in range(2))
    whole = attention_backward(
        case.graph.entries, by_source, operands, terms, gradient, of_whole, draws, score
    )
    found = []
    for entries, of_part, _ in parts:
        by_source = transpose(entries.indptr, entries.indices, None, len(of_part.values))
        edges = Entries(*by_source[:2], entries.eids[by_source[2]])
        found.append(
            attention_backward(entries, edges, of_part, terms, gradient, of_parts, draws, score)
        )
    of_values, of_left, of_right, of_vector = zip(*found, strict=True)
    for expected, one in zip(whole, (of_values, of_left), strict=False):
        if expected is not None:
            close(torch.cat(one), expected.double(), rounding, rounding)
    for expected, one in zip(whole[2:], (of_right, of_vector), strict=False):
        if expected is not None:
            close(sum(it.double() for it in one), expected.double(), rounding, rounding)
    for expected, one in zip(of_whole, of_parts, strict=True):
        if expected is not None:
            close(one, expected.double(), rounding, rounding)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("terms")])
def test_edges_that_are_left_out(kind):
    """By minus infinity: as if they were not there, also where none is left."""
    case = case_of(kind, small_graph(eids=False))
    src, dst, num_src, num_dst, _ = case.graph
    out_of = (torch.rand(len(src)) < 0.4) | (dst == 5)
    case.arguments["edge_scores"][out_of] = -INF
    left, found = ~out_of, leaves_of(case.arguments)
    rest = case._replace(graph=graph_of(src[left], dst[left], num_src, num_dst, eids=False))
    of_rest = leaves_of(case.arguments | {
        name: case.arguments[name][left] for name in NAMES[4:]
    })  # fmt: skip
    outs = attend(case, found), attend(rest, of_rest)
    torch.testing.assert_close(*outs)
    grad = torch.randn(outs[0].shape).double()
    for out in outs:
        out.backward(grad)
    for name, leaf in found.items():
        of_edges = name in NAMES[4:]
        torch.testing.assert_close(leaf.grad[left] if of_edges else leaf.grad, of_rest[name].grad)
        assert not of_edges or not leaf.grad[out_of].any()


def test_terms_of_more_edges_than_there_are_entries():
    """As where a part of a graph keeps the numbers of its edges; by eids alone."""
    case = case_of("dot with terms", small_graph())
    entries = case.graph.entries
    shifted = case.graph._replace(entries=entries._replace(eids=entries.eids + 10))
    more = {
        name: torch.cat([case.arguments[name][:10], case.arguments[name]]) for name in NAMES[4:]
    }
    leaves = leaves_of(case.arguments | more)
    by_source = Entries(*transpose(*entries, case.graph.num_src))
    by_source = by_source._replace(eids=by_source.eids + 10)
    found = attend(case._replace(graph=shifted), leaves, by_source=lambda: by_source)
    assert torch.equal(found, attend(case, case.arguments))
    found.sum().backward()
    for name in NAMES[4:]:
        assert leaves[name].grad.shape == leaves[name].shape and not leaves[name].grad[:10].any()


def test_scores_that_edges_have_alone():
    """A sum by the softmax of given scores: of no operands, and without a slope."""
    case = case_of("additive with terms", small_graph(), bias=False)
    src, dst, num_src, num_dst, _ = case.graph
    nothing = {"left": torch.zeros(num_src, 2), "right": torch.zeros(num_dst, 2)}
    arguments = case.arguments | {name: it.double() for name, it in nothing.items()}
    found = attend(case, arguments, negative_slope=1.0, edge_weights=None)
    graph = dgl.heterograph({("u", "to", "v"): (src, dst)}, {"u": num_src, "v": num_dst})
    weights = dgl.ops.edge_softmax(graph, arguments["edge_scores"]).unsqueeze(2)
    torch.testing.assert_close(found, dgl.ops.u_mul_e_sum(graph, arguments["values"], weights))


@pytest.mark.parametrize("score", ["gatv2", "dot"])
def test_destinations_that_are_sources(score):
    """Without ``right`` it is the first of the values, whose gradient is of both."""
    graph = small_graph()
    case = case_of("gatv2" if score == "gatv2" else "dot of values", graph)
    leaves = leaves_of({**case.arguments, "right": case.arguments["values"][: graph.num_dst]})
    expected = attend(case, leaves)
    expected.square().sum().backward()
    assert leaves["values"].grad is not None
    both = leaves["values"].grad.clone()
    both[: graph.num_dst] += leaves["right"].grad
    values = case.arguments["values"].clone().requires_grad_()
    options = {"score": score, "vector": case.arguments.get("vector")}
    options |= {"negative_slope": SLOPE, "scale": SCALE, "bias": case.arguments.get("bias")}
    found = attention(*graph.entries, values, None, None, **options)
    found.square().sum().backward()
    assert torch.equal(found, expected)
    torch.testing.assert_close(values.grad, both)

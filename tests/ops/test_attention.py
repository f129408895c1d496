"""Attention against a composition of torch's own operations in float64, edge by edge."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import dgl
import pytest
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
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
    computed_in,
)
from dgl_mgpu.ops.philox import ATTENTION_STREAM
from dgl_mgpu.ops.transpose import transpose
from tests.ops import reference

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KINDS = (
    "additive", "gatv2", "dot", "dot of values",
    "additive with terms", "gatv2 with terms", "dot with terms",
)  # fmt: skip
#: Operands of scores, and what edges have of their own.
NAMES = ("values", "left", "right", "vector", "edge_scores", "edge_weights")
INF = float("inf")
SLOPE, SCALE = 0.2, 0.3

Arguments = dict[str, Tensor]
sum_op = torch.ops.dgl_mgpu.attention.default
add_op = torch.ops.dgl_mgpu.add_attention.default
products_op = torch.ops.dgl_mgpu.attention_products.default
backward_op = torch.ops.dgl_mgpu.attention_backward.default


class Graph(NamedTuple):
    """Edges by their ids, and the same by destination."""

    src: Tensor
    dst: Tensor
    num_src: int
    num_dst: int
    entries: Entries


class Case(NamedTuple):
    graph: Graph
    score: str
    arguments: Arguments


def graph_of(
    src: Tensor, dst: Tensor, num_src: int, num_dst: int, *, ids: Any = torch.int64, eids: bool
) -> Graph:
    """Edges numbered along destinations or, with ``eids``, at random."""
    dst, order = dst.sort(stable=True)
    src, count = src[order], len(src)
    indptr = torch.cat([torch.zeros(1).long(), dst.bincount(minlength=num_dst).cumsum(0)])
    numbers = torch.randperm(count) if eids else torch.arange(count)
    entries = Entries(indptr.to(ids), src.to(ids), numbers.to(ids) if eids else None)
    by_id = numbers.argsort()
    return Graph(src[by_id], dst[by_id], num_src, num_dst, entries)


def small_graph(*, ids: Any = torch.int64, eids: bool = True) -> Graph:
    """A hub, repeated edges, destinations without in-edges and sources without out-edges."""
    src, dst = torch.randint(2, 20, (250,)), torch.randint(1, 15, (250,))
    dst[:120] = 3
    src[120:125], dst[120:125] = 7, 8
    return graph_of(src, dst, 23, 18, ids=ids, eids=eids)


EMPTY = torch.empty(0, dtype=torch.int64)
EMPTY_GRAPHS = {"no rows": (5, 0), "no edges": (4, 3), "no sources": (0, 3), "nothing": (0, 0)}


def case_of(
    kind: str,
    graph: Graph,
    heads: int = 2,
    width: int = 3,
    dtype: torch.dtype = torch.float64,
    *,
    bias: bool = True,
) -> Case:
    arguments = {"values": torch.randn(graph.num_src, heads, width).to(dtype)}
    score, _, rest = kind.partition(" ")
    shape = (heads,) if score == "additive" else (heads, width)
    of_score = dtype if score != "additive" or dtype == torch.float64 else torch.float32
    if score != "gatv2" and rest != "of values":
        arguments["left"] = torch.randn(graph.num_src, *shape).to(of_score)
    arguments["right"] = torch.randn(graph.num_dst, *shape).to(of_score)
    if score == "gatv2":
        arguments["vector"] = torch.randn(heads, width).to(computed_in(dtype))
    if rest == "with terms":
        # One has numbers for each head, the other one for all.
        number, count = computed_in(dtype), len(graph.src)
        arguments["edge_scores"] = torch.randn(count, heads).to(number)
        arguments["edge_weights"] = torch.randn(count, 1).to(number)
    if bias:
        arguments["bias"] = torch.randn(heads, width).to(dtype)
    return Case(graph, score, arguments)


def attend(case: Case, arguments: Arguments, **others: Any) -> Tensor:
    values, right = arguments["values"], arguments["right"]
    given = {name: arguments.get(name) for name in ("vector", "bias", *NAMES[4:])}
    given |= dict(negative_slope=SLOPE, scale=SCALE) | others
    left = arguments.get("left")
    return attention(*case.graph.entries, values, left, right, score=case.score, **given)


def composed(case: Case, arguments: Arguments, keep: Tensor | float = 1.0) -> Tensor:
    """The same of torch's operations; ``keep`` has a row for each edge by its id."""
    return composed_parts(case, arguments, keep)[0]


def composed_parts(
    case: Case, arguments: Arguments, keep: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the edges' scores and their softmax."""
    src, dst, _, num_dst, _ = case.graph
    values, right = arguments["values"], arguments["right"][dst]
    left = arguments.get("left", values)[src]
    added, factors = arguments.get("edge_scores", 0), arguments.get("edge_weights", 1)
    if case.score == "additive":
        scores = torch.nn.functional.leaky_relu(left + right + added, SLOPE)
    elif case.score == "gatv2":
        pre = torch.nn.functional.leaky_relu(left + right, SLOPE)
        scores = (arguments["vector"] * pre).sum(2) + added
    else:
        scores = SCALE * (left * right).sum(2) + added
    places = dst.view(-1, 1).expand_as(scores)
    largest = scores.new_full((num_dst, scores.shape[1]), -INF)
    largest = largest.scatter_reduce(0, places, scores.detach(), "amax")
    powers = (scores - largest[dst]).exp()
    sums = torch.zeros_like(largest).index_add(0, dst, powers)
    weights = powers / sums[dst]
    messages = (weights * keep * factors).unsqueeze(2) * values[src]
    out = values.new_zeros(num_dst, *values.shape[1:]).index_add(0, dst, messages)
    return out + arguments["bias"] if "bias" in arguments else out, scores, weights


def leaves_of(arguments: Arguments, dtype: torch.dtype | None = None) -> Arguments:
    return {
        name: tensor.detach().clone().to(dtype or tensor.dtype).requires_grad_()
        for name, tensor in arguments.items()
    }


def compare(case: Case, keep: Tensor | float = 1.0, seed: int = 0, **others: Any) -> None:
    """Compare the output and all gradients with those of the composition."""
    own, double = leaves_of(case.arguments), leaves_of(case.arguments, torch.float64)
    expected, scores, weights = composed_parts(case, double, keep)
    torch.manual_seed(seed)
    found = attend(case, own, **others)
    dtype = own["values"].dtype
    assert found.dtype == dtype and found.shape == expected.shape and found.is_contiguous()
    precise = 1e-11 if dtype == torch.float64 else 1e-5
    # Half types are rounded once.
    rounding = 0.51 * torch.finfo(dtype).eps if dtype.itemsize == 2 else precise
    close(found, expected, rounding, precise)
    grad = torch.randn(found.shape).to(dtype)
    gradients = torch.autograd.grad(found, list(own.values()), grad)
    # Gradients take the output as it was rounded: each row's product with its gradient is off.
    off = (grad.double() * (found.double() - expected)).sum(2)[case.graph.dst]
    result = (grad.double() * expected).sum() - ((weights * off).detach() * scores).sum()
    wanted = torch.autograd.grad(result, list(double.values()))
    for name, gradient, by_torch in zip(own, gradients, wanted, strict=True):
        assert gradient.dtype == own[name].dtype, name
        once = rounding if gradient.dtype == dtype else precise
        close(gradient, by_torch, once, precise, name)


def close(found: Tensor, expected: Tensor, rtol: float, atol: float, name: str = "out") -> None:
    """Compare, where ``atol`` is relative to the largest finite element."""
    finite = expected.detach().nan_to_num(posinf=0, neginf=0).abs()
    largest = max(1.0, float(finite.max())) if finite.numel() else 1.0
    torch.testing.assert_close(
        found.double(),
        expected,
        rtol=rtol,
        atol=atol * largest,
        equal_nan=True,
        msg=lambda message: f"{name}: {message}",
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


def keep_of(numbers: Tensor, heads: int, key: int, dropout: float) -> Tensor:
    """What edges' weights are multiplied by, in plain integers."""
    threshold = int(dropout * 2**32)
    rows = []
    for number in numbers.tolist():
        words: list[int] = []
        for block in range(-(-heads // 4)):
            for draw in reference.block(number, block, ATTENTION_STREAM, key):
                words += [draw & reference.MASK32, draw >> 32]
        rows.append([0.0 if word < threshold else 1 / (1 - dropout) for word in words[:heads]])
    return torch.tensor(rows, dtype=torch.float64).view(len(rows), heads)


def drawn_key(seed: int) -> int:
    torch.manual_seed(seed)
    return int(torch.empty(1, dtype=torch.int64).random_())


@pytest.mark.parametrize("heads", [1, 4, 5, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_by_the_edges_numbers(kind, heads):
    for dropout, eids, dtype in (
        (0.4, False, torch.float64),
        (0.9, True, torch.float64),
        (0.25, True, torch.float32),
    ):
        case = case_of(kind, small_graph(eids=eids), heads, 3, dtype)
        keep = keep_of(torch.arange(250), heads, drawn_key(7), dropout)
        compare(case, keep, seed=7, dropout=dropout)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_dropout_of_large_edge_numbers(kind):
    """Both halves of an edge's number count, as do both of a negative key."""
    case = case_of(kind, small_graph(eids=False))
    numbers = torch.randint(0, 1 << 62, (250,))
    numbers[1], numbers[2] = numbers[0] ^ 1 << 32, numbers[0] ^ 1
    indptr, indices, _ = case.graph.entries
    by_source = transpose(indptr, indices, None, case.graph.num_src)
    case = case._replace(graph=case.graph._replace(entries=Entries(indptr, indices, numbers)))
    keep = keep_of(numbers, 2, drawn_key(3), 0.5)
    assert not torch.equal(keep[0], keep[1]) or not torch.equal(keep[0], keep[2])

    def rows() -> Entries:
        return Entries(*by_source[:2], numbers[by_source[2]])

    compare(case, keep, seed=3, dropout=0.5, by_source=rows)
    key = -(1 << 63) + 12345
    given = map(case.arguments.get, NAMES)
    tensors = (indptr, indices, numbers, *given, None, torch.tensor([key]), None)
    out, _ = sum_op(*tensors, case.score, SLOPE, SCALE, 0.5)
    del case.arguments["bias"]
    torch.testing.assert_close(out, composed(case, case.arguments, keep_of(numbers, 2, key, 0.5)))


def test_a_word_at_the_threshold_is_kept():
    graph = graph_of(torch.zeros(5).long(), torch.arange(5), 1, 5, eids=False)
    case = case_of("additive", graph, 1, 1, bias=False)
    words = [reference.block(edge, 0, ATTENTION_STREAM, drawn_key(4))[0] for edge in range(5)]
    words = [word & reference.MASK32 for word in words]
    for edge, word in enumerate(words):
        dropout = word / 2**32
        keep = keep_of(torch.arange(5), 1, drawn_key(4), dropout)
        assert keep[edge] > 0
        compare(case, keep, seed=4, dropout=dropout)


def test_dropout_is_repeatable():
    case = case_of("additive", small_graph())
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attend(case, case.arguments, dropout=0.5))
    outs.append(attend(case, case.arguments, dropout=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2]) and not torch.equal(outs[2], outs[3])
    # Without dropout nothing is drawn.
    before = torch.get_rng_state()
    attend(case, case.arguments)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.85])
def test_the_share_that_is_dropped(dropout):
    """Each destination has one in-edge, whose value is 1."""
    count, heads = 10_000, 8
    graph = graph_of(torch.zeros(count).long(), torch.arange(count), 1, count, eids=True)
    case = case_of("additive", graph, heads, 1, bias=False)
    case.arguments["values"].fill_(1)
    keep = attend(case, case.arguments, dropout=dropout).squeeze(2)
    assert set(keep.unique().tolist()) == {0.0, 1 / (1 - dropout)}
    dropped = (keep == 0).double()
    deviation = (dropout * (1 - dropout) / count) ** 0.5
    assert (dropped.mean(0) - dropout).abs().max() < 4.5 * deviation
    # Neither heads nor neighboring edges are dropped together.
    assert (dropped.T.corrcoef() - torch.eye(heads)).abs().max() < 4.5 / count**0.5
    both = torch.stack((dropped[:-1, 0], dropped[1:, 0])).corrcoef()[0, 1]
    assert abs(both) < 4.5 / count**0.5


def test_almost_all_and_almost_none_dropped():
    case = case_of("dot", small_graph())
    compare(case, keep_of(torch.arange(250), 2, drawn_key(0), 0.999), dropout=0.999)
    compare(case, 1 / (1 - 1e-12), dropout=1e-12)


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


def test_edges_by_source_of_other_sources_are_refused():
    case = case_of("dot", small_graph())
    by_source = transpose(*case.graph.entries, case.graph.num_src + 3)
    out = attend(case, leaves_of(case.arguments), by_source=lambda: by_source)
    with pytest.raises(InvalidInputError, match="indptr of 26 rows, and there are 23"):
        out.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_derivative_is_refused(kind):
    case = case_of(kind, small_graph())
    for name in case.arguments:
        leaves = leaves_of(case.arguments)
        out = attend(case, leaves)
        (gradient,) = torch.autograd.grad(out.square().sum(), leaves[name], create_graph=True)
        with pytest.raises(InvalidInputError, match="differentiate attention twice"):
            gradient.sum().backward()


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


FLOATS = torch.zeros(3, 2, 4)
INDPTR, INDICES = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1])
GOOD: dict[str, Any] = {
    "indptr": INDPTR,
    "indices": INDICES,
    "eids": None,
    "values": FLOATS,
    "left": None,
    "right": FLOATS[:2],
    "score": "dot",
    "vector": None,
    "bias": None,
    "dropout": 0.0,
}
ADDITIVE = {"score": "additive", "left": torch.zeros(3, 2), "right": torch.zeros(2, 2)}
GATV2 = {"score": "gatv2", "vector": torch.zeros(2, 4)}


def attend_to(arguments: dict[str, Any]) -> Tensor:
    given = GOOD | arguments
    entries = Entries(*(given.pop(name) for name in ("indptr", "indices", "eids")))
    return attention(*entries, given.pop("values"), given.pop("left"), given.pop("right"), **given)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"left": FLOATS}, {"eids": INDICES, "bias": torch.ones(2, 4)}, ADDITIVE, GATV2]
    + [{"edge_scores": torch.zeros(3, 1), "edge_weights": torch.zeros(3, 2)}]
    + [{"eids": INDICES, "edge_weights": torch.zeros(7, 2)}]
    + [ADDITIVE | {"values": FLOATS.to(dtype)} for dtype in (torch.float16, torch.bfloat16)],
)
def test_what_fits(arguments):
    assert attend_to(arguments).shape == (2, 2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"score": "cosine"}, "compute 'cosine' attention: there is no such score"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"values": FLOATS.long()}, r"values has shape \(3, 2, 4\) and dtype torch.int64"),
        ({"values": FLOATS[0]}, r"values has shape \(2, 4\)"),
        ({"indptr": INDPTR.float()}, "indptr has shape .* and dtype torch.float32"),
        ({"indptr": INDPTR.view(1, 3)}, r"indptr has shape \(1, 3\)"),
        ({"indptr": INDPTR[:0]}, r"indptr has shape \(0,\)"),
        ({"indptr": INDPTR.to("meta")}, "indptr has shape .* on 'meta'"),
        ({"indices": INDICES.int()}, "indices has shape .* and dtype torch.int32"),
        ({"indices": INDICES.view(1, 3)}, r"indices has shape \(1, 3\)"),
        ({"indices": INDICES.to("meta")}, "indices has shape .* on 'meta'"),
        ({"eids": INDICES.int()}, "eids has shape .* and dtype torch.int32"),
        ({"eids": INDICES[:2]}, r"eids has shape \(2,\)"),
        (ADDITIVE | {"left": None}, "left is None"),
        (GATV2 | {"left": FLOATS}, "left is given"),
        (GATV2 | {"vector": None}, "vector is None"),
        ({"vector": torch.zeros(2, 4)}, "vector is given"),
        (ADDITIVE | {"vector": torch.zeros(2, 4)}, "vector is given"),
        ({"left": FLOATS[:2]}, r"left has shape \(2, 2, 4\)"),
        ({"left": FLOATS.double()}, "left has shape .* and dtype torch.float64"),
        (ADDITIVE | {"left": FLOATS}, r"left has shape \(3, 2, 4\)"),
        (ADDITIVE | {"left": torch.zeros(3, 2).half()}, "left has .* dtype torch.float16"),
        (
            ADDITIVE | {"values": FLOATS.half(), "left": torch.zeros(3, 2).half()},
            "left has .* dtype torch.float16",
        ),
        ({"right": FLOATS}, r"right has shape \(3, 2, 4\)"),
        (ADDITIVE | {"right": None}, "right is None"),
        (
            {"right": None, "values": FLOATS[:1], "indices": torch.zeros(3).long()},
            "there are 2 destinations and 1 sources",
        ),
        ({"right": FLOATS[:2].half()}, "right has shape .* and dtype torch.float16"),
        (ADDITIVE | {"right": torch.zeros(2, 1)}, r"right has shape \(2, 1\)"),
        ({"right": FLOATS[:2].to("meta")}, "right has shape .* on 'meta'"),
        (GATV2 | {"vector": torch.zeros(1, 2, 4)}, r"vector has shape \(1, 2, 4\)"),
        (GATV2 | {"vector": torch.zeros(2, 4).half()}, "vector has .* dtype torch.float16"),
        ({"edge_scores": torch.zeros(3)}, r"edge_scores has shape \(3,\)"),
        ({"edge_scores": torch.zeros(2, 2)}, r"edge_scores has shape \(2, 2\)"),
        ({"edge_scores": torch.zeros(4, 2)}, r"edge_scores has shape \(4, 2\)"),
        ({"edge_weights": torch.zeros(3, 3)}, r"edge_weights has shape \(3, 3\)"),
        ({"edge_weights": torch.zeros(3, 2).half()}, "edge_weights has .* dtype torch.float16"),
        ({"edge_weights": torch.zeros(3, 2, device="meta")}, "edge_weights has .* on 'meta'"),
        ({"edge_weights": torch.zeros(2, 2), "eids": INDICES}, r"edge_weights has shape \(2, 2\)"),
        ({"bias": torch.zeros(8)}, r"bias has shape \(8,\)"),
        ({"bias": torch.zeros(2, 4).double()}, "bias has shape .* and dtype torch.float64"),
    ],
)
def test_what_does_not_fit(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        attend_to(arguments)


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

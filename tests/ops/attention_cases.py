"""Cases of attention, and the composition of torch's own operations that they are compared with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.ops.attention import Entries, attention, computed_in

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

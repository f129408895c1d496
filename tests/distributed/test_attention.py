"""Attention over in-edges in rounds, against the same on the whole graph."""

from __future__ import annotations

import dgl
import pytest
import torch
from torch import Tensor

from dgl_mgpu.distributed.attention import attend
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.attention import AttentionScore, EdgeTerms, attention, computed_in
from tests.distributed.both import Both, of_all_ranks, same
from tests.distributed.graphs import homogeneous
from tests.ranks import on_gpus_too

pytestmark = on_gpus_too

HEADS, WIDTH = 3, 4
KINDS = (
    "additive", "additive of pairs", "gatv2", "gatv2 of pairs", "dot", "dot of pairs", "dot of keys"
)  # fmt: skip
#: With scores and weights of edges, for each head or for all.
WITH_TERMS = (
    "additive with scores", "additive with weights", "additive of pairs with both",
    "additive of edges alone with both", "gatv2 with both", "dot of keys with both",
    "dot of pairs with scores", "dot with weights",
)  # fmt: skip
OF_NODES, OF_EDGES = ("values", "left", "right"), ("edge_scores", "edge_weights")
Arguments = dict[str, Tensor]


def arguments_of(kind: str, g: dgl.DGLGraph, dtype: torch.dtype) -> Arguments:
    draw, num_nodes = torch.Generator().manual_seed(7), g.num_nodes()
    kind, _, terms = kind.partition(" with ")

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    given = {"values": random(num_nodes, HEADS, WIDTH), "bias": random(HEADS, WIDTH)}
    number = computed_in(dtype)
    if kind.startswith("additive") and not kind.endswith("alone"):
        given["vector"] = random(2, HEADS, WIDTH, dtype=number)
    if kind.startswith("gatv2"):
        given["vector"] = random(HEADS, WIDTH, dtype=number)
    if kind.endswith("keys"):
        given["left"] = random(num_nodes, HEADS, WIDTH)
    if kind.endswith("pairs"):
        given["right"] = random(num_nodes, HEADS, WIDTH)
    if terms in ("scores", "both"):
        given["edge_scores"] = random(g.num_edges(), HEADS, dtype=number)
        given["edge_scores"][torch.rand(g.num_edges(), generator=draw) < 0.3] = -torch.inf
    if terms in ("weights", "both"):
        given["edge_weights"] = random(g.num_edges(), 1, dtype=number)
    return given


def on_whole_graph(g: dgl.DGLGraph, given: Arguments, score: AttentionScore) -> Tensor:
    values, vector = given["values"], given.get("vector")
    left, right = given.get("left"), given.get("right", values)
    if score.kind == "additive":
        number = computed_in(values.dtype)
        vector = values.new_zeros(2, 1, 1, dtype=number) if vector is None else vector
        left = (values.to(number) * vector[0]).sum(2)
        right = (right.to(number) * vector[1]).sum(2)
        vector = None
    return attention(
        *g.adj_tensors("csc"), values, left, right, score=score.kind, vector=vector,
        negative_slope=score.slope, scale=score.scale, bias=given["bias"], dropout=score.dropout,
        **{name: given.get(name) for name in OF_EDGES},
    )  # fmt: skip


def on_part(both: Both, given: Arguments, score: AttentionScore) -> Tensor:
    rows = [given.get(name) for name in ("values", "left", "right", "vector", "bias")]
    terms = EdgeTerms(*(given.get(name) for name in OF_EDGES))
    return attend(both.pg._graph.parts[0].rounds, *rows, score, terms)


def _compare(
    graph: str, kind: str, exchange: str, dtype: torch.dtype = torch.float64, dropout: float = 0.0
) -> None:
    both = Both(homogeneous(graph), exchange=exchange)
    score = AttentionScore(kind.partition(" ")[0], 0.2, 0.3, dropout)
    given = arguments_of(kind, both.g, dtype)

    def of_part(name: str, rows: Tensor) -> Tensor:
        if name in OF_NODES:
            return both.own_nodes(rows)
        return both.own_edges(rows) if name in OF_EDGES else rows

    draw = torch.Generator().manual_seed(6)
    grad = torch.rand(both.g.num_nodes(), HEADS, WIDTH, generator=draw).to(dtype)
    results = []
    for run in (on_whole_graph, on_part):
        is_whole = run is on_whole_graph
        leaves = {
            name: (it if is_whole else of_part(name, it))
            .to("cpu" if is_whole else both.pg.device, copy=True)
            .requires_grad_()
            for name, it in given.items()
        }
        torch.manual_seed(3)  # the same key
        out = run(both.g if is_whole else both, leaves, score)
        of_out = grad if is_whole else both.own_nodes(grad)
        results.append((out, torch.autograd.grad(out, list(leaves.values()), of_out)))
    (expected, wanted), (out, found) = results
    rounding = 1e-9 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    close(out, both.own_nodes(expected), rounding)
    for name, gradient, whole in zip(given, found, wanted, strict=True):
        if name in (*OF_NODES, *OF_EDGES):
            close(gradient, of_part(name, whole), rounding)
        else:
            close(of_all_ranks(gradient.double(), whole.double()), whole, rounding)


def close(found: Tensor, expected: Tensor, rounding: float) -> None:
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        found.cpu().double(), expected.cpu().double(), rtol=rounding, atol=4 * rounding * largest
    )


@pytest.mark.parametrize("kind", KINDS + WITH_TERMS)
def test_rounds_give_what_the_whole_graph_gives(ranks, kind):
    for exchange in ranks.exchanges:
        ranks.run(_compare, "random", kind, exchange)


@pytest.mark.parametrize("graph", ["skewed", "isolated", "no edges", "self-loops", "two nodes"])
@pytest.mark.parametrize(
    "kind", ["additive", "gatv2 of pairs", "dot of keys", "additive with both", "dot with both"]
)
def test_any_graph(ranks, graph, kind):
    for exchange in ranks.exchanges:
        ranks.run(_compare, graph, kind, exchange)


@pytest.mark.parametrize("kind", ["additive", "gatv2", "dot of keys", "additive with both"])
def test_the_same_weights_are_dropped(ranks, kind):
    """As on one rank, whichever rank an edge is on: by its number in the whole graph."""
    if ranks.exchanges[-1] != "broadcast":
        pytest.skip("a GPU's generator draws another key than the whole graph's on the CPU")
    for exchange in (*ranks.exchanges, "halo in 1", "halo at first"):
        ranks.run(_compare, "skewed", kind, exchange, torch.float64, 0.4)


@pytest.mark.parametrize("kind", ["additive of pairs", "gatv2", "dot", "additive with both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(ranks, kind, dtype):
    for exchange in ranks.exchanges:
        ranks.run(_compare, "skewed", kind, exchange, dtype)


def _written_to(exchange: str) -> None:
    both = Both(homogeneous(), exchange=exchange)
    score = AttentionScore("gatv2", 0.2, 1.0, 0.0)
    given = arguments_of("gatv2", both.g, torch.float64)
    gradients = []
    for function in (torch.relu, torch.relu_):
        values = both.own_nodes(given["values"]).requires_grad_()
        others = {name: it.to(both.pg.device) for name, it in given.items() if name != "values"}
        out = function(on_part(both, {"values": values, **others}, score))
        gradients += torch.autograd.grad(out.square().sum(), values)
    same(*gradients)


def test_the_output_may_be_written_to(ranks):
    for exchange in ranks.exchanges:
        ranks.run(_written_to, exchange)


def _twice() -> None:
    both = Both(homogeneous())
    given = arguments_of("dot", both.g, torch.float64)
    values, bias = both.own_nodes(given["values"]).requires_grad_(), given["bias"]
    bias = bias.to(both.pg.device)
    out = on_part(both, {"values": values, "bias": bias}, AttentionScore("dot", 0.2, 1.0, 0.0))
    (gradient,) = torch.autograd.grad(out.square().sum(), values, create_graph=True)
    with pytest.raises(InvalidInputError, match="differentiate attention twice"):
        gradient.sum().backward()


def test_a_second_derivative_is_refused(ranks):
    ranks.run(_twice)


LAYERS = {
    "GATConv": lambda: dgl.nn.GATConv(5, 4, 3, residual=True),
    "GATv2Conv with shared weights": lambda: dgl.nn.GATv2Conv(5, 4, 3, share_weights=True),
    "GATv2Conv": lambda: dgl.nn.GATv2Conv(5, 4, 3),
    "DotGatConv": lambda: dgl.nn.DotGatConv(5, 4, 2),
    "AGNNConv": lambda: dgl.nn.AGNNConv(),
}


def _layer(name: str, exchange: str) -> None:
    both = Both(dgl.add_self_loop(homogeneous()), exchange=exchange)
    torch.manual_seed(1)
    layer = LAYERS[name]().double()
    rows = {"x": both.g.ndata["x"]}
    both.compare(lambda graph, given: layer(graph, given["x"]), rows, model=layer)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_dgl(ranks, name):
    for exchange in ranks.exchanges:
        ranks.run(_layer, name, exchange)

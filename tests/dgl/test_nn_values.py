"""Layers of `dgl.nn.pytorch` against their formulas in plain dense torch, values and gradients.

Each oracle gets the layer (for its parameters), the dense adjacency matrix with a row a
destination, and the inputs. Graphs have no parallel edges, so that a matrix holds them.
"""

from __future__ import annotations

from collections.abc import Callable

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl
import dgl.nn.pytorch as dglnn
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

IN, OUT, HEADS, EDGE_IN = 4, 3, 2, 2


def graph() -> tuple[dgl.DGLGraph, Tensor]:
    """A graph of 7 nodes without a node that has no in-edge, and its adjacency matrix."""
    generator = torch.Generator().manual_seed(1)
    adjacency = (torch.rand(7, 7, generator=generator) < 0.4).double()
    adjacency.fill_diagonal_(1)
    target, source = adjacency.nonzero(as_tuple=True)
    return dgl.graph((source, target), num_nodes=7), adjacency


def block() -> tuple[dgl.DGLGraph, Tensor]:
    """A bipartite block of 6 source nodes, whose first 3 are the destinations."""
    adjacency = torch.tensor([[1, 0, 0, 1, 0, 1], [0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 1.0]])
    target, source = adjacency.nonzero(as_tuple=True)
    made = dgl.create_block((source, target), num_src_nodes=6, num_dst_nodes=3)
    return made, adjacency.double()


def as_matrix(adjacency: Tensor, values: Tensor) -> Tensor:
    """Edge values, in the order of the edges, as a matrix with zeros elsewhere."""
    matrix = values.new_zeros(*adjacency.shape, *values.shape[1:])
    return matrix.index_put(adjacency.nonzero(as_tuple=True), values)


def mean(adjacency: Tensor) -> Tensor:
    return adjacency / adjacency.sum(1, keepdim=True)


def masked_softmax(scores: Tensor, adjacency: Tensor) -> Tensor:
    """Softmax over a destination's in-edges of scores (destination, source, head)."""
    return scores.masked_fill(adjacency[..., None] == 0, -torch.inf).softmax(dim=1)


def graph_conv(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    normalised = a.sum(1).pow(-0.5)[:, None] * a * a.sum(0).clamp(min=1).pow(-0.5)
    return normalised @ x @ layer.weight + layer.bias


def weighted_graph_conv(layer: nn.Module, a: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return as_matrix(a, weight) @ x @ layer.weight + layer.bias


def sage_mean(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    return layer.fc_self(x[: len(a)]) + layer.fc_neigh(mean(a) @ x)


def sage_weighted(layer: nn.Module, a: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    # The weighted mean of PinSAGE, as DGL writes it: weights times features, over the degree.
    summed = (as_matrix(a, weight) @ x) / a.sum(1, keepdim=True)
    return layer.fc_self(x[: len(a)]) + layer.fc_neigh(summed)


def sage_gcn(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    return layer.fc_neigh((a @ x + x[: len(a)]) / (a.sum(1, keepdim=True) + 1)) + layer.bias


def sage_pool(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    pooled = layer.fc_pool(x).relu()
    aggregated = torch.stack([pooled[row > 0].max(0).values for row in a])
    return layer.fc_self(x[: len(a)]) + layer.fc_neigh(aggregated)


def sage_lstm(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    last = torch.stack([layer.lstm(x[row > 0][None])[1][0][0, 0] for row in a])
    return layer.fc_self(x[: len(a)]) + layer.fc_neigh(last)


def gat(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    h = layer.fc(x).view(-1, HEADS, OUT)
    source, target = (h * layer.attn_l).sum(-1), (h[: len(a)] * layer.attn_r).sum(-1)
    scores = functional.leaky_relu(target[:, None] + source[None], 0.2)
    attended = torch.einsum("dsh,sho->dho", masked_softmax(scores, a), h)
    return attended + layer.bias.view(HEADS, OUT)


def gatv2(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    source = layer.fc_src(x).view(-1, HEADS, OUT)
    target = layer.fc_dst(x[: len(a)]).view(-1, HEADS, OUT)
    hidden = functional.leaky_relu(target[:, None] + source[None], 0.2)
    weights = masked_softmax((hidden * layer.attn).sum(-1), a)
    return torch.einsum("dsh,sho->dho", weights, source)


def dot_gat(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    h = layer.fc(x).view(-1, HEADS, OUT)
    scores = torch.einsum("dho,sho->dsh", h[: len(a)], h) / OUT**0.5
    return torch.einsum("dsh,sho->dho", masked_softmax(scores, a), h)


def agnn(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    unit = functional.normalize(x, dim=-1)
    scores = layer.beta * (unit[: len(a)] @ unit.T)
    return masked_softmax(scores[..., None], a)[..., 0] @ x


def gin(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    return layer.apply_func((1 + layer.eps) * x[: len(a)] + a @ x)


def gin_mean(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    return layer.apply_func((1 + layer.eps) * x[: len(a)] + mean(a) @ x)


def gine(layer: nn.Module, a: Tensor, x: Tensor, edge: Tensor) -> Tensor:
    messages = (x[None] + as_matrix(a, edge)).relu() * a[..., None]
    return layer.apply_func((1 + layer.eps) * x[: len(a)] + messages.sum(1))


def edge_conv(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    target = x[: len(a)]
    # DGL subtracts the source from the destination; its documentation says the reverse.
    messages = layer.theta(target[:, None] - x[None]) + layer.phi(target)[:, None]
    return messages.masked_fill(a[..., None] == 0, -torch.inf).max(1).values


def rel_graph_conv(layer: nn.Module, a: Tensor, x: Tensor, etypes: Tensor) -> Tensor:
    weights = layer.linear_r.get_weight()  # (relation, in, out), or the entries of its blocks
    if layer.linear_r.regularizer == "bdd":
        blocks = weights.view(len(weights), layer.linear_r.num_bases, IN // 2, -1)
        weights = torch.stack([torch.block_diag(*relation) for relation in blocks])
    relation = as_matrix(a, nn.functional.one_hot(etypes, len(weights)).to(x.dtype))
    summed = torch.einsum("dsr,si,rio->do", relation, x, weights)
    return summed + layer.h_bias + x[: len(a)] @ layer.loop_weight


def sg(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    degree = a.sum(1).pow(-0.5)
    step = degree[:, None] * a * degree
    return layer.fc(step @ (step @ x))


def tag(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    degree = a.sum(1).pow(-0.5)
    step = degree[:, None] * a * degree
    return layer.lin(torch.cat([x, step @ x, step @ (step @ x)], dim=-1))


def appnp(layer: nn.Module, a: Tensor, x: Tensor) -> Tensor:
    step = a.sum(1).pow(-0.5)[:, None] * a * a.sum(0).pow(-0.5)
    h = x
    for _ in range(3):
        h = 0.8 * step @ h + 0.2 * x
    return h


def nn_conv(layer: nn.Module, a: Tensor, x: Tensor, edge: Tensor) -> Tensor:
    weights = layer.edge_func(edge).view(-1, IN, OUT)
    return torch.einsum("ds,si,dsio->do", mean(a), x, as_matrix(a, weights)) + layer.bias


def edge_gat(layer: nn.Module, a: Tensor, x: Tensor, edge: Tensor) -> Tensor:
    h = layer.fc(x).view(-1, HEADS, OUT)
    e = layer.fc_edge(edge).view(-1, HEADS, OUT)
    source, target = (h * layer.attn_l).sum(-1), (h[: len(a)] * layer.attn_r).sum(-1)
    scores = target[:, None] + source[None] + as_matrix(a, (e * layer.attn_edge).sum(-1))
    weights = masked_softmax(functional.leaky_relu(scores, 0.2), a)
    return torch.einsum("dsh,dsho->dho", weights, h[None] + as_matrix(a, e)) + layer.bias.view(
        HEADS, OUT
    )


Oracle = Callable[..., Tensor]
EDGE_FEATURES, EDGE_WEIGHTS, ETYPES = "edge features", "edge weights", "edge types"

#: name: (layer, oracle, extra edge input, whether it takes blocks too)
LAYERS: dict[str, tuple[Callable[[], nn.Module], Oracle, str | None, bool]] = {
    "GraphConv": (lambda: dglnn.GraphConv(IN, OUT), graph_conv, None, True),
    "GraphConv weighted": (
        lambda: dglnn.GraphConv(IN, OUT, norm="none"),
        weighted_graph_conv,
        EDGE_WEIGHTS,
        True,
    ),
    "SAGEConv mean": (lambda: dglnn.SAGEConv(IN, OUT, "mean"), sage_mean, None, True),
    "SAGEConv weighted": (
        lambda: dglnn.SAGEConv(IN, OUT, "mean"),
        sage_weighted,
        EDGE_WEIGHTS,
        True,
    ),
    "SAGEConv gcn": (lambda: dglnn.SAGEConv(IN, OUT, "gcn"), sage_gcn, None, True),
    "SAGEConv pool": (lambda: dglnn.SAGEConv(IN, OUT, "pool"), sage_pool, None, True),
    "SAGEConv lstm": (lambda: dglnn.SAGEConv(IN, OUT, "lstm"), sage_lstm, None, True),
    "GATConv": (lambda: dglnn.GATConv(IN, OUT, HEADS), gat, None, True),
    "GATv2Conv": (
        lambda: dglnn.GATv2Conv(IN, OUT, HEADS, bias=False),
        gatv2,
        None,
        True,
    ),
    "DotGatConv": (lambda: dglnn.DotGatConv(IN, OUT, HEADS), dot_gat, None, True),
    "AGNNConv": (dglnn.AGNNConv, agnn, None, True),
    "GINConv": (
        lambda: dglnn.GINConv(nn.Linear(IN, OUT), init_eps=0.3, learn_eps=True),
        gin,
        None,
        True,
    ),
    "GINConv mean": (lambda: dglnn.GINConv(nn.Linear(IN, OUT), "mean"), gin_mean, None, True),
    "GINEConv": (lambda: dglnn.GINEConv(nn.Linear(IN, OUT)), gine, EDGE_FEATURES, True),
    "EdgeConv": (lambda: dglnn.EdgeConv(IN, OUT), edge_conv, None, True),
    "EdgeGATConv": (
        lambda: dglnn.EdgeGATConv(IN, EDGE_IN, OUT, HEADS, residual=False),
        edge_gat,
        EDGE_FEATURES,
        False,
    ),
    "NNConv": (
        lambda: dglnn.NNConv(IN, OUT, nn.Linear(EDGE_IN, IN * OUT), "mean"),
        nn_conv,
        EDGE_FEATURES,
        True,
    ),
    "RelGraphConv": (lambda: dglnn.RelGraphConv(IN, OUT, 3), rel_graph_conv, ETYPES, True),
    "RelGraphConv basis": (
        lambda: dglnn.RelGraphConv(IN, OUT, 3, "basis", 2),
        rel_graph_conv,
        ETYPES,
        True,
    ),
    "RelGraphConv bdd": (
        lambda: dglnn.RelGraphConv(IN, 2, 3, "bdd", 2),
        rel_graph_conv,
        ETYPES,
        False,
    ),
    "SGConv": (lambda: dglnn.SGConv(IN, OUT, 2), sg, None, False),
    "TAGConv": (lambda: dglnn.TAGConv(IN, OUT, 2), tag, None, False),
    "APPNPConv": (lambda: dglnn.APPNPConv(3, 0.2), appnp, None, False),
}
CASES = [
    pytest.param(name, made, id=f"{name} on {made.__name__}")
    for name, (_, _, _, takes_blocks) in LAYERS.items()
    for made in ((graph, block) if takes_blocks else (graph,))
]


@pytest.mark.parametrize(("name", "made"), CASES)
def test_equals_the_dense_formula(name, made):
    torch.manual_seed(0)
    build, oracle, edge_input, _ = LAYERS[name]
    g, adjacency = made()
    dtype = torch.float if name == "APPNPConv" else torch.double  # it makes float32 weights
    layer = build().to(dtype)
    adjacency = adjacency.to(dtype)
    for parameter in layer.parameters():  # also those that are initialised to zero
        nn.init.normal_(parameter)
    num_edges = g.num_edges()
    extra: list[Tensor] = []
    if edge_input == EDGE_FEATURES:
        width = IN if name == "GINEConv" else EDGE_IN
        extra = [torch.randn(num_edges, width, dtype=dtype, requires_grad=True)]
    elif edge_input == EDGE_WEIGHTS:
        extra = [torch.rand(num_edges, dtype=dtype, requires_grad=True)]
    elif edge_input == ETYPES:
        extra = [torch.arange(num_edges) % 3]
    x = torch.randn(adjacency.shape[1], IN, dtype=dtype, requires_grad=True)
    leaves = [x, *layer.parameters(), *(e for e in extra if e.is_floating_point())]
    keyword = {"edge_weight": extra[0]} if edge_input == EDGE_WEIGHTS else {}

    # Destination features are the first rows of the sources' where the layer takes one tensor.
    out = layer(g, x, *([] if keyword else extra), **keyword)
    expected = oracle(layer, adjacency, x, *extra)
    torch.testing.assert_close(out, expected)

    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(out, leaves, upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, upstream))


def test_grouprevres_has_the_gradients_of_the_plain_computation():
    torch.manual_seed(0)
    g, _ = graph()
    layer = dglnn.GroupRevRes(dglnn.GraphConv(2, 2), groups=2).double()
    x = torch.randn(7, 4, dtype=torch.double, requires_grad=True)

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        x.grad = None
        layer.zero_grad()
        run(g, x.tanh()).pow(2).sum().backward()  # tanh saves its output, which the layer frees
        return [t.grad.clone() for t in (x, *layer.parameters()) if t.grad is not None]

    torch.testing.assert_close(gradients(layer), gradients(layer._forward))


def test_grouprevres_frees_its_input():
    g, _ = graph()
    hidden = torch.randn(7, 4, requires_grad=True) * 1
    dglnn.GroupRevRes(dglnn.GraphConv(2, 2), groups=2)(g, hidden)
    assert hidden.untyped_storage().nbytes() == 0

"""DGL's attention layers in one pass, against the same layers composed of operators."""

from __future__ import annotations

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import copy
from collections.abc import Callable
from typing import Any

import dgl
import pytest
import torch
from dgl.base import DGLError
from dgl.nn import AGNNConv, DotGatConv, GATConv, GATv2Conv
from torch import nn

from dgl_mgpu.graph.originals import originals
from tests.dgl.nn.devices import DEVICES, on_tensors

NODES, WIDTH = 40, 10

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GAT": lambda: GATConv(WIDTH, 4, 3),
    "GAT of pairs": lambda: GATConv((WIDTH, 7), 4, 3),
    "GAT of pairs of one width": lambda: GATConv((WIDTH, WIDTH), 4, 3),
    "GAT with a residual": lambda: GATConv(WIDTH, 4, 3, residual=True, bias=False),
    "GAT with an identity": lambda: GATConv(12, 4, 3, residual=True, activation=torch.tanh),
    "GATv2": lambda: GATv2Conv(WIDTH, 4, 3),
    "GATv2 of pairs": lambda: GATv2Conv((WIDTH, 7), 4, 3),
    "GATv2 with shared weights": lambda: GATv2Conv(
        WIDTH, 4, 3, share_weights=True, residual=True, activation=torch.tanh
    ),
    "GATv2 with an identity": lambda: GATv2Conv(12, 4, 3, residual=True),
    "dot": lambda: DotGatConv(WIDTH, 4, 3),
    "dot of pairs": lambda: DotGatConv((WIDTH, 7), 4, 3),
    "AGNN": lambda: AGNNConv(0.7),
    "AGNN with a constant": lambda: AGNNConv(0.7, learn_beta=False),
}


def graph(device: str) -> dgl.DGLGraph:
    ends = torch.randint(NODES, (2, 300)).to(device)
    return dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=NODES))


def block(device: str) -> dgl.DGLGraph:
    seeds = torch.arange(15, device=device)
    return dgl.to_block(dgl.in_subgraph(graph(device), seeds), seeds)


def composed(layer: nn.Module, *arguments: Any) -> Any:
    original = originals[f"{type(layer).__module__}:{type(layer).__name__}.forward"]
    return original(layer, *arguments)


def results_of(
    run: Callable[..., torch.Tensor], layer: nn.Module, features: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """The output and the gradients of features and parameters."""
    leaves = [*(rows.clone().requires_grad_() for rows in features)]
    layer.zero_grad()
    out = run(leaves[0] if len(leaves) == 1 else tuple(leaves))
    (out * torch.arange(out.numel(), device=out.device).view(out.shape).cos()).sum().backward()
    gradients = [it.grad for it in (*leaves, *layer.parameters())]
    return [out.detach(), *(it for it in gradients if it is not None)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", ["graph", "block"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_of_dgl(name, shape, device, passes):
    torch.manual_seed(0)
    with on_tensors(device):
        g = graph(device) if shape == "graph" else block(device)
        layer = LAYERS[name]().double().to(device)
        width = 12 if "identity" in name else WIDTH
        features = [torch.randn(g.num_src_nodes(), width)]
        if "pairs" in name:
            features.append(torch.randn(g.num_dst_nodes(), WIDTH if "one" in name else 7))
        features = tuple(rows.double().to(device) for rows in features)
        found = results_of(lambda feat: layer(g, feat), layer, features)
        # DGL keeps both of a pair under one name where the ends of edges are the same nodes.
        is_composed = name == "dot of pairs" and shape == "graph"
        assert len(passes) == (0 if is_composed else 1)
        expected = results_of(lambda feat: composed(layer, g, feat), layer, features)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "leaky_relu", nn.ELU()),
        lambda layer: layer.leaky_relu.register_forward_hook(lambda module, inputs, out: 2 * out),
        lambda layer: layer.attn_drop.register_forward_pre_hook(lambda module, inputs: None),
        lambda layer: setattr(layer, "attn_drop", nn.Dropout(1.0)),
        lambda layer: setattr(layer, "attn_drop", nn.Identity()),
        lambda layer: setattr(layer.leaky_relu, "forward", torch.tanh),
        lambda layer: layer.attn_drop.register_full_backward_pre_hook(lambda module, grad: None),
    ],
    ids=[
        "another activation",
        "a hook",
        "a hook before",
        "all is dropped",
        "another dropout",
        "another function",
        "a hook backward",
    ],
)
@pytest.mark.parametrize("name", ["GAT", "GATv2"])
def test_parts_that_are_not_dgls_are_composed(name, change, passes):
    torch.manual_seed(0)
    with on_tensors("cpu"):
        g, layer, rows = graph("cpu"), LAYERS[name](), torch.randn(NODES, WIDTH)
        change(layer)
        assert torch.equal(layer(g, rows), composed(layer, g, rows))
    assert not passes


def test_what_is_asked_for_besides_is_composed(passes):
    torch.manual_seed(0)
    with on_tensors("cpu"):
        g, rows = graph("cpu"), torch.randn(NODES, WIDTH)
        for name in ("GAT", "GATv2", "dot"):
            _, weights = LAYERS[name]()(g, rows, get_attention=True)
            assert weights.shape == (g.num_edges(), 3, 1)
        LAYERS["GAT"]()(g, rows.view(NODES, 1, WIDTH))
    assert not passes


@pytest.mark.parametrize("name", LAYERS)
def test_nodes_without_in_edges_are_refused(name):
    with on_tensors("cpu"):
        g = dgl.graph(([0, 1], [1, 0]), num_nodes=3)
        rows = torch.randn(3, 12 if "identity" in name else WIDTH)
        features = (rows, torch.randn(3, WIDTH if "one" in name else 7))
        with pytest.raises(DGLError, match=r"in-degree|in-edges"):
            LAYERS[name]()(g, features if "pairs" in name else rows)


@pytest.mark.parametrize("name", ["GAT", "GATv2"])
def test_weights_are_dropped_while_training(name, passes):
    torch.manual_seed(0)
    with on_tensors("cpu"):
        g, rows = graph("cpu"), torch.randn(NODES, WIDTH)
        layer = LAYERS[name]()
        layer.attn_drop.p = 0.5
        torch.manual_seed(1)
        first = layer(g, rows)
        assert not torch.allclose(first, layer(g, rows))
        torch.manual_seed(1)
        assert torch.equal(first, layer(g, rows))
        layer.eval()
        torch.testing.assert_close(layer(g, rows), composed(layer, g, rows))
    assert len(passes) == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["GAT", "GATv2", "dot"])
def test_autocast_gives_the_types_of_dgl(name, device):
    torch.manual_seed(0)
    with on_tensors(device), torch.autocast(device, torch.bfloat16):
        g, rows = graph(device), torch.randn(NODES, WIDTH, device=device)
        layer = LAYERS[name]().to(device)
        found, expected = layer(g, rows), composed(layer, g, rows)
        if device == "cuda":
            assert found.dtype == expected.dtype
        torch.testing.assert_close(found.float(), expected.float(), rtol=5e-2, atol=5e-2)
        found.float().sum().backward()
    assert all(it.grad is not None and it.grad.dtype == torch.float32 for it in layer.parameters())


@pytest.mark.parametrize("name", ["GAT", "GAT with a residual", "GATv2", "dot", "AGNN"])
def test_no_nodes(name, passes):
    with on_tensors("cpu"):
        g, layer = dgl.graph(([], []), num_nodes=0), LAYERS[name]()
        out = layer(g, torch.randn(0, WIDTH))
        out.sum().backward()
    assert out.shape[0] == 0
    assert len(passes) == 1
    assert all(it.grad is not None for it in layer.parameters())


@pytest.mark.parametrize("count", [-3, 3])
@pytest.mark.parametrize("shape", ["graph", "block", "bipartite"])
@pytest.mark.parametrize("name", LAYERS)
def test_features_of_other_nodes_are_refused(name, shape, count, passes):
    """By DGL's own check: kernels do not look for rows that are not there."""
    with on_tensors("cpu"):
        g = block("cpu") if shape == "block" else graph("cpu")
        if shape == "bipartite":
            g = dgl.heterograph({("a", "to", "b"): (torch.arange(20), torch.arange(20) % 8)})
        width = 12 if "identity" in name else WIDTH
        sources = torch.randn(g.num_src_nodes() + count, width)
        ends = torch.randn(g.num_dst_nodes(), WIDTH if "one" in name else 7)
        with pytest.raises((DGLError, RuntimeError)):
            LAYERS[name]()(g, (sources, ends) if "pairs" in name else sources)
    assert not passes


@pytest.mark.parametrize(
    "name", ["GAT", "GAT of pairs", "GAT with a residual", "GATv2", "dot", "AGNN"]
)
def test_outputs_may_be_written_to(name):
    torch.manual_seed(0)
    with on_tensors("cpu"):
        g, layer = block("cpu"), LAYERS[name]().double()
        width = 12 if "identity" in name else WIDTH
        features = [torch.randn(g.num_src_nodes(), width).double()]
        if "pairs" in name:
            ends = torch.randn(g.num_dst_nodes(), WIDTH if "one" in name else 7)
            features.append(ends.double())
        features = tuple(features)
        found = results_of(lambda feat: layer(g, feat).relu_(), layer, features)
        expected = results_of(lambda feat: composed(layer, g, feat).relu(), layer, features)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_computes_scores_in_float32():
    """Half types of scores overflow where float32 does not."""
    torch.manual_seed(0)
    with on_tensors("cpu"), torch.autocast("cpu", torch.float16):
        g, layer = graph("cpu"), LAYERS["GAT"]()
        layer.attn_l.data.fill_(300.0)
        layer.attn_r.data.fill_(1.0)
        assert layer(g, 100 * torch.randn(NODES, WIDTH)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_bias_does_not_spoil_gradients(dtype):
    torch.manual_seed(0)
    with on_tensors("cpu"):
        g, rows = graph("cpu"), torch.randn(NODES, WIDTH).to(dtype)
        layer = LAYERS["GAT"]().to(dtype)
        layer.bias.data.fill_(30.0)
        exact = copy.deepcopy(layer).double()
        # A gradient that does not depend on how the output is rounded.
        grad = torch.randn(NODES, 3, 4).to(dtype)
        layer(g, rows).backward(grad)
        exact(g, rows.double()).backward(grad.double())
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-4
    for name in ("attn_l", "attn_r"):
        found, expected = getattr(layer, name).grad.double(), getattr(exact, name).grad
        assert (found - expected).abs().max() < tolerance * expected.abs().max()

"""Adjacency matrices of graphs, and models written with them against DGL's own modules."""

from __future__ import annotations

import dgl
import dgl.nn.pytorch as dglnn
import dgl.sparse as dglsp
import pytest
import torch
from torch import nn

NUM_NODES, NUM_EDGES, IN, OUT, HEADS = 30, 150, 6, 4, 3


@pytest.fixture
def g() -> dgl.DGLGraph:
    dgl.seed(0)
    torch.manual_seed(0)
    g = dgl.to_simple(dgl.rand_graph(NUM_NODES, NUM_EDGES))
    return dgl.add_self_loop(dgl.remove_self_loop(g))


def same_after_training(
    ours: nn.Module, theirs: nn.Module, inputs: tuple, their_inputs: tuple
) -> None:
    """Both are equal and stay so over some steps with equal parameters."""
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.1) for module in (ours, theirs)]
    first = None
    for _ in range(4):
        outs = ours(*inputs), theirs(*their_inputs)
        first = outs[0].detach() if first is None else first
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
        for out, optimizer in zip(outs, optimizers, strict=True):
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
    assert (outs[0] - first).abs().max() > 1e-2


def normalized(g: dgl.DGLGraph) -> dglsp.SparseMatrix:
    """In-edges as rows, scaled by both ends' degrees."""
    a = g.adj().T
    rows, cols = dglsp.diag(a.sum(1)), dglsp.diag(a.sum(0))
    return (rows**-0.5) @ a @ (cols**-0.5)


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(IN, OUT))
        self.bias = nn.Parameter(torch.rand(OUT))

    def forward(self, a: dglsp.SparseMatrix, x: torch.Tensor) -> torch.Tensor:
        return a @ (x @ self.weight) + self.bias


def test_gcn_is_dgls_graph_conv(g):
    x = torch.rand(NUM_NODES, IN)
    same_after_training(GCN(), dglnn.GraphConv(IN, OUT), (normalized(g), x), (g, x))


class GAT(nn.Module):
    """With the names of GATConv's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(IN, OUT * HEADS, bias=False)
        self.attn_l = nn.Parameter(torch.rand(1, HEADS, OUT))
        self.attn_r = nn.Parameter(torch.rand(1, HEADS, OUT))
        self.bias = nn.Parameter(torch.rand(OUT * HEADS))

    def forward(self, a: dglsp.SparseMatrix, x: torch.Tensor) -> torch.Tensor:
        z = self.fc(x).view(-1, HEADS, OUT)
        source, target = (z * self.attn_l).sum(-1), (z * self.attn_r).sum(-1)
        score = nn.functional.leaky_relu(source[a.col] + target[a.row], 0.2)
        attention = dglsp.val_like(a, score).softmax()
        out = dglsp.bspmm(attention, z.transpose(1, 2))
        return out.transpose(1, 2) + self.bias.view(HEADS, OUT)


def test_gat_is_dgls_gat_conv(g):
    x = torch.rand(NUM_NODES, IN)
    same_after_training(GAT(), dglnn.GATConv(IN, OUT, HEADS), (g.adj().T, x), (g, x))


class APPNP(nn.Module):
    def __init__(self, steps: int, alpha: float) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, OUT)
        self.steps, self.alpha = steps, alpha

    def forward(self, a: dglsp.SparseMatrix, x: torch.Tensor) -> torch.Tensor:
        x = h = self.linear(x)
        for _ in range(self.steps):
            h = (1 - self.alpha) * (a @ h) + self.alpha * x
        return h


class TheirAPPNP(nn.Module):
    def __init__(self, steps: int, alpha: float) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, OUT)
        self.propagate = dglnn.APPNPConv(steps, alpha)

    def forward(self, g: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        return self.propagate(g, self.linear(x))


def test_appnp_is_dgls_appnp_conv(g):
    x = torch.rand(NUM_NODES, IN)
    same_after_training(APPNP(5, 0.1), TheirAPPNP(5, 0.1), (normalized(g), x), (g, x))


def test_two_hops_by_a_product_of_matrices(g):
    a, x = g.adj().T, torch.rand(NUM_NODES, IN)
    torch.testing.assert_close((a @ a) @ x, a @ (a @ x))


def test_attention_of_a_transformer_on_the_edges(g):
    """Scores by sddmm; against a dense softmax with a mask."""
    a = g.adj().T
    q, k, v = (torch.rand(NUM_NODES, OUT, requires_grad=True) for _ in range(3))
    out = dglsp.sddmm(a, q, k.T).softmax() @ v
    scores = (q @ k.T).masked_fill(a.to_dense() == 0, -torch.inf)
    expected = scores.softmax(1) @ v
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(expected.square().sum(), (q, k, v)),
    )


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_adjacency_matrix(idtype):
    g = dgl.graph(([0, 1, 2, 0], [1, 2, 3, 3]), idtype=idtype)
    a = g.adj()
    expected = torch.zeros(4, 4)
    expected[[0, 1, 2, 0], [1, 2, 3, 3]] = 1
    assert torch.equal(a.to_dense(), expected) and a.row.dtype == idtype
    assert torch.equal(g.adjacency_matrix().to_dense(), expected)
    x = torch.rand(4, 2)
    torch.testing.assert_close(a.T @ x, dgl.ops.copy_u_sum(g, x))
    w = torch.rand(4)
    a = dglsp.val_like(a, w)
    torch.testing.assert_close(a.T @ x, dgl.ops.u_mul_e_sum(g, x, w[:, None]))


def test_adjacency_matrices_of_relations():
    g = dgl.heterograph(
        {
            ("user", "follows", "user"): ([0, 1], [0, 1]),
            ("developer", "develops", "game"): ([0, 1], [0, 2]),
        }
    )
    assert g.adj(etype="develops").to_dense().tolist() == [[1, 0, 0], [0, 0, 1]]
    g.edata["h"] = {("user", "follows", "user"): torch.tensor([3, 2])}
    assert g.adj(etype="follows", eweight_name="h").val.tolist() == [3, 2]


def test_torch_compile_around_a_model(g):
    model, a, x = GCN(), normalized(g), torch.rand(NUM_NODES, IN)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(a, x), model(a, x))
    for parameter, expected in zip(
        torch.autograd.grad(compiled(a, x).square().sum(), [*model.parameters()]),
        torch.autograd.grad(model(a, x).square().sum(), [*model.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(parameter, expected)

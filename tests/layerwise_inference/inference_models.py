"""Models for inference on a whole graph, and what they give for all of its nodes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import torch
from dgl.nn import GATConv, GINConv, GraphConv, HeteroGraphConv, SAGEConv
from torch import nn

WIDTH, HIDDEN, CLASSES = 5, 4, 3


class Stack(nn.Module):
    """Convolutions with normalisation and dropout between them, as many as there are blocks."""

    def __init__(self, *convolutions: nn.Module, width: int = HIDDEN) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in convolutions[1:])
        self.dropout = nn.Dropout(0.5)

    def forward(self, blocks, x):
        for layer, (convolution, block) in enumerate(zip(self.convolutions, blocks, strict=False)):
            x = convolution(block, x).flatten(1)
            if layer < len(self.norms):
                x = self.dropout(torch.relu(self.norms[layer](x)))
        return x


class Paired(nn.Module):
    """Convolutions that get destinations' rows by themselves, indexed by the number of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [SAGEConv(WIDTH, HIDDEN, "pool"), SAGEConv(HIDDEN, CLASSES, "gcn")]
        self.first, self.second = self.layers

    def forward(self, blocks, x):
        for layer, block in enumerate(blocks):
            x = self.layers[layer](block, (x, x[: block.num_dst_nodes()]))
        return x.log_softmax(1)


class Jumping(nn.Module):
    """Skip connections from the input and round convolutions, and a sum over all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, HIDDEN)
        self.convolutions = nn.ModuleList(SAGEConv(HIDDEN, HIDDEN, "mean") for _ in range(3))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, blocks, x):
        states = [torch.relu_(self.embed(x))]
        for convolution, block in zip(self.convolutions, blocks, strict=False):
            own = states[-1][: block.num_dst_nodes()]
            skipped = torch.where(own > 0, own, 0) + states[0][: len(own)]
            states.append(convolution(block, states[-1]).relu_() + skipped)
        total = sum(rows[: len(states[-1])] for rows in states)
        return {"logits": self.head(total), "last": [states[-1]]}


class Rgcn(nn.Module):
    """Layers over all relations of a heterograph."""

    def __init__(self, etypes: list[str]) -> None:
        super().__init__()

        def relations(width_in: int, width_out: int) -> nn.Module:
            return HeteroGraphConv(
                {etype: GraphConv(width_in, width_out, norm="both") for etype in etypes}
            )

        self.first, self.second = relations(WIDTH, HIDDEN), relations(HIDDEN, CLASSES)
        self.own = nn.Linear(WIDTH, HIDDEN)

    def forward(self, blocks, x):
        hidden = self.first(blocks[0], x)
        hidden = {
            ntype: torch.relu(rows + self.own(x[ntype][: len(rows)]))
            for ntype, rows in hidden.items()
        }
        return self.second(blocks[1], hidden)


class Attention(nn.Module):
    """With residuals, in batches that have no nodes of some type."""

    def __init__(self, etypes: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            HeteroGraphConv(
                {
                    etype: GATConv(
                        (WIDTH, WIDTH), WIDTH, 1, residual=True, allow_zero_in_degree=True
                    )
                    for etype in etypes
                }
            )
            for _ in range(2)
        )

    def forward(self, blocks, x):
        for number, layer in enumerate(self.layers):
            x = {ntype: rows.flatten(1) for ntype, rows in layer(blocks[number], x).items()}
        return x


class Slices(nn.Module):
    """Convolutions on single relations of blocks, and one type's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.follows = GraphConv(WIDTH, HIDDEN, norm="both", allow_zero_in_degree=True)
        self.buys = SAGEConv(HIDDEN, CLASSES, "mean")

    def forward(self, blocks, x):
        user = self.follows(blocks[0]["follows"], x["user"])
        item = user.new_zeros(blocks[1].num_dst_nodes("item"), HIDDEN)
        return self.buys(blocks[1]["buys"], (user, item))


class Degrees(nn.Module):
    """Messages passed by the model itself, whose module has nothing to do with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, CLASSES, "mean")

    def forward(self, blocks, x):
        with blocks[0].local_scope():
            blocks[0].srcdata["x"] = x
            blocks[0].update_all(fn.copy_u("x", "m"), fn.sum("m", "sum"))
            total = blocks[0].dstdata["sum"]
        hidden = self.first(blocks[0], x) + total[:, :HIDDEN]
        return self.second(blocks[1], hidden)


def _perceptron(width_in: int, width_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width_in, 6), nn.ReLU(), nn.Linear(6, width_out))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "graphsage": lambda: Stack(
        SAGEConv(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, HIDDEN, "pool"),
        SAGEConv(HIDDEN, CLASSES, "lstm"),
    ),
    "gcn": lambda: Stack(
        GraphConv(WIDTH, HIDDEN, allow_zero_in_degree=True),
        GraphConv(HIDDEN, CLASSES, norm="left", allow_zero_in_degree=True),
    ),
    "gat": lambda: Stack(
        GATConv(WIDTH, 2, 3, residual=True, allow_zero_in_degree=True),
        GATConv(6, CLASSES, 2, allow_zero_in_degree=True), width=6,
    ),
    "gin": lambda: Stack(
        GINConv(_perceptron(WIDTH, HIDDEN), "max"), GINConv(_perceptron(HIDDEN, CLASSES), "sum")
    ),
    "one layer": lambda: Stack(SAGEConv(WIDTH, CLASSES, "mean")),
    "paired": Paired,
    "jumping": Jumping,
}  # fmt: skip


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """A model of float64 in training mode, whose norms do something."""
    torch.manual_seed(2)
    model = make().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            for rows in (module.running_mean, module.weight.data, module.bias.data):
                nn.init.normal_(rows)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.train()


def expected_of(model: nn.Module, g: dgl.DGLGraph, x: Any, num_layers: int) -> Any:
    """What the model gives if every layer is on the graph itself, by DGL's C++."""
    model.eval()
    with torch.no_grad():
        found = model([g] * num_layers, x)
    model.train()
    return found


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

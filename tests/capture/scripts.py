"""Models, loaders and training loops as scripts have them, for tests of their capture."""

from __future__ import annotations

import random
import warnings

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler
from dgl.nn import GATConv, GATv2Conv, GINConv, GraphConv, SAGEConv
from torch import nn

from dgl_mgpu.capture import calls
from dgl_mgpu.graph.dispatch import tensor_backed_graphs

CLASSES = 5


class Here:
    """Where tests make graphs and models."""

    device = "cpu"


here = Here()


def seeded(seed=0):
    random.seed(seed)
    np.random.seed(seed)
    dgl.seed(seed)
    torch.manual_seed(seed)


def graph(self_loops=True, num_nodes=300, num_edges=2400):
    seeded(7)
    ends = torch.randint(0, num_nodes, (2, num_edges))
    with tensor_backed_graphs():
        g = dgl.graph((ends[0], ends[1]), num_nodes=num_nodes)
        if self_loops:
            g = dgl.add_self_loop(g)
        g.ndata["feat"] = torch.randn(num_nodes, 6)
        g.ndata["label"] = torch.randint(0, CLASSES, (num_nodes,))
        g.edata["weight"] = torch.rand(g.num_edges())
        return g if here.device == "cpu" else g.to(here.device)


#: What ``nn.Module`` and torch have a ``register_`` for.
HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


class Model(nn.Module):
    def __init__(self, *layers, dropout=0.0, weighted=False):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(dropout)
        self.weighted = weighted
        self.scale = 1.0

    def forward(self, blocks, x):
        for layer, block in zip(self.layers, blocks, strict=True):
            options = {"edge_weight": block.edata["weight"]} if self.weighted else {}
            x = layer(block, x, **options)
            x = x.mean(1) if x.dim() == 3 and layer is self.layers[-1] else x.flatten(1)
            if layer is not self.layers[-1]:
                x = self.dropout(torch.relu(x))
        return x * self.scale


class Normalised(Model):
    """Normalises its inputs over the mini-batch, or by statistics of earlier ones."""

    def __init__(self, *layers, track_running_stats=True):
        super().__init__(*layers)
        self.norm = nn.BatchNorm1d(6, track_running_stats=track_running_stats)

    def forward(self, blocks, x):
        return super().forward(blocks, self.norm(x))


MODELS = {
    "mean": lambda: Model(SAGEConv(6, 8, "mean"), SAGEConv(8, CLASSES, "mean")),
    "pool": lambda: Model(SAGEConv(6, 8, "pool"), SAGEConv(8, CLASSES, "gcn")),
    "gcn": lambda: Model(GraphConv(6, 8), GraphConv(8, CLASSES)),
    "gat": lambda: Model(GATConv(6, 4, 2), GATConv(8, CLASSES, 3)),
    "gatv2": lambda: Model(GATv2Conv(6, 4, 2), GATv2Conv(8, CLASSES, 2)),
    "gin": lambda: Model(
        GINConv(nn.Linear(6, 8), "max"), GINConv(nn.Linear(8, CLASSES), "sum", learn_eps=True)
    ),
    "weighted": lambda: Model(
        GraphConv(6, 8, norm="right"), GraphConv(8, CLASSES, norm="none"), weighted=True
    ),
}


def made(name):
    return MODELS[name]().to(here.device)


def of(kind):
    return lambda: kind(SAGEConv(6, 8, "mean"), SAGEConv(8, CLASSES, "mean"))


def loader_of(g, sampler=None, batch_size=32, count=None):
    seeds = torch.arange(g.num_nodes() if count is None else count, device=here.device)
    return DataLoader(
        g, seeds, sampler or NeighborSampler([3, 4]), batch_size=batch_size, shuffle=True
    )


def two_batches():
    """Two mini-batches: after the first calls, none needs larger graphs."""
    return [blocks for *_, blocks in loader_of(graph(), count=64)]


def run(model, batches):
    """A forward and a backward pass of each mini-batch; the last outputs."""
    for blocks in batches:
        output = model(blocks, blocks[0].srcdata["feat"])
        output.sum().backward()
    return output


def train(make, g, capture, step, epochs=2, **options):
    """Losses of a script's training loop, and its model."""
    calls.capture_models(capture)
    seeded()
    model = make().to(here.device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(epochs):
        for *_, blocks in loader_of(g, **options):
            losses.append(float(step(model, optimizer, blocks)))
    return torch.tensor(losses), model


def plain_step(model, optimizer, blocks):
    loss = F.cross_entropy(model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def kinds_of(model):
    captured = calls._models.get(model)
    return [] if captured is None else [*captured._kinds.values()]


def replays_of(model):
    return sum(kind.graphs.num_replays for kind in kinds_of(model) if kind.graphs is not None)


def assert_same_training(make, step=plain_step, g=None, **options):
    g = graph() if g is None else g
    expected, eager = train(make, g, False, step, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*kernel by kernel.*")
        losses, model = train(make, g, True, step, **options)
    assert replays_of(model) > 5
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    return model


class LinkPredictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = MODELS["mean"]()

    @staticmethod
    def scores(pairs, h):
        with pairs.local_scope():
            pairs.ndata["h"] = h
            pairs.apply_edges(dgl.function.u_dot_v("h", "h", "score"))
            return pairs.edata["score"]

    def forward(self, pairs, negatives, blocks, x):
        h = self.encoder(blocks, x)
        return self.scores(pairs, h), self.scores(negatives, h)

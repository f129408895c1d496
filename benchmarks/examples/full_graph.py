"""Training on a whole graph at once, as DGL's GCN, GAT and GraphSAGE examples do it."""

from __future__ import annotations

import dgl
import torch

from benchmarks.examples.common import step


def accuracy_after(
    model: torch.nn.Module, g: dgl.DGLGraph, epochs: int, lr: float, device: str
) -> float:
    """Accuracy on the test nodes after so many steps of Adam, with weight decay."""
    g = dgl.AddSelfLoop()(g).to(device)
    model = model.to(device)
    x, labels = g.ndata["feat"], g.ndata["label"]
    train, test = g.ndata["train_mask"], g.ndata["test_mask"]
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=5e-4)
    for _ in range(epochs):
        model.train()
        loss = torch.nn.functional.cross_entropy(model(g, x)[train], labels[train])
        step(optimizer, loss)
    model.eval()
    with torch.no_grad():
        found = model(g, x)[test].argmax(1)
    return float((found == labels[test]).double().mean())


def widths(g: dgl.DGLGraph) -> tuple[int, int]:
    """Numbers of features and of classes."""
    return g.ndata["feat"].shape[1], int(g.ndata["label"].max()) + 1

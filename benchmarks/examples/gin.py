"""GIN for the classification of graphs, as in DGL's examples/pytorch/gin (v2.1.0).

    python -m benchmarks.examples.gin --root data --data MUTAG

Four GINConv layers, each with a perceptron of two; the sums over the nodes, of the input and of
each layer's output, vote for the class.  As there, the accuracy after 350 epochs is that of the
first of ten folds, which is small: 19 of MUTAG's 188 graphs.
"""

from __future__ import annotations

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import torch
from dgl.dataloading import GraphDataLoader
from sklearn.model_selection import StratifiedKFold

from benchmarks.examples.common import Example, main, step
from benchmarks.examples.graphs import Graphs, read, without_structure

WIDTH, LAYERS, BATCH = 16, 4, 128


class GIN(torch.nn.Module):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        widths = [num_features] + LAYERS * [WIDTH]
        self.layers = torch.nn.ModuleList(
            dgl.nn.GINConv(
                torch.nn.Sequential(
                    torch.nn.Linear(before, WIDTH, bias=False), torch.nn.BatchNorm1d(WIDTH),
                    torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH, bias=False),
                )
            )
            for before in widths[:-1]
        )  # fmt: skip
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(WIDTH) for _ in self.layers)
        self.votes = torch.nn.ModuleList(torch.nn.Linear(width, num_classes) for width in widths)
        self.dropout = torch.nn.Dropout(0.5)
        self.pool = dgl.nn.SumPooling()

    def forward(self, g: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        outputs = [x]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            outputs.append(torch.relu(norm(layer(g, outputs[-1]))))
        votes = zip(self.votes, outputs, strict=True)
        return sum(self.dropout(vote(self.pool(g, x))) for vote, x in votes)


def learn(data: Graphs, epochs: int, device: str) -> float:
    folds = StratifiedKFold(10, shuffle=True, random_state=0)
    train, valid = next(folds.split(data.labels, data.labels))
    pairs = list(zip(data.graphs, data.labels, strict=True))
    loader = GraphDataLoader([pairs[i] for i in train], batch_size=BATCH, shuffle=True)
    model = GIN(data.graphs[0].ndata["attr"].shape[1], max(data.labels) + 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    halving = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
    for _ in range(epochs):
        model.train()
        for g, labels in loader:
            g, labels = g.to(device), labels.to(device)
            step(optimizer, torch.nn.functional.cross_entropy(model(g, g.ndata["attr"]), labels))
        halving.step()
    model.eval()
    g = dgl.batch([data.graphs[i] for i in valid]).to(device)
    with torch.no_grad():
        found = model(g, g.ndata["attr"]).argmax(1).tolist()
    return sum(a == data.labels[i] for a, i in zip(found, valid, strict=True)) / len(valid)


EXAMPLES = [
    Example(
        name="gin",
        measure="accuracy",
        readme="examples/pytorch/gin",
        stated={"MUTAG": 0.894, "PTC": 0.685, "NCI1": 0.829, "PROTEINS": 0.741},
        read=read,
        learn=learn,
        epochs=350,
        generated_epochs=60,
        rewire=without_structure,
    )
]

if __name__ == "__main__":
    main(EXAMPLES)

"""GCN, as in DGL's examples/pytorch/gcn (v2.1.0).

    python -m benchmarks.examples.gcn --root data --data cora

Two GraphConv layers, 16 wide, with dropout between them; 200 epochs.
"""

from __future__ import annotations

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import torch

from benchmarks.examples.common import Example, main, read_nodes
from benchmarks.examples.full_graph import accuracy_after, widths


class GCN(torch.nn.Module):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.first = dgl.nn.GraphConv(num_features, 16, activation=torch.relu)
        self.second = dgl.nn.GraphConv(16, num_classes)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, g: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        return self.second(g, self.dropout(self.first(g, x)))


def learn(g: dgl.DGLGraph, epochs: int, device: str) -> float:
    return accuracy_after(GCN(*widths(g)), g, epochs, 0.01, device)


EXAMPLES = [
    Example(
        name="gcn",
        measure="accuracy",
        readme="examples/pytorch/gcn",
        stated={"cora": 0.810, "citeseer": 0.707, "pubmed": 0.792},
        read=read_nodes,
        learn=learn,
        epochs=200,
        generated_epochs=100,
    )
]

if __name__ == "__main__":
    main(EXAMPLES)

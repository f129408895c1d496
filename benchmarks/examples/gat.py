"""GAT, as in DGL's examples/pytorch/gat (v2.1.0).

    python -m benchmarks.examples.gat --root data --data cora

Two GATConv layers: 8 heads 8 wide, then one head; dropout of 0.6 on features and attention; 200
epochs.
"""

from __future__ import annotations

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import torch

from benchmarks.examples.common import Example, main, read_nodes
from benchmarks.examples.full_graph import accuracy_after, widths

HEADS, WIDTH, DROPOUT = 8, 8, 0.6


class GAT(torch.nn.Module):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.first = dgl.nn.GATConv(
            num_features, WIDTH, HEADS, DROPOUT, DROPOUT, activation=torch.nn.functional.elu
        )
        self.second = dgl.nn.GATConv(HEADS * WIDTH, num_classes, 1, DROPOUT, DROPOUT)

    def forward(self, g: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        return self.second(g, self.first(g, x).flatten(1)).mean(1)


def learn(g: dgl.DGLGraph, epochs: int, device: str) -> float:
    return accuracy_after(GAT(*widths(g)), g, epochs, 0.005, device)


EXAMPLES = [
    Example(
        name="gat",
        measure="accuracy",
        readme="examples/pytorch/gat",
        stated={"cora": 0.821, "citeseer": 0.710, "pubmed": 0.780},
        read=read_nodes,
        learn=learn,
        epochs=200,
        generated_epochs=100,
    )
]

if __name__ == "__main__":
    main(EXAMPLES)

"""GraphSAGE on the whole graph, as in DGL's examples/pytorch/graphsage/train_full.py (v2.1.0).

    python -m benchmarks.examples.sage --root data --data cora

Two SAGEConv layers with the aggregator «gcn», 16 wide, dropout before each; 200 epochs.
"""

from __future__ import annotations

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import torch

from benchmarks.examples.common import Example, main, read_nodes
from benchmarks.examples.full_graph import accuracy_after, widths


class SAGE(torch.nn.Module):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(num_features, 16, "gcn", activation=torch.relu)
        self.second = dgl.nn.SAGEConv(16, num_classes, "gcn")
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, g: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        return self.second(g, self.dropout(self.first(g, self.dropout(x))))


def learn(g: dgl.DGLGraph, epochs: int, device: str) -> float:
    return accuracy_after(SAGE(*widths(g)), g, epochs, 0.01, device)


EXAMPLES = [
    Example(
        name="sage",
        measure="accuracy",
        readme="examples/pytorch/graphsage",
        stated={"cora": 0.833, "citeseer": 0.711, "pubmed": 0.783},
        read=read_nodes,
        learn=learn,
        epochs=200,
        generated_epochs=100,
    )
]

if __name__ == "__main__":
    main(EXAMPLES)

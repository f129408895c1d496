"""The model, settings and seeds of `sage` on DGL and torch alone, as DGL's own wheel runs them.

    python -c "import dgl_mgpu, dgl; from benchmarks.examples.common import read_nodes; \
        dgl.save_graphs('cora.bin', [dgl.AddSelfLoop()(read_nodes('cora', 'data'))])"
    python -m benchmarks.examples.sage_dgl_alone cora.bin FILE.json

The second line runs in an environment where DGL imports by itself (torch 2.2 and older), and
imports nothing of dgl_mgpu; the first, which writes the graph for it, in one with this package.
"""

import json
import statistics
import sys

import dgl
import torch

from benchmarks.machine import describe_machine

SEEDS, EPOCHS = 10, 200


class SAGE(torch.nn.Module):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(num_features, 16, "gcn", activation=torch.relu)
        self.second = dgl.nn.SAGEConv(16, num_classes, "gcn")
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, g: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        return self.second(g, self.dropout(self.first(g, self.dropout(x))))


def learn(g: dgl.DGLGraph, seed: int) -> float:
    """Accuracy on the test nodes."""
    torch.manual_seed(seed)
    dgl.seed(seed)
    x, labels = g.ndata["feat"], g.ndata["label"]
    train, test = g.ndata["train_mask"].bool(), g.ndata["test_mask"].bool()
    model = SAGE(x.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(EPOCHS):
        loss = torch.nn.functional.cross_entropy(model(g, x)[train], labels[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return float((model(g, x)[test].argmax(1) == labels[test]).double().mean())


def main(graph: str, out: str) -> None:
    if "dgl_mgpu" in sys.modules:
        raise RuntimeError("DGL was mended by dgl_mgpu: run this where it imports by itself")
    (g,), _ = dgl.load_graphs(graph)
    values = [learn(g, seed) for seed in range(SEEDS)]
    report = {
        "machine": describe_machine(),
        "example": "sage",
        "graph": graph,
        "measure": "accuracy",
        "epochs": EPOCHS,
        "values": values,
    }
    with open(out, "w") as file:
        json.dump(report, file, indent=1)
        file.write("\n")
    print(f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f} over {SEEDS} seeds")


if __name__ == "__main__":
    main(*sys.argv[1:])

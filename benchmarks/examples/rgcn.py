"""R-GCN on a graph whose types are numbers, as in DGL's examples/pytorch/rgcn (v2.1.0), whole
(entity.py) and sampled (entity_sample.py).

    python -m benchmarks.examples.rgcn --root data --data aifb

Two RelGraphConv layers, 16 wide, over a learned row for each node; as many bases as relations; 50
epochs.  Sampled, four neighbours for each layer and batches of 100; the test nodes see all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import torch
from dgl.dataloading import DataLoader, NeighborSampler

from benchmarks.examples.common import Example, main, step
from benchmarks.examples.entities import Entities, accuracy, read, without_structure

WIDTH, FANOUTS, BATCH = 16, (4, 4), 100


class RGCN(torch.nn.Module):
    def __init__(self, num_nodes: int, num_classes: int, num_relations: int) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(num_nodes, WIDTH)
        layer = functools.partial(
            dgl.nn.RelGraphConv,
            num_rels=num_relations, regularizer="basis", num_bases=num_relations, self_loop=False,
        )  # fmt: skip
        self.first, self.second = layer(WIDTH, WIDTH), layer(WIDTH, num_classes)

    def forward(self, blocks: list[dgl.DGLGraph], nodes: torch.Tensor) -> torch.Tensor:
        x = self.rows(nodes)
        for layer, g in zip((self.first, self.second), blocks, strict=True):
            x = torch.relu(x) if layer is self.second else x
            x = layer(g, x, g.edata[dgl.ETYPE], g.edata["norm"])
        return x


def learn(data: Entities, epochs: int, device: str, sampled: bool) -> float:
    """Accuracy on the test nodes."""
    g = data.g.to(device)
    for relation in g.canonical_etypes:
        g.edges[relation].data["norm"] = dgl.norm_by_dst(g, relation).unsqueeze(1)
    category = g.ntypes.index(data.category)
    g = dgl.to_homogeneous(g, edata=["norm"])
    targets = (g.ndata[dgl.NTYPE] == category).nonzero().flatten()
    labels = torch.full((g.num_nodes(),), -1, device=device)
    labels[targets] = data.labels.to(device)
    model = RGCN(g.num_nodes(), data.num_classes, len(data.g.canonical_etypes)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def batches(part: str, fanouts: tuple[int, int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits and labels of the nodes of a part."""
        nodes = targets[data.part(part)]
        if not sampled:
            yield model([g, g], g.nodes())[nodes], labels[nodes]
            return
        sampler = NeighborSampler(list(fanouts))
        loader = DataLoader(g, nodes, sampler, batch_size=BATCH, shuffle=part == "train")
        for inputs, outputs, blocks in loader:
            for block in blocks:  # the mean is that over all relations there, as in DGL's example
                block.edata["norm"] = dgl.norm_by_dst(block).unsqueeze(1)
            yield model(blocks, inputs), labels[outputs]

    for _ in range(epochs):
        for logits, wanted in batches("train", FANOUTS):
            step(optimizer, torch.nn.functional.cross_entropy(logits, wanted))
    with torch.no_grad():
        logits, wanted = map(torch.cat, zip(*batches("test", (-1, -1)), strict=True))
    return accuracy(logits, wanted)


_example = functools.partial(
    Example,
    measure="accuracy",
    readme="examples/pytorch/rgcn",
    read=read,
    epochs=50,
    rewire=without_structure,
)
WHOLE = {"aifb": 0.85, "mutag": 0.70, "bgs": 0.86, "am": 0.78}
SAMPLED = {"aifb": 0.82, "mutag": 0.50, "bgs": 0.64, "am": 0.42}
EXAMPLES = [
    _example("rgcn", stated=WHOLE, generated_epochs=50,
             learn=functools.partial(learn, sampled=False)),
    _example("rgcn-sampled", stated=SAMPLED, generated_epochs=150,
             learn=functools.partial(learn, sampled=True)),
]  # fmt: skip

if __name__ == "__main__":
    main(EXAMPLES)

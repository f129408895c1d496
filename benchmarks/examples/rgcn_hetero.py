"""R-GCN on a heterogeneous graph, as in DGL's examples/pytorch/rgcn-hetero (v2.1.0): whole
(entity_classify.py) and sampled (entity_classify_mb.py), from a DGLGraph and from the store.

    python -m benchmarks.examples.rgcn_hetero --root data --data aifb

Two HeteroGraphConv layers over a learned row of 16 for each node: the first sums the means over
the neighbours of each relation, the second multiplies each mean by a matrix of the relation or, on
all sets but AIFB, by a combination of 30 or 40.  Sampled, 8 neighbours of each relation and batches
of 100; the test nodes see all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import torch
from dgl.dataloading import DataLoader, NeighborSampler

from benchmarks.examples.common import Example, main, placed, step
from benchmarks.examples.entities import Entities, accuracy, read, without_structure

WIDTH, FANOUT, BATCH = 16, 8, 100
#: Rows by node type.
Rows = dict[str, torch.Tensor]


def parameter(*shape: int) -> torch.nn.Parameter:
    gain = torch.nn.init.calculate_gain("relu")
    return torch.nn.Parameter(torch.nn.init.xavier_uniform_(torch.empty(shape), gain))


class RGCN(torch.nn.Module):
    def __init__(self, g: dgl.DGLGraph, num_classes: int, num_bases: int) -> None:
        super().__init__()
        self.rows = torch.nn.ParameterDict({t: parameter(g.num_nodes(t), WIDTH) for t in g.ntypes})
        self.relations = sorted(set(g.etypes))  # one name may join several types of nodes
        means = {r: dgl.nn.GraphConv(WIDTH, WIDTH, "right", False, False) for r in self.relations}
        self.means = dgl.nn.HeteroGraphConv(means)
        shape, count = (WIDTH, num_classes), len(self.relations)
        self.bases = dgl.nn.WeightBasis(shape, num_bases, count) if num_bases < count else None
        if self.bases is None:
            self.weight = parameter(count, *shape)
        self.hidden_bias = torch.nn.Parameter(torch.zeros(WIDTH))
        self.bias = torch.nn.Parameter(torch.zeros(num_classes))

    def forward(self, blocks: list[dgl.DGLGraph], nodes: Rows | None = None) -> Rows:
        x = {t: self.rows[t] if nodes is None else self.rows[t][nodes[t]] for t in self.rows}
        x = {t: torch.relu(rows + self.hidden_bias) for t, rows in self.means(blocks[0], x).items()}
        weight = self.weight if self.bases is None else self.bases()
        matrices = {r: {"weight": w} for r, w in zip(self.relations, weight, strict=True)}
        x = self.means(blocks[1], x, mod_kwargs=matrices)
        return {t: rows + self.bias for t, rows in x.items()}


def learn(data: Entities, epochs: int, device: str, sampled: bool, store: bool = False) -> float:
    """Accuracy on the test nodes."""
    model = RGCN(data.g, data.num_classes, data.num_bases).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=data.weight_decay)
    labels = data.labels.to(device)

    def batches(part: str, fanout: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits and labels of the nodes of a part."""
        nodes = data.part(part).to(device)
        if not sampled:
            yield model([graph, graph])[data.category][nodes], labels[nodes]
            return
        sampler = NeighborSampler([fanout, fanout])
        loader = DataLoader(
            graph, {data.category: nodes}, sampler, batch_size=BATCH, shuffle=part == "train"
        )
        for inputs, outputs, blocks in loader:
            yield model(blocks, inputs)[data.category], labels[outputs[data.category]]

    with placed(data.g, device, store) as graph:
        for _ in range(epochs):
            for logits, wanted in batches("train", FANOUT):
                step(optimizer, torch.nn.functional.cross_entropy(logits, wanted))
        with torch.no_grad():
            logits, wanted = map(torch.cat, zip(*batches("test", -1), strict=True))
    return accuracy(logits, wanted)


WHOLE = {"aifb": 0.9611, "mutag": 0.7206, "bgs": 0.9173, "am": 0.8828}
SAMPLED = {"aifb": 0.9444, "mutag": 0.6737, "bgs": 0.9104, "am": 0.8855}
_example = functools.partial(
    Example,
    measure="accuracy",
    readme="examples/pytorch/rgcn-hetero",
    read=read,
    generated_epochs=50,
    rewire=without_structure,
)
EXAMPLES = [
    _example("rgcn-hetero", stated=WHOLE, epochs=50,
             learn=functools.partial(learn, sampled=False)),
    _example("rgcn-hetero-sampled", stated=SAMPLED, epochs=20,
             learn=functools.partial(learn, sampled=True)),
    _example("rgcn-hetero-store", stated=SAMPLED, epochs=20,
             learn=functools.partial(learn, sampled=True, store=True)),
]  # fmt: skip

if __name__ == "__main__":
    main(EXAMPLES)

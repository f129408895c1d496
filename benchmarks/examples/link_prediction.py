"""Link prediction by GraphSAGE, on a DGLGraph or on the store: the rest of the script is the same.

    python -m benchmarks.examples.link_prediction --root data --data cora

What DGL's examples/pytorch/graphsage/link_pred.py (v2.1.0) does on ogbl-citation2, on small graphs:
three layers of width 256, fanouts of 15, 10 and 5, batches of 512 edges, which with their reverse
are left out of what is sampled, one random destination for each as a pair that is no edge, and a
perceptron that scores the product of two embeddings.  A tenth of the edges is kept from training.
As there, the result is the mean reciprocal rank of an edge among pairs of the same source that
are none, here 100 of them, there 1,000.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import torch
from dgl.dataloading import DataLoader, NeighborSampler, as_edge_prediction_sampler
from dgl.dataloading.negative_sampler import Uniform

from benchmarks.examples.common import Example, embeddings, main, placed, read_nodes, step

FANOUTS, WIDTH, BATCH = (15, 10, 5), 256, 512
HELD_OUT, CANDIDATES = 0.1, 100


class Links(NamedTuple):
    """A graph to learn on, and pairs to be told apart.

    Attributes
    ----------
    g : DGLGraph
        Each edge is followed, half of all edges later, by its reverse.
    edges : Tensor, shape (2, n)
        Held-out edges.
    others : Tensor, shape (n, CANDIDATES)
        For each, destinations to which its source has no edge.
    """

    g: dgl.DGLGraph
    edges: torch.Tensor
    others: torch.Tensor


def read(name: str, root: str) -> Links:
    """Hold edges of a data set out."""
    draw = torch.Generator().manual_seed(0)
    whole = read_nodes(name, root)
    src, dst = whole.edges()
    once = (src < dst).nonzero().flatten()
    once = once[torch.randperm(len(once), generator=draw)]
    count = int(HELD_OUT * len(once))
    edges = torch.stack([src[once[:count]], dst[once[:count]]])
    u, v = src[once[count:]], dst[once[count:]]
    g = dgl.graph((torch.cat([u, v]), torch.cat([v, u])), num_nodes=whole.num_nodes())
    g.ndata["feat"] = whole.ndata["feat"].float()
    sources = edges[0].repeat_interleave(CANDIDATES)
    others = torch.randint(0, g.num_nodes(), sources.shape, generator=draw).to(src.dtype)
    while len(bad := (whole.has_edges_between(sources, others) | (sources == others)).nonzero()):
        redrawn = torch.randint(0, g.num_nodes(), bad.shape, generator=draw)
        others[bad] = redrawn.to(src.dtype)
    return Links(g, edges, others.view(count, CANDIDATES))


class Model(torch.nn.Module):
    """Embeddings by GraphSAGE, and a score for the product of two."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        widths = (num_features, *(WIDTH for _ in FANOUTS))
        self.layers = torch.nn.ModuleList(
            dgl.nn.SAGEConv(before, after, "mean") for before, after in itertools.pairwise(widths)
        )
        self.score = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, 1),
        )  # fmt: skip

    def layer(self, number: int, block: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[number](block, x)
        return x if number == len(self.layers) - 1 else torch.relu(x)

    def forward(
        self, blocks: list[dgl.DGLGraph], x: torch.Tensor, pairs: list[dgl.DGLGraph]
    ) -> list[torch.Tensor]:
        for number, block in enumerate(blocks):
            x = self.layer(number, block, x)
        return [self.score(x[u.long()] * x[v.long()]) for u, v in (each.edges() for each in pairs)]


@torch.no_grad()
def mean_reciprocal_rank(model: Model, graph: Any, links: Links) -> float:
    """Of the held-out edges."""
    x = embeddings(model, graph, links.g.ndata["feat"].to(graph.device))
    ranks = []
    for some in torch.arange(len(links.others)).split(256):
        u, v = links.edges[:, some].to(x.device)
        rest = links.others[some].to(x.device)
        edge = model.score(x[u] * x[v])
        other = model.score(x[u][:, None] * x[rest])[:, :, 0]
        # Of equal scores, half count as better.
        ranks.append(1 + (other > edge).sum(1) + 0.5 * (other == edge).sum(1))
    return float((1 / torch.cat(ranks)).mean())


def learn(links: Links, epochs: int, device: str, store: bool) -> float:
    """Train on a graph and evaluate."""
    model = Model(links.g.ndata["feat"].shape[1]).to(device)
    with placed(links.g, device, store, edges=True) as graph:
        train(model, graph, epochs)
        return mean_reciprocal_rank(model, graph, links)


def train(model: Model, graph: Any, epochs: int) -> None:
    half = graph.num_edges() // 2
    edges = torch.arange(2 * half, dtype=graph.idtype, device=graph.device)
    sampler = as_edge_prediction_sampler(
        NeighborSampler(list(FANOUTS), prefetch_node_feats=["feat"]),
        exclude="reverse_id",
        reverse_eids=edges.roll(half),
        negative_sampler=Uniform(1),
    )
    loader = DataLoader(graph, edges, sampler, batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0005)
    for _ in range(epochs):
        for _, positive, negative, blocks in loader:
            scores = model(blocks, blocks[0].srcdata["feat"], [positive, negative])
            labels = [torch.ones_like(scores[0]), torch.zeros_like(scores[1])]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                torch.cat(scores), torch.cat(labels)
            )
            step(optimizer, loss)


_example = functools.partial(
    Example,
    measure="MRR",
    readme="examples/pytorch/graphsage",
    stated={},
    read=read,
    epochs=10,
    generated_epochs=10,
    others=("cora",),
)
EXAMPLES = [
    _example("link-prediction", learn=functools.partial(learn, store=False)),
    _example("link-prediction-store", learn=functools.partial(learn, store=True)),
]

if __name__ == "__main__":
    main(EXAMPLES)

"""PinSAGE for recommendation, as in DGL's examples/pytorch/pinsage/model.py (v2.1.0), on a DGLGraph
or on the store: the rest of the script is the same.

    python -m benchmarks.examples.pinsage --root data --data ml-1m

Items are neighbours of an item where random walks over those who chose them lead; two layers over
the three most visited.  Pairs of items chosen by one user are to score higher than random ones.
A hit is a user whose held-out item is among the ten that score highest with its latest one.  An
item is its number, its year and its genres here; its title, which DGL's example reads too, is not.
"""

from __future__ import annotations

import functools
from typing import Any

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import dgl.function as fn
import torch
from dgl.sampling import PinSAGESampler, random_walk

from benchmarks.examples.choices import Choices, read, without_structure
from benchmarks.examples.common import Example, main, placed, step

WIDTH, LAYERS, BATCH, TOP = 64, 2, 32, 10
#: Steps of two edges, chance to end after each, walks, and neighbours of them.
WALKS = (2, 0.5, 10, 3)


class Convolution(torch.nn.Module):
    """A mean over neighbours, weighted by visits."""

    def __init__(self) -> None:
        super().__init__()
        self.neighbor = torch.nn.Linear(WIDTH, WIDTH)
        self.both = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, block: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        with block.local_scope():
            block.srcdata["x"] = torch.relu(self.neighbor(self.dropout(x)))
            block.update_all(fn.u_mul_e("x", "weights", "m"), fn.sum("m", "x"))
            block.update_all(fn.copy_e("weights", "m"), fn.sum("m", "visits"))
            mean = block.dstdata["x"] / block.dstdata["visits"].clamp(min=1)[:, None]
        z = torch.cat([mean, x[: block.num_dst_nodes()]], 1)
        return torch.nn.functional.normalize(torch.relu(self.both(self.dropout(z))))


class PinSAGE(torch.nn.Module):
    def __init__(self, g: dgl.DGLGraph) -> None:
        super().__init__()
        items = g.nodes["item"].data
        self.number = torch.nn.Embedding(g.num_nodes("item"), WIDTH)
        self.year = torch.nn.Embedding(int(items["year"].max()) + 1, WIDTH)
        self.genre = torch.nn.Linear(items["genre"].shape[1], WIDTH)
        for part in (self.number, self.year, self.genre):
            torch.nn.init.xavier_uniform_(part.weight)
        self.layers = torch.nn.ModuleList(Convolution() for _ in range(LAYERS))
        self.bias = torch.nn.Parameter(torch.zeros(g.num_nodes("item")))
        self.register_buffer("years", items["year"])
        self.register_buffer("genres", items["genre"])

    def forward(self, blocks: list[dgl.DGLGraph]) -> torch.Tensor:
        nodes = blocks[0].srcdata[dgl.NID]
        x = self.number(nodes) + self.year(self.years[nodes]) + self.genre(self.genres[nodes])
        own = x[: blocks[-1].num_dst_nodes()]
        for layer, block in zip(self.layers, blocks, strict=True):
            x = layer(block, x)
        return own + x


def sample(sampler: PinSAGESampler, nodes: torch.Tensor, *pairs: torch.Tensor) -> list:
    """Blocks for nodes; edges that join pairs are left out, for they are what is asked for."""
    blocks: list[dgl.DGLGraph] = []
    for _ in range(LAYERS):
        frontier = sampler(nodes)
        if pairs:
            frontier = dgl.remove_edges(frontier, frontier.edge_ids(*pairs, return_uv=True)[2])
        block = dgl.to_block(frontier, nodes)
        block.edata["weights"] = frontier.edata["weights"][block.edata[dgl.EID]].float()
        nodes = block.srcdata[dgl.NID]
        blocks.insert(0, block)
    return blocks


def learn(data: Choices, epochs: int, device: str, store: bool) -> float:
    """Train on a graph and count hits."""
    model = PinSAGE(data.g).to(device)
    with placed(data.g, device, store) as graph:
        sampler = PinSAGESampler(graph, "item", "user", *WALKS)
        train(model, data, graph, sampler, epochs)
        return hits(model, data, graph, sampler)


def train(model: PinSAGE, data: Choices, graph: Any, sampler: PinSAGESampler, epochs: int) -> None:
    items, device = graph.num_nodes("item"), graph.device
    optimizer = torch.optim.Adam(model.parameters(), lr=data.lr)
    for _ in range(epochs * data.batches):
        heads, other = torch.randint(items, (2, BATCH), device=device)
        tails = random_walk(graph, heads, metapath=["chosen-by", "chose"])[0][:, 2]
        there = tails >= 0
        heads, tails, other = heads[there], tails[there], other[there]
        nodes, places = torch.cat([heads, tails, other]).unique(return_inverse=True)
        pairs = torch.cat([heads, heads]), torch.cat([tails, other])
        x = model(sample(sampler, nodes, *pairs))[places].view(3, len(heads), WIDTH)
        right = (x[0] * x[1]).sum(1) + model.bias[tails]
        wrong = (x[0] * x[2]).sum(1) + model.bias[other]
        loss = (wrong - right + 1).clamp(min=0).mean()
        step(optimizer, loss)


@torch.no_grad()
def hits(model: PinSAGE, data: Choices, graph: Any, sampler: PinSAGESampler) -> float:
    """The share of users whose held-out item is among the ten best."""
    model.eval()
    every = torch.arange(graph.num_nodes("item"), device=graph.device).split(1024)
    x = torch.cat([model(sample(sampler, nodes)) for nodes in every])
    scores = x[data.latest] @ x.T
    scores[data.chosen] = -torch.inf
    found = scores.topk(TOP).indices.cpu() == data.held_out[:, None]
    return float(found.any(1).double().mean())


_example = functools.partial(
    Example,
    measure="HITS@10",
    readme="examples/pytorch/pinsage",
    stated={"ml-1m": 0.01241},
    read=read,
    epochs=300,
    generated_epochs=2,
    rewire=without_structure,
)
EXAMPLES = [
    _example("pinsage", learn=functools.partial(learn, store=False)),
    _example("pinsage-store", learn=functools.partial(learn, store=True)),
]

if __name__ == "__main__":
    main(EXAMPLES)

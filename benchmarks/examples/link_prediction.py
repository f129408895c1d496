"""Link prediction by GraphSAGE, on a DGLGraph or on the store: the rest of the script is the same.

    python -m benchmarks.examples.link_prediction --root data --data cora --graph dgl store

What DGL's examples/pytorch/graphsage/link_pred.py (v2.1.0) does on ogbl-citation2, on small graphs:
three layers of width 256, fanouts of 15, 10 and 5, batches of 512 edges, which with their reverse
are left out of what is sampled, one random destination for each as a pair that is no edge, and a
perceptron that scores the product of two embeddings.  A tenth of the edges is kept from training.
As there, the result is the mean reciprocal rank of an edge among pairs of the same source that
are none, here 100 of them; and beside it the chance that an edge has a higher score than one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import dgl_mgpu  # first: it lets dgl import

# isort: split
import dgl
import torch
from dgl.dataloading import (
    DataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    as_edge_prediction_sampler,
)
from dgl.dataloading.negative_sampler import Uniform

from benchmarks.machine import describe_machine
from dgl_mgpu.data import load

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


def split(name: str, root: str, seed: int) -> Links:
    """Hold edges of a data set out."""
    draw = torch.Generator().manual_seed(seed)
    whole = load(name, root).to_dgl()
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
    def embeddings(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        """Of all nodes, layer by layer, from all of their neighbours."""
        sampler = MultiLayerFullNeighborSampler(1)
        nodes = torch.arange(graph.num_nodes(), dtype=graph.idtype, device=graph.device)
        for number in range(len(self.layers)):
            rows = torch.empty(len(nodes), WIDTH, device=x.device)
            for inputs, outputs, (block,) in DataLoader(graph, nodes, sampler, batch_size=4096):
                rows[outputs.long()] = self.layer(number, block, x[inputs.long()])
            x = rows
        return x


@torch.no_grad()
def evaluate(model: Model, graph: Any, links: Links) -> dict[str, float]:
    """Mean reciprocal rank and AUC of the held-out edges."""
    x = model.embeddings(graph, links.g.ndata["feat"].to(graph.device))
    edges, others = [], []
    for some in torch.arange(len(links.others)).split(256):
        u, v = links.edges[:, some].to(x.device)
        rest = links.others[some].to(x.device)
        edges.append(model.score(x[u] * x[v]))
        others.append(model.score(x[u][:, None] * x[rest])[:, :, 0])
    edge, other = torch.cat(edges), torch.cat(others)
    # Of equal scores, half count as better.
    better = (other > edge).sum(1) + 0.5 * (other == edge).sum(1)
    worse = torch.searchsorted(other.flatten().sort().values, edge.flatten())
    return {
        "mrr": float((1 / (1 + better)).mean()),
        "auc": float(worse.double().mean() / other.numel()),
    }


def learn(graph: Any, links: Links, epochs: int, seed: int) -> dict[str, Any]:
    """Train on a graph and evaluate."""
    torch.manual_seed(seed)
    dgl.seed(seed)
    half = links.g.num_edges() // 2
    edges = torch.arange(2 * half, dtype=graph.idtype, device=graph.device)
    sampler = as_edge_prediction_sampler(
        NeighborSampler(list(FANOUTS), prefetch_node_feats=["feat"]),
        exclude="reverse_id",
        reverse_eids=edges.roll(half),
        negative_sampler=Uniform(1),
    )
    loader = DataLoader(graph, edges, sampler, batch_size=BATCH, shuffle=True)
    model = Model(links.g.ndata["feat"].shape[1]).to(graph.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0005)
    losses = []
    begin = time.perf_counter()
    for _ in range(epochs):
        total = torch.zeros((), device=graph.device)
        for _, positive, negative, blocks in loader:
            scores = model(blocks, blocks[0].srcdata["feat"], [positive, negative])
            labels = [torch.ones_like(scores[0]), torch.zeros_like(scores[1])]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                torch.cat(scores), torch.cat(labels)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        losses.append(float(total) / len(loader))
    seconds = (time.perf_counter() - begin) / max(1, epochs)
    return {"losses": losses, "epoch_seconds": seconds, **evaluate(model, graph, links)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="data", help="root of the data sets")
    parser.add_argument("--data", default="cora", help="data set: cora, facebook, …")
    parser.add_argument("--graph", nargs="+", choices=["dgl", "store"], default=["dgl", "store"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    links = split(arguments.data, arguments.root, arguments.seed)
    results = {}
    for kind in arguments.graph:
        if kind == "dgl":
            graph = links.g.to(arguments.device)
        else:
            store = dgl_mgpu.GlobalStore.from_dgl(links.g, edges=True, device=arguments.device)
            graph = store.graph
        results[kind] = found = learn(graph, links, arguments.epochs, arguments.seed)
        print(
            f"{arguments.data}, {kind}: loss {found['losses'][-1]:.4f}, MRR {found['mrr']:.4f}, "
            f"AUC {found['auc']:.4f}, {found['epoch_seconds']:.2f} s an epoch"
        )
    if arguments.json:
        report = {"machine": describe_machine(), "data": arguments.data, "results": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""GraphSAGE on samples, as in DGL's examples/pytorch/graphsage/node_classification.py and
examples/multigpu/node_classification_sage.py (v2.1.0): on a DGLGraph or on the store, on one rank
or on several.  The rest of the script is the same.

    python -m benchmarks.examples.node_classification --root data --data ogbn-products

Three layers 256 wide, 10 neighbours for each, batches of 1024 nodes on each rank; the test nodes'
classes come from all neighbours, layer by layer.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dgl.dataloading import DataLoader, NeighborSampler
from torch.nn.parallel import DistributedDataParallel

from benchmarks.examples.common import Example, embeddings, main, placed, read_nodes, seed_all, step
from benchmarks.examples.full_graph import widths

FANOUTS, WIDTH, BATCH, RANKS = (10, 10, 10), 256, 1024, 2


class SAGE(torch.nn.Module):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        sizes = itertools.pairwise((num_features, WIDTH, WIDTH, num_classes))
        self.layers = torch.nn.ModuleList(dgl.nn.SAGEConv(i, o, "mean") for i, o in sizes)
        self.dropout = torch.nn.Dropout(0.5)

    def layer(self, number: int, block: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[number](block, x)
        return x if number == len(self.layers) - 1 else self.dropout(torch.relu(x))

    def forward(self, blocks: list[dgl.DGLGraph], x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(blocks):
            x = self.layer(number, block, x)
        return x


def train(model: torch.nn.Module, graph: Any, nodes: torch.Tensor, epochs: int, ddp: bool) -> None:
    sampler = NeighborSampler(
        list(FANOUTS), prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = DataLoader(
        graph, nodes, sampler, batch_size=BATCH, shuffle=True,
        use_ddp=ddp, ddp_seed=torch.initial_seed(),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, weight_decay=5e-4)
    model.train()
    for _ in range(epochs):
        for _, _, blocks in loader:
            logits = model(blocks, blocks[0].srcdata["feat"])
            loss = torch.nn.functional.cross_entropy(logits, blocks[-1].dstdata["label"])
            step(optimizer, loss)


def learn(g: dgl.DGLGraph, epochs: int, device: str, store: bool, ddp: bool = False) -> float:
    model = SAGE(*widths(g)).to(device)
    with placed(g, device, store) as graph:
        nodes = g.ndata["train_mask"].nonzero().flatten().to(graph.device)
        train(DistributedDataParallel(model) if ddp else model, graph, nodes, epochs, ddp)
        found = embeddings(model, graph, g.ndata["feat"].to(device)).argmax(1).cpu()
    test = g.ndata["test_mask"]
    return float((found == g.ndata["label"])[test].double().mean())


def on_ranks(g: dgl.DGLGraph, epochs: int, device: str, store: bool) -> float:
    """The same with a process for each rank."""
    seed = torch.initial_seed()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, seed, g, epochs, device, store), nprocs=RANKS)
        return torch.load(Path(folder) / "accuracy")


def _rank(
    rank: int, folder: str, seed: int, g: dgl.DGLGraph, epochs: int, device: str, store: bool
) -> None:
    seed_all(seed)  # models and the order of nodes are the same everywhere; samplers differ
    dgl.seed(seed + rank)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting", world_size=RANKS, rank=rank,
    )  # fmt: skip
    accuracy = learn(g, epochs, device, store, ddp=True)
    if rank == 0:
        torch.save(accuracy, Path(folder) / "accuracy")
    dist.destroy_process_group()


_example = functools.partial(
    Example,
    measure="accuracy",
    read=read_nodes,
    generated_epochs=20,
)
ALONE = {"readme": "examples/pytorch/graphsage", "stated": {"ogbn-products": 0.7632}, "epochs": 10}
DDP = {"readme": "examples/multigpu", "stated": {"ogbn-products": 0.7716}, "epochs": 20}
EXAMPLES = [
    _example("sage-sampled", learn=functools.partial(learn, store=False), **ALONE),
    _example("sage-store", learn=functools.partial(learn, store=True), **ALONE),
    _example("sage-ranks", learn=functools.partial(on_ranks, store=False), **DDP),
    _example("sage-ranks-store", learn=functools.partial(on_ranks, store=True), **DDP),
]

if __name__ == "__main__":
    main(EXAMPLES)

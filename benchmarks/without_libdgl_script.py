"""Times what DGL's scripts call on CPUs, a case for each line that it is sent; answers in JSON.

:mod:`benchmarks.without_libdgl` runs it with DGL's binary and without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

import dgl_mgpu  # noqa: F401  # isort: skip  # before DGL
import dgl
import dgl.function as fn


def cases(nodes: int, edges: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is timed, by name; all of it is repeatable."""
    torch.manual_seed(0)
    dgl.seed(0)
    graph = dgl.graph((torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,))))
    graph = dgl.add_self_loop(graph)
    graph.create_formats_()
    graph.ndata["x"] = torch.rand(nodes, 64)
    graph.edata["w"] = torch.rand(graph.num_edges(), 1)
    scores = torch.rand(graph.num_edges(), 4)
    seeds = torch.randperm(nodes)[:1024]

    def update_all(message: object, reduce: object) -> Callable[[], object]:
        def call() -> None:
            with graph.local_scope():
                graph.update_all(message, reduce)

        return call

    yield "update_all: copy_u, sum", update_all(fn.copy_u("x", "m"), fn.sum("m", "y"))
    yield "update_all: u_mul_e, sum", update_all(fn.u_mul_e("x", "w", "m"), fn.sum("m", "y"))
    yield "update_all: copy_u, max", update_all(fn.copy_u("x", "m"), fn.max("m", "y"))
    yield "update_all: u_mul_e, max", update_all(fn.u_mul_e("x", "w", "m"), fn.max("m", "y"))
    x = graph.ndata["x"].clone().requires_grad_()
    yield "copy_u, max and its gradient", lambda: dgl.ops.copy_u_max(graph, x).sum().backward()
    yield "apply_edges: u_dot_v", lambda: graph.apply_edges(fn.u_dot_v("x", "x", "s"))
    yield "edge_softmax", lambda: dgl.ops.edge_softmax(graph, scores)
    yield "sample_neighbors: 10", lambda: dgl.sampling.sample_neighbors(graph, seeds, 10)
    frontier = dgl.sampling.sample_neighbors(graph, seeds, 10)
    yield "to_block", lambda: dgl.to_block(frontier, seeds)
    yield "random_walk: 10", lambda: dgl.sampling.random_walk(graph, seeds, length=10)
    small = [dgl.rand_graph(30, 100) for _ in range(128)]
    yield "batch: 128 graphs", lambda: dgl.batch(small)
    batched = dgl.batch(small)
    yield "unbatch: 128 graphs", lambda: dgl.unbatch(batched)
    yield "training step: GCN on the whole graph", full_graph_step(graph)
    yield "mini-batches: 5 of GraphSAGE", mini_batches(graph, seeds)
    yield "training step: 128 graphs to classify", classification_step(small)


def full_graph_step(graph: dgl.DGLGraph) -> Callable[[], object]:
    """As in DGL's tutorial 1: two layers of GCN and their gradients."""
    layers = nn.ModuleList([dgl.nn.GraphConv(64, 16), dgl.nn.GraphConv(16, 8)])
    labels = torch.randint(8, (graph.num_nodes(),))

    def step() -> None:
        hidden = layers[0](graph, graph.ndata["x"]).relu()
        nn.functional.cross_entropy(layers[1](graph, hidden), labels).backward()

    return step


def mini_batches(graph: dgl.DGLGraph, seeds: torch.Tensor) -> Callable[[], object]:
    """As in DGL's tutorial on neighbour sampling."""
    layers = nn.ModuleList([dgl.nn.SAGEConv(64, 32, "mean"), dgl.nn.SAGEConv(32, 8, "mean")])
    sampler = dgl.dataloading.NeighborSampler([10, 10], prefetch_node_feats=["x"])
    loader = dgl.dataloading.DataLoader(graph, seeds[:640], sampler, batch_size=128)

    def run() -> None:
        for _, _, blocks in loader:
            hidden = blocks[0].srcdata["x"]
            for layer, block in zip(layers, blocks, strict=True):
                hidden = layer(block, hidden)
            hidden.sum().backward()

    return run


def classification_step(graphs: list[dgl.DGLGraph]) -> Callable[[], object]:
    """As in DGL's tutorial 5: a batch is made, and read out graph by graph."""
    layers = nn.ModuleList([dgl.nn.GraphConv(16, 16, allow_zero_in_degree=True) for _ in range(2)])

    def step() -> None:
        batch = dgl.batch(graphs)
        batch.ndata["h"] = torch.rand(batch.num_nodes(), 16)
        hidden = batch.ndata["h"]
        for layer in layers:
            hidden = layer(batch, hidden).relu()
        batch.ndata["h"] = hidden
        dgl.mean_nodes(batch, "h").sum().backward()

    return step


def timed(call: Callable[[], object], seconds: float) -> list[float]:
    """Milliseconds of calls, for so many seconds but of three at least."""
    call()
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dgl.utils.set_num_threads(options.threads)
    calls = dict(cases(options.nodes, options.edges))
    print(json.dumps(list(calls)), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(calls[line.strip()], options.seconds)), flush=True)

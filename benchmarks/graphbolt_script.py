"""GraphBolt's sampling on the CPU, of a generated graph; also for DGL's own library.

It knows nothing of dgl_mgpu, apart from that DGL may need it to be imported; see
:mod:`benchmarks.graphbolt_cpu`, which runs it.  It prints milliseconds of each mini-batch, after
those that warm it up, and the edges of the last one, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time

import torch

with contextlib.suppress(ImportError):
    import dgl_mgpu  # noqa: F401  makes DGL import

import dgl.graphbolt as gb  # isort: skip


def graph(nodes, edges):
    """Random destinations, and sources of which the first are the most frequent."""
    torch.manual_seed(0)
    targets = torch.randint(nodes, (edges,)).sort().values
    indptr = torch.searchsorted(targets, torch.arange(nodes + 1))
    sources = (torch.rand(edges).pow(2) * nodes).long()
    return gb.fused_csc_sampling_graph(
        indptr, sources, edge_attributes={"w": torch.rand(edges) + 0.05}
    )


def measure(told):
    """Milliseconds of each mini-batch, and the edges of the last one."""
    g = graph(told.nodes, told.edges)
    count = told.batch * (told.batches + told.warm_up)
    seeds = gb.ItemSet(torch.randperm(told.nodes)[:count], names="seed_nodes")
    datapipe = gb.ItemSampler(seeds, batch_size=told.batch)
    sample = datapipe.sample_layer_neighbor if told.by_layer else datapipe.sample_neighbor
    datapipe = sample(
        g, told.fanouts, replace=told.replace, prob_name="w" if told.weighted else None
    )
    times, start = [], time.perf_counter()
    for batch in gb.DataLoader(datapipe):
        now = time.perf_counter()
        times.append(1e3 * (now - start))
        edges = sum(len(it.sampled_csc.indices) for it in batch.sampled_subgraphs)
        start = time.perf_counter()
    return {"ms": times[told.warm_up :], "edges": edges}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--edges", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--fanouts", type=int, nargs="+", required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--weighted", action="store_true")
    parser.add_argument("--replace", action="store_true")
    parser.add_argument("--by-layer", action="store_true")
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps({**measure(parser.parse_args()), **versions}))

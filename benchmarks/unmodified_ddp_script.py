"""GraphSAGE on several GPUs as DGL's user guide has it, over a graph in the host's memory.

It knows nothing of dgl_mgpu, apart from that DGL needs it to be imported; see
:mod:`benchmarks.unmodified_ddp_gpu`, which runs it. It writes the seeds that all GPUs train on in a
second, in several windows of steps, and the last loss, to a file of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.dataloading import DataLoader, NeighborSampler  # isort: skip
from dgl.nn import SAGEConv  # isort: skip

FEATURES, HIDDEN, CLASSES = 128, 256, 47


class SAGE(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        widths = [FEATURES, *[HIDDEN] * (num_layers - 1), CLASSES]
        self.layers = nn.ModuleList(
            SAGEConv(inputs, outputs, "mean") for inputs, outputs in itertools.pairwise(widths)
        )

    def forward(self, blocks, x):
        for layer, block in zip(self.layers, blocks, strict=True):
            x = layer(block, x)
            if layer is not self.layers[-1]:
                x = F.relu(x)
        return x


def train(rank, options, g):
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=options.meeting_point, rank=rank, world_size=options.gpus
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(SAGE(len(options.fanouts)).cuda(), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    sampler = NeighborSampler(
        options.fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = DataLoader(
        g, torch.arange(g.num_nodes(), device=f"cuda:{rank}"), sampler, device=f"cuda:{rank}",
        batch_size=options.batch, shuffle=True, drop_last=True, use_ddp=True, use_uva=True,
    )  # fmt: skip
    rates, start = [], 0.0
    for step, (_, _, blocks) in enumerate(loader):
        if step >= options.warm_up and (step - options.warm_up) % options.steps == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            if step > options.warm_up:
                rates.append(options.gpus * options.batch * options.steps / (now - start))
            if len(rates) == options.windows:
                break
            start = time.perf_counter()
        loss = F.cross_entropy(
            model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        Path(options.out).write_text(json.dumps({"seeds_per_s": rates, "loss": loss.item()}))
    dist.destroy_process_group()


def graph(nodes, edges):
    torch.manual_seed(1)
    sources = (torch.rand(edges).pow_(3) * nodes).long()
    g = dgl.graph((sources, torch.randint(nodes, (edges,))), num_nodes=nodes).formats("csc")
    g.ndata["feat"] = torch.randn(nodes, FEATURES)
    g.ndata["label"] = torch.randint(CLASSES, (nodes,))
    return g


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--edges", type=int, required=True)
    parser.add_argument("--fanouts", type=int, nargs="+", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--meeting-point", required=True)
    parser.add_argument("--out", required=True)
    told = parser.parse_args()
    torch.multiprocessing.spawn(train, (told, graph(told.nodes, told.edges)), nprocs=told.gpus)

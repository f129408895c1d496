"""Claim: 10,000 mini-batches leave no more memory in use than the first 5,000 did.

GraphSAGE is trained through the store on every rank, with batches made ahead; with ``--captured``
by steps that are CUDA graphs, as ``dgl-mgpu train`` has them.  After every 500
batches, between two passes of the loader, each rank looks at its own memory, ``/dev/shm``, its open
files, torch's memory on the GPU and all that is in use there.  A line is fitted to the second
half: what rises by more than 1 MB in 1,000 batches, or more than one file, grows.

    python -m benchmarks.soak --ranks 2 --out soak.json
    python -m benchmarks.soak --ranks 1 --captured
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import shutil
from pathlib import Path

import numpy as np
import torch

import dgl_mgpu  # noqa: F401  makes DGL import

from dgl.dataloading import DataLoader  # isort: skip

from benchmarks.fullgraph import Job, new_report, ranks_option
from benchmarks.generated_graph import Data, all_in_gpu_memory, seeds_of, stored
from benchmarks.gpu import this_device
from benchmarks.timed_training import Network, Training, blocks_of, loader_of, network_model
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.data.generate import GraphSpec
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.train.launch.launch import launch

NETWORK = Network("graphsage", (15, 10, 5), {})
FEATURES, CLASSES, HIDDEN = 128, 47, 256
FILES = "open files"
#: Samples that a line is fitted to, at least.
_FEWEST = 3


def in_use(device: torch.device) -> dict[str, int]:
    """What this rank has, in bytes, and its open files.

    Its own memory is that of no file: pages of shared memory count from when they are first read.
    What garbage and the allocator of C hold on to is given back first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = {
        "own memory": own_memory(),
        "/dev/shm": shared_memory(),
        FILES: len(os.listdir("/proc/self/fd")),
    }
    if device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found["torch, allocated"] = torch.cuda.memory_allocated()
        found["torch, reserved"] = torch.cuda.memory_reserved()
        found["GPU"] = total - free
    return found


def own_memory() -> int:
    """Bytes of this process's memory that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise ValueError("the kernel does not tell a process's own memory")


def shared_memory() -> int:
    """Bytes in use of the machine's shared memory."""
    return shutil.disk_usage("/dev/shm").used


def rise(batches: list[int], values: list[int]) -> float:
    """Of a line through the second half of the values, in 1,000 batches."""
    half = len(values) // 2
    return 1e3 * float(np.polyfit(batches[half:], np.array(values[half:], float), 1)[0])


def growing(rises: dict[str, float], limit_mb: float) -> dict[str, float]:
    """What rises by more than ``limit_mb`` MB, or more than one file."""
    limits = {name: 1.0 if name == FILES else 1e6 * limit_mb for name in rises}
    return {name: found for name, found in rises.items() if found > limits[name]}


def work(options: argparse.Namespace) -> None:
    """All that a rank does."""
    # Without a GPU, enough to see that the program works.
    with tensor_backed_graphs() if this_device().type == "cpu" else contextlib.nullcontext():
        _soak(options)


def _soak(options: argparse.Namespace) -> None:
    job, ranks = Job(options), Communicator.of_this_machine()
    spec = GraphSpec(options.nodes, options.edges, FEATURES, CLASSES)
    data = Data(spec, job.device)
    ids = seeds_of(data, options.every * options.batch * ranks.size)
    store = {
        **all_in_gpu_memory(data, ranks),
        "batch_size": options.batch,
        "fanouts": NETWORK.fanouts[::-1],
    }
    with stored(data, ranks, store) as graph:
        data.forget_edges()
        training = Training(network_model(NETWORK, spec, HIDDEN), job.device)
        sampler = NETWORK.sampler(training.model.inputs)
        loader = loader_of(graph, ids, sampler, options.batch, ranks)
        seen: list[dict[str, int]] = []
        numbers = list(range(options.every, options.batches + 1, options.every))
        for number in numbers:
            loss = _one_pass(training, loader, options.captured)
            seen.append(in_use(job.device))
            text = ", ".join(
                f"{name} {value}" if name == FILES else f"{name} {value / 1e6:.2f}"
                for name, value in seen[-1].items()
            )
            job.say(f"{number:7} batches, loss {loss:.3f}, MB: {text}")
    series = {name: [each[name] for each in seen] for name in seen[0]}
    rises = {name: rise(numbers, values) for name, values in series.items()}
    everyone = ranks.all_gather((series, rises))
    grows = [growing(found, options.limit) for _, found in everyone]
    for rank, (_, found) in enumerate(everyone):
        text = ", ".join(f"{name} {rise:+.0f}" for name, rise in found.items())
        job.say(f"rank {rank}, bytes and files in 1,000 batches: {text}")
    job.keep(
        case=f"{options.batches} batches" + (", captured" if options.captured else ""),
        batches=numbers,
        each_rank=[series for series, _ in everyone],
        each_rank_rises=[rises for _, rises in everyone],
        grows=grows,
        reached=not any(grows),
    )
    if any(grows):
        raise ValueError(f"grows in 1,000 batches, by rank: {grows}")


def _one_pass(training: Training, loader: DataLoader, captured: bool) -> float:
    """The mean loss."""
    losses = (
        [training.captured_step(batch) for batch in training.captured_batches(loader)]
        if captured
        else [training.step_on_blocks(blocks) for blocks in blocks_of(loader)]
    )
    mean = float(torch.stack(losses).mean())
    if not np.isfinite(mean):
        raise ValueError("a loss is not finite")
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ranks_option(parser)
    parser.add_argument("--batches", type=int, default=10_000, help="of each rank")
    parser.add_argument("--every", type=int, default=500, help="batches between looks")
    parser.add_argument("--batch", type=int, default=1024, help="seeds of a mini-batch")
    parser.add_argument("--nodes", type=int, default=4_000_000)
    parser.add_argument("--edges", type=int, default=64_000_000)
    parser.add_argument("--captured", action="store_true", help="steps as CUDA graphs")
    parser.add_argument("--limit", type=float, default=1.0, help="MB in 1,000 batches")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    seeds = options.every * options.batch * options.ranks
    if seeds > options.nodes:
        parser.error(f"a pass takes {seeds} distinct seeds: say --nodes {seeds} or more")
    if options.batches < 2 * _FEWEST * options.every:
        parser.error(f"half of the batches are to be {_FEWEST} times --every, or more")
    new_report(options)
    launch(work, options.ranks, options)


if __name__ == "__main__":
    main()

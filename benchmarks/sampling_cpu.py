"""Claim: sampling all hops of a mini-batch on the CPU is at least as fast as DGL's own C++.

Peers, in the same process, on the same graph, seeds and number of threads, in turns:

- ``dgl``: ``dgl.sampling.sample_neighbors`` and ``dgl.to_block`` for each hop;
- ``dgl fused``: the fused sampler that DGL's ``NeighborSampler`` uses on CPU;
- ``ours``: ``dgl_mgpu.ops.sample_blocks``; and the same over four partitions.

No speed is reported unless our blocks are right.

    python -m benchmarks.sampling_cpu --out sampling.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl_mgpu  # noqa: F401  (makes DGL importable)

import dgl  # isort: skip
import numpy as np
import torch

from benchmarks.machine import describe_machine
from dgl_mgpu.ops import GraphView, SampledBlock, SampleKey, sample_blocks


def power_law_csc(num_nodes: int, num_edges: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``indptr`` and ``indices`` of a graph whose degrees follow a power law at both ends."""
    random = np.random.default_rng(seed)
    rank = random.permutation(num_nodes)
    ends = [rank[(num_nodes * random.random(num_edges) ** 2.5).astype(np.int64)] for _ in range(2)]
    order = np.argsort(ends[0], kind="stable")
    degrees = np.bincount(ends[0], minlength=num_nodes)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    return torch.from_numpy(indptr), torch.from_numpy(ends[1][order])


def partitioned_view(indptr: torch.Tensor, indices: torch.Tensor, parts: int) -> GraphView:
    """View of a graph whose nodes are dealt out modulo over ``parts`` segments."""
    degrees = indptr.diff()
    num_nodes = len(degrees)
    owner, pointers = [], []
    for part in range(parts):
        mine = degrees[part::parts]
        local = torch.zeros(len(mine) + 1, dtype=torch.int64)
        torch.cumsum(mine, 0, out=local[1:])
        shift = torch.repeat_interleave(indptr[:-1][part::parts] - local[:-1], mine)
        eids = torch.arange(len(shift)) + shift
        segment = [local, indices[eids], eids]
        owner.append(segment)
        addresses = [tensor.data_ptr() for tensor in segment]
        pointers.append([*addresses[:2], 0] if parts == 1 else addresses)
    return GraphView(
        tiers=torch.tensor([[0, num_nodes, parts, 0]]),
        pointers=torch.tensor(pointers),
        num_rows=num_nodes,
        num_cols=num_nodes,
        num_edges=len(indices),
        idtype=indices.dtype,
        owner=owner,
    )


def check(
    blocks: list[SampledBlock], indptr: torch.Tensor, indices: torch.Tensor, fanouts: list[int]
) -> None:
    """Raise ValueError unless each block is a sample without replacement, relabelled."""
    for block, fanout in zip(blocks, fanouts, strict=True):
        sizes = block.indptr.diff().long()
        dst = torch.repeat_interleave(block.src_nodes[: block.num_dst], sizes)
        degrees = indptr.diff()[block.src_nodes[: block.num_dst]]
        right = {
            "number of edges": torch.equal(sizes, degrees.long().clamp(max=fanout)),
            "source nodes": torch.equal(block.src_nodes[block.src], indices[block.eids]),
            "destination nodes": bool(
                ((indptr[dst] <= block.eids) & (block.eids < indptr[dst + 1])).all()
            ),
            "distinct edges": len(block.eids.unique()) == len(block.eids),
            "distinct nodes": len(block.src_nodes.unique()) == len(block.src_nodes),
        }
        if wrong := [name for name, holds in right.items() if not holds]:
            raise ValueError(f"fanout {fanout}: wrong {', '.join(wrong)}")


def measure(
    contenders: dict[str, Callable[[torch.Tensor, int], int]],
    batches: list[torch.Tensor],
    pause: float,
) -> dict[str, list[float]]:
    """Seconds for each batch after the first, contenders in turns, order rotating.

    ``pause`` lets OpenMP's spinning threads of one contender go to sleep before the next.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number, seeds in enumerate(batches):
        for turn in range(len(names)):
            name = names[(turn + number) % len(names)]
            time.sleep(pause)
            begin = time.perf_counter()
            contenders[name](seeds, number)
            if number > 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--edges", type=int, default=30_000_000)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between turns")
    parser.add_argument("--out", type=Path, help="write the result here, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dgl.utils.set_num_threads(options.threads)

    indptr, indices = power_law_csc(options.nodes, options.edges, seed=0)
    view, parts = partitioned_view(indptr, indices, 1), partitioned_view(indptr, indices, 4)
    no_ids = torch.empty(0, dtype=torch.int64)
    graph = dgl.graph(("csc", (indptr, indices, no_ids)), num_nodes=options.nodes)
    graph = graph.formats(["csc"])
    # DGL's order, the layer nearest the input first; hops run from the last to the first.
    fanouts = options.fanouts
    plain = dgl.dataloading.NeighborSampler(fanouts, fused=False)
    fused = dgl.dataloading.NeighborSampler(fanouts, fused=True)
    contenders: dict[str, Callable[[torch.Tensor, int], int]] = {
        "dgl": lambda seeds, _: len(plain.sample_blocks(graph, seeds)[0]),
        "dgl fused": lambda seeds, _: len(fused.sample_blocks(graph, seeds)[0]),
        "ours": lambda seeds, batch: len(
            sample_blocks(view, seeds, fanouts, SampleKey(0, batch=batch))[0].src_nodes
        ),
        "ours, 4 partitions": lambda seeds, batch: len(
            sample_blocks(parts, seeds, fanouts, SampleKey(0, batch=batch))[0].src_nodes
        ),
    }
    order = torch.randperm(options.nodes, generator=torch.Generator().manual_seed(0))
    batches = list(order[: options.batch * (options.repeats + 1)].split(options.batch))

    blocks = sample_blocks(view, batches[0], fanouts, SampleKey(0))
    check(blocks, indptr, indices, fanouts)
    for mine, other in zip(
        blocks, sample_blocks(parts, batches[0], fanouts, SampleKey(0)), strict=True
    ):
        if not all(torch.equal(a, b) for a, b in zip(mine[:4], other[:4], strict=True)):
            raise ValueError("four partitions give another sample")

    seconds = measure(contenders, batches, options.pause)
    edges = sum(len(block.src) for block in blocks)
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "threads": options.threads,
        "nodes": options.nodes,
        "edges": options.edges,
        "fanouts": fanouts,
        "batch": options.batch,
        "sampled_edges": edges,
        "input_nodes": len(blocks[0].src_nodes),
        "milliseconds": {name: float(np.median(s)) * 1e3 for name, s in seconds.items()},
        "best_milliseconds": {name: min(s) * 1e3 for name, s in seconds.items()},
        "ratio_to_dgl": {
            name: float(np.median(np.array(seconds["dgl"]) / s)) for name, s in seconds.items()
        },
        "ratio_to_dgl_fused": {
            name: float(np.median(np.array(seconds["dgl fused"]) / s))
            for name, s in seconds.items()
        },
        "samples": seconds,
    }
    print(f"{edges} edges, {result['input_nodes']} input nodes, {options.threads} threads")
    print(f"{'':20} median ms  best ms  x dgl  x dgl fused  (medians of ratios, batch by batch)")
    columns = ("milliseconds", "best_milliseconds", "ratio_to_dgl", "ratio_to_dgl_fused")
    for name in contenders:
        median, best, ratio, ratio_fused = (result[column][name] for column in columns)
        print(f"{name:20} {median:9.2f} {best:8.2f} {ratio:6.2f} {ratio_fused:12.2f}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

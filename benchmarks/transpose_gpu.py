"""Claim: a block is transposed in a tenth of a sort's host time, and in no more of the GPU's.

Blocks are like those of mini-batches: up to 10 in-edges a destination, sources drawn by a power law
and numbered as they are found. In the last cases one source has all edges, the most uneven there
can be. Each result is first compared with torch's stable sort, which is the way that graphs of more
edges go: `Relation.coo` and `compress`. Host time is that of a call until it returns; the GPU's is
taken of calls that were all queued before the first of them ran.

    python -m benchmarks.transpose_gpu --out transpose.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import host_time, this_device
from benchmarks.machine import describe_machine
from dgl_mgpu.graph.relation import Compressed, Relation, compress
from dgl_mgpu.ops.transpose import transpose

SIZES = (15_000, 150_000, 1_000_000, 4_000_000)
FANOUT = 10
#: Of the power law: the share of edges that the first x of the nodes have is x ** (1 - 1 / s).
EXPONENT = 1.5
#: Calls that are queued together, and for how many of its cycles the GPU is kept from them.
QUEUED, CYCLES = 20, 100_000_000
#: What part of the sort's host time is to be reached, and of the GPU's.
HOST_AIM, GPU_AIM = 0.1, 1.0


@dataclass(frozen=True)
class Case:
    """A block to be transposed."""

    edges: int
    idtype: torch.dtype
    one_source: bool = False

    @property
    def name(self) -> str:
        """As in ``150000 edges int32``."""
        idtype = str(self.idtype).removeprefix("torch.")
        return f"{self.edges} edges {idtype}" + ", one source" * self.one_source

    def block(self, device: torch.device) -> tuple[Compressed, int]:
        """Its CSC and the number of sources."""
        draw = torch.Generator(device).manual_seed(0)

        def uniform(count: int) -> torch.Tensor:
            return torch.rand(count, generator=draw, device=device, dtype=torch.float64)

        degrees = (uniform(2 * self.edges // FANOUT) * (FANOUT + 1)).long()
        indptr = torch.zeros(len(degrees) + 1, dtype=torch.int64, device=device)
        torch.cumsum(degrees, 0, out=indptr[1:])
        count = int(indptr[-1])
        nodes = (10 * self.edges * uniform(count) ** (EXPONENT / (EXPONENT - 1))).long()
        found, sources = torch.unique(nodes, return_inverse=True)
        # Numbers are in no order of how many edges a source has.
        shuffled = torch.randperm(len(found), generator=draw, device=device)
        sources = torch.full_like(sources, 7) if self.one_source else shuffled[sources]
        return Compressed(indptr.to(self.idtype), sources.to(self.idtype), None), len(found)


def cases() -> Iterator[Case]:
    """All that is timed."""
    for idtype in (torch.int32, torch.int64):
        for edges in SIZES:
            yield Case(edges, idtype)
    for edges in SIZES:
        yield Case(edges, torch.int32, one_source=True)


def by_sorting(block: Compressed, num_src: int) -> Compressed:
    """The way that graphs of more edges go."""
    coo = Relation(num_src, block.indptr.numel() - 1, csc=block).coo()
    return compress(coo.row, coo.col, num_src, may_be_sorted=False)


def gpu_time(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of the GPU for a call; without a GPU, of the processor."""
    if device.type == "cpu":
        return host_time(call, QUEUED)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    start.record()
    for _ in range(QUEUED):
        call()
    if start.query():
        raise RuntimeError("the GPU has run before all calls were queued; raise CYCLES")
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / QUEUED * 1e3


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Times of one case, in microseconds."""
    device = this_device()
    block, num_src = case.block(device)
    contenders: dict[str, Callable[[], Any]] = {
        "ours": partial(transpose, *block, num_src),
        "sort": partial(by_sorting, block, num_src),
    }
    for name, found, expected in zip(
        ("indptr", "indices", "eids"), *(call() for call in contenders.values()), strict=True
    ):
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            raise ValueError(f"{case.name}: {name} is wrong")
    figure: dict[str, Any] = {
        "case": case.name,
        "edges": len(block.indices),
        "sources": num_src,
        "destinations": len(block.indptr) - 1,
        "longest": int(block.indices.bincount().max()),
    }
    spent: dict[str, list[float]] = {}
    for _ in range(repeats):  # in turns
        for name, call in contenders.items():
            # Few calls at a time, so that none waits for room in the queue.
            spent.setdefault(f"{name}_host", []).append(host_time(call, QUEUED))
            spent.setdefault(f"{name}_gpu", []).append(gpu_time(call, device))
    figure |= {f"{name}_us": float(np.median(each)) for name, each in spent.items()}
    figure["reached"] = (
        figure["ours_host_us"] <= HOST_AIM * figure["sort_host_us"]
        and figure["ours_gpu_us"] <= GPU_AIM * figure["sort_gpu_us"]
    )
    return figure | {"each_us": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10, help="timed windows")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    content: dict[str, Any] = {
        "machine": describe_machine(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "figures": [],
    }
    print(f"{'':32} {'longest':>8} {'host, us':>8} {'sort':>8} {'GPU, us':>8} {'sort':>8}  reached")
    for case in cases():
        figure = measure(case, options.repeats)
        times = (
            figure[f"{name}_us"] for name in ("ours_host", "sort_host", "ours_gpu", "sort_gpu")
        )
        columns = " ".join(f"{each:8.1f}" for each in times)
        verdict = "yes" if figure["reached"] else "no"
        print(f"{case.name:32} {figure['longest']:8} {columns}  {verdict}", flush=True)
        content["figures"].append(figure)
        if options.out:
            # Anew each time: a run that is cut off leaves what it has found.
            options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

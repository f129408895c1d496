"""Claim: memory of a layer on a partitioned graph does not grow with the ranks, and time shrinks.

The graph has the size of ogbn-products, in-degrees from a Pareto distribution of exponent 1.5 and
sources drawn uniformly; nodes are dealt out at random, so that a rank's halo is nearly all nodes of
the others.  Forward and backward passes of DGL's layers, unmodified, on 1, 2, 4, ... ranks with a
GPU each.  Outputs are compared with one rank's.  Memory is the peak of torch's allocator and what a
rank lends to others; a *buffer* is an output row for each of a rank's own nodes.

    python -m benchmarks.partitioned_gpu --ranks 1 2 4 --out partitioned.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.fullgraph import (
    SHAPES,
    Job,
    column,
    common_options,
    graph_of,
    new_report,
    random_rows,
    rank_counts_option,
)
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.train.launch.launch import launch

import dgl.nn  # isort: skip

#: Rows that are compared with one rank's, and how far off they may be of the largest.
_COMPARED, _TOLERANCE = 1000, 1e-4


class Case(NamedTuple):
    """A layer of 100 features, and the numbers of an output row."""

    layer: Callable[[], nn.Module]
    width: int


CASES = {
    "GATConv 4 x 64": Case(lambda: dgl.nn.GATConv(100, 64, 4, allow_zero_in_degree=True), 256),
    "GATv2Conv 4 x 16": Case(lambda: dgl.nn.GATv2Conv(100, 16, 4, allow_zero_in_degree=True), 64),
    "DotGatConv 4 x 64": Case(
        lambda: dgl.nn.DotGatConv(100, 64, 4, allow_zero_in_degree=True), 256
    ),
    "GraphConv 256": Case(lambda: dgl.nn.GraphConv(100, 256, allow_zero_in_degree=True), 256),
    "SAGEConv 256, mean": Case(lambda: dgl.nn.SAGEConv(100, 256, "mean"), 256),
    "SAGEConv 256, pool": Case(lambda: dgl.nn.SAGEConv(100, 256, "pool"), 256),
    "GINConv 100, max": Case(lambda: dgl.nn.GINConv(nn.Linear(100, 256), "max"), 256),
}


class Bench:
    """What one rank measures, together with the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._job = job = Job(options)
        self._shape = SHAPES["products"].scaled(options.scale)
        indptr, indices = self._shape.csc(job.device)
        self._graph, _ = job.partition(graph_of(indptr, indices), exchange="auto", repeats=1)
        del indptr, indices
        self._nodes = self._graph.ndata[dgl.NID].long()
        self._features = random_rows(self._nodes, self._shape.features) - 0.5
        sample = torch.arange(0, self._shape.nodes, -(-self._shape.nodes // _COMPARED))
        #: Own rows that are compared, and their nodes' places among all that are.
        self._own = torch.isin(self._nodes.cpu(), sample).nonzero().squeeze(1)
        self._places = torch.searchsorted(sample, self._nodes.cpu()[self._own])
        self._num_compared = len(sample)

    def run(self) -> None:
        """Print every case and keep it in a file."""
        job = self._job
        job.say(f"{'':20} ranks       ms   of one    peak GB  buffers  of one rank's share")
        for name, case in CASES.items():
            if not job.options.only or any(part in name for part in job.options.only):
                self._measure(name, case)

    def _measure(self, name: str, case: Case) -> None:
        job, options = self._job, self._job.options
        torch.manual_seed(0)
        layer = case.layer().to(job.device)
        grad = random_rows(self._nodes, case.width) - 0.5
        compared = self._rows_compared(layer, grad)
        gc.collect()
        if job.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        spent = []
        for _ in range(options.warm_up + options.repeats):
            job.wait()
            spent.append(self._timed(layer, grad))
        # Of the slowest rank, in each turn.
        slowest = [max(turn) for turn in zip(*job.ranks.all_gather(spent), strict=True)]
        peak = torch.cuda.max_memory_allocated() if job.device.type == "cuda" else 0
        lent = _lent_bytes(self._graph)
        peaks = job.ranks.all_gather((peak, lent))
        most = max(sum(it) for it in peaks)
        buffer = max(job.ranks.all_gather(len(self._nodes))) * case.width * 4
        milliseconds = 1e3 * statistics.median(slowest[options.warm_up :])
        one = self._of_one_rank(name)
        share = None if one is None else one["peak_bytes"] / job.ranks.size
        figure: dict[str, Any] = {
            "case": name,
            "ms": milliseconds,
            "all_ms": [1e3 * it for it in slowest[options.warm_up :]],
            "peak_bytes": most,
            "each_peak_and_lent_bytes": peaks,
            "buffer_bytes": buffer,
            "compared": compared,
        }
        if one is not None and share is not None:
            figure["speedup"] = one["ms"] / milliseconds
            if peak:
                figure["of_share"] = most / share
                figure["of_aim"] = most / (1.3 * share + 2 * buffer)
            self._check(name, compared, one["compared"])
        job.say(
            f"{name:20} {job.ranks.size:5} {milliseconds:8.1f} {column(figure.get('speedup'), 8)}"
            f" {most / 1e9:10.2f} {most / buffer:8.1f} {column(figure.get('of_share'), 12)}"
        )
        job.keep(**figure)

    def _timed(self, layer: nn.Module, grad: Tensor) -> float:
        layer.zero_grad()
        if self._job.device.type != "cuda":
            begin = time.perf_counter()
            self._step(layer, grad)
            return time.perf_counter() - begin
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._step(layer, grad)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def _step(self, layer: nn.Module, grad: Tensor) -> Tensor:
        out: Tensor = layer(self._graph, self._features)
        out.backward(grad.view(out.shape))
        return out.detach()

    def _rows_compared(self, layer: nn.Module, grad: Tensor) -> list[float]:
        """The sample's rows, each as one number; and the sums of the parameters' gradients."""
        out = self._step(layer, grad).flatten(1).double().cpu()
        rows = torch.zeros(self._num_compared, dtype=torch.float64)
        rows[self._places] = out[self._own].sum(1)
        gradients = torch.stack([it.grad.double().sum().cpu() for it in layer.parameters()])
        mine = torch.cat([rows, gradients])
        total: Tensor = sum(self._job.ranks.all_gather(mine), torch.zeros_like(mine))
        return total.tolist()

    def _of_one_rank(self, name: str) -> dict[str, Any] | None:
        for figure in self._job.content["figures"]:
            if figure["ranks"] == 1 != self._job.ranks.size and figure["case"] == name:
                return figure
        return None

    def _check(self, name: str, found: list[float], expected: list[float]) -> None:
        one, other = torch.tensor([found, expected], dtype=torch.float64)
        of_rows = (one - other)[: self._num_compared].abs().max()
        if of_rows > _TOLERANCE * other[: self._num_compared].abs().max():
            raise ValueError(f"{name}: rows are others than on one rank, by {float(of_rows)}")
        size = other[self._num_compared :].abs().max()
        of_sums = (one - other)[self._num_compared :].abs().max()
        if of_sums > 10 * _TOLERANCE * size:
            raise ValueError(f"{name}: gradients are others than on one rank, by {float(of_sums)}")


def _lent_bytes(graph: PartitionedGraph) -> int:
    """What a rank lends to the others' GPUs, which torch's allocator does not count."""
    window = getattr(graph._graph.parts[0].halo._rounds, "_window", None)
    return 0 if window is None else 2 * window._bytes


def _run(options: argparse.Namespace) -> None:
    Bench(options).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rank_counts_option(parser)
    parser.add_argument("--only", nargs="+", default=[], help="parts of cases' names")
    parser.add_argument("--warm-up", type=int, default=40, help="turns, in which ways are tried")
    common_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # What is compared with one rank's rows is read from there.
        options.out = options.out or Path(folder) / "found.json"
        new_report(options)
        for count in options.ranks:
            launch(_run, count, options)
        report = json.loads(options.out.read_text())
        for figure in report["figures"]:
            del figure["compared"]
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

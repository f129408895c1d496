"""Claim: a GCN on several GPUs trains faster than MG-GCN and than GraphConv, in few buffers.

MG-GCN's models (section 6.1) on generated graphs of its data sets' sizes: two layers, hidden width
512, on ogbn-products', Reddit's, arxiv's and Cora's (as its table 1 has it), and on arxiv's nodes
with up to 128 times the edges (figure 9); three layers, hidden width 208, on ogbn-papers100M's; and
DistGNN's models (table 3).  In-degrees are from a Pareto distribution, sources drawn uniformly,
nodes dealt out at random.  An epoch is a forward pass, the loss over all nodes, the backward pass,
the sum of gradients over ranks and a step of Adam.  In the same run and on the same partitioned
graph: GCN as it is, with the sums of its input kept, and ``dgl.nn.GraphConv``, on several GPUs also
with rows exchanged as CAGNET does it (``InTurns``); for the models with an aim also in bfloat16 and
with products in tf32.  The loss and all gradients are compared first, with GraphConv in float32;
where one model fills the memory, on a graph of a hundredth of the size.
Losses on other numbers of ranks, one after the other in the same run, are compared as well.

A buffer is a row of hidden width for each of the rank's nodes, in float32.

    python -m benchmarks.gcn_gpu --ranks 1 2 4 8 --out gcn.json
    python -m benchmarks.gcn_gpu --shapes "products, 3 of 256" "reddit, 2 of 16" --out table3.json
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.fullgraph import (
    Job,
    column,
    common_options,
    graph_of,
    new_report,
    rank_counts_option,
)
from benchmarks.gcn_cases import CASES, Case
from benchmarks.gcn_training import ONE_D, PEER, Setting, Training, gradients_of, tolerance_of
from benchmarks.gpu import measure
from dgl_mgpu.train.launch.launch import launch

#: How many ranks aims are for, and how much faster than one they are to be.
AIMED_RANKS, AIMED_SPEEDUP = 8, 7.0
#: Epochs in a timed window, if they are short and if they are long; the first and the last are not
#: timed.
_WINDOW, _SHORT_WINDOW = 12, 4
#: Of a graph that fills memory, what gradients are compared on.
_SMALL = 0.01
#: Bytes that an edge takes of its rank while a model trains: ids, both formats, what sorts them.
_EDGE_BYTES = 48


@dataclass
class TuningCache:
    """Of each contender: the loss before training, errors, the peak of memory, and times."""

    losses: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    #: Bytes of torch's allocator, of an epoch alone and with all that is there before.
    epoch_bytes: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, float] = field(default_factory=dict)
    each_rank_s: dict[str, list[float]] = field(default_factory=dict)
    samples: dict[str, list[list[float]]] = field(default_factory=dict)
    #: What of the GPU's memory is taken: also what the allocator keeps, and what is not its own.
    device_bytes: float = 0.0

    @property
    def slowest_ms(self) -> dict[str, float]:
        return {name: 1e3 * max(seconds) for name, seconds in self.each_rank_s.items()}


class Bench:
    """What one rank measures, together with the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._job = Job(options)

    def run(self) -> None:
        """Print every figure and keep it in a file."""
        for name in self._job.options.shapes:
            case = CASES[name].scaled(self._job.options.scale)
            if self._fits(case):
                self._measure(name, case)
            else:
                self._job.say(f"{name}: too large for {self._job.ranks.size} ranks")
            gc.collect()  # models and graphs refer to each other
            if self._job.device.type == "cuda":
                torch.cuda.empty_cache()  # also for other processes: one rank runs in the first

    def _fits(self, case: Case) -> bool:
        """Whether a rank has room for L + 3 buffers, features, the loss's rows, and edges."""
        if self._job.device.type != "cuda":
            return True
        shape = case.shape
        columns = shape.features + (case.layers + 3) * case.hidden + 2 * shape.classes
        needed = (4 * columns * shape.nodes + _EDGE_BYTES * shape.edges) / self._job.ranks.size
        return all(self._job.ranks.all_gather(needed < torch.cuda.mem_get_info()[0]))

    def _measure(self, name: str, case: Case) -> None:
        names = tuple(each for each in case.contenders if each != ONE_D or self._job.ranks.size > 1)
        findings = TuningCache()
        if case.fills_memory:
            small, _ = self._setting(case.scaled(_SMALL))
            self._compare({each: small.training(each) for each in names}, findings)
            del small
            names = tuple(each for each in names if each.startswith("GCN"))
        setting, spent = self._setting(case)
        window = [None] * (_SHORT_WINDOW if case.fills_memory else _WINDOW)
        for together in [[each] for each in names] if case.fills_memory else [names]:
            trainings = {each: setting.training(each) for each in together}
            if not case.fills_memory:
                self._compare(trainings, findings)
            for each, training in trainings.items():
                findings.losses[each] = float(training.gradients())
                self._peak(each, training, findings)
            medians, samples = measure(
                {each: training.epoch for each, training in trainings.items()},
                lambda _: window,
                self._job.options.repeats,
                self._job.ranks,
            )
            findings.each_rank_s |= medians
            findings.samples |= samples
            findings.device_bytes = max(findings.device_bytes, self._device_bytes())
        self._require_same_losses(name, findings.losses)
        buffer = max(self._job.ranks.all_gather(len(setting.x))) * case.hidden * 4
        self._keep(name, case, findings, buffer, spent)

    def _setting(self, case: Case) -> tuple[Setting, list[float]]:
        """This rank's part, and the seconds to partition the graph, which all ranks make."""
        g = graph_of(*case.shape.csc(self._job.device))
        exchange = self._job.options.exchange or case.exchange
        pg, spent = self._job.partition(g, exchange, repeats=1 if case.fills_memory else 3)
        del g  # before rows take the room
        return Setting.of(pg, case.shape, case.widths), spent

    def _compare(self, trainings: Mapping[str, Training], findings: TuningCache) -> None:
        """Raise ValueError where losses or gradients are too far from the peer's, the first."""
        wanted: list[torch.Tensor] = []
        for name, each in trainings.items():
            found = [each.gradients(), *gradients_of(each.model)]
            wanted = wanted or [tensor.double() for tensor in found]
            findings.errors[name] = error = max(
                float((tensor - right).norm() / right.norm())
                for tensor, right in zip(found, wanted, strict=True)
            )
            if not error <= tolerance_of(name):
                raise ValueError(f"widths {each.on.widths}: {name} is off by {error:.1e}")

    def _require_same_losses(self, name: str, losses: Mapping[str, float]) -> None:
        """Raise ValueError where all contenders and numbers of ranks have not the same loss."""
        figures = self._job.content["figures"]
        before = [figure["losses"] for figure in figures if figure["shape"] == name]
        right = next(iter((before or [losses])[0].values()))
        for contender, loss in losses.items():
            if not abs(loss - right) <= tolerance_of(contender) * abs(right):
                raise ValueError(f"{name}: {contender} has a loss of {loss}, not {right}")

    def _peak(self, name: str, training: Training, findings: TuningCache) -> None:
        """Bytes that torch's allocator gives out at most, on the worst rank."""
        training.epoch()
        if self._job.device.type != "cuda":
            return
        self._job.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        training.epoch()
        self._job.wait()
        peak = torch.cuda.max_memory_allocated()
        for found, size in ((findings.epoch_bytes, peak - before), (findings.peak_bytes, peak)):
            found[name] = max(self._job.ranks.all_gather(float(size)))

    def _device_bytes(self) -> float:
        """Bytes taken of the fullest GPU."""
        if self._job.device.type != "cuda":
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return max(self._job.ranks.all_gather(float(total - free)))

    def _keep(
        self, name: str, case: Case, findings: TuningCache, buffer: int, partitioning: list[float]
    ) -> None:
        ranks, slowest = self._job.ranks.size, findings.slowest_ms
        alone: dict[str, float] = next(
            (
                figure["slowest_ms"]
                for figure in self._job.content["figures"]
                if figure["shape"] == name and figure["ranks"] == 1
            ),
            {},
        )
        speedups = {each: alone[each] / spent for each, spent in slowest.items() if each in alone}
        mg_gcn = dict(zip(("fp32", "tf32"), case.mg_gcn_ms.get(ranks, ()), strict=False))
        best = min(
            (each for each in slowest if each.startswith("GCN") and "bf16" not in each),
            key=slowest.__getitem__,
        )
        on_a100 = case.mg_gcn_a100_ms.get(ranks)
        aim = case.aim_ms if ranks == AIMED_RANKS else None
        self._job.say(
            f"{name}, widths {case.widths}, {ranks} ranks; MG-GCN, ms: on H200s {mg_gcn or '-'}, on"
            f" A100s {on_a100 or '-'}; aim for {AIMED_RANKS}: {case.aim_ms or '-'}\n"
            f"  {'':26} ms an epoch  times 1 rank  times {PEER}  buffers  peak GB  error"
        )
        for each, spent in slowest.items():
            columns = (
                column(spent, 11),
                column(speedups.get(each), 13),
                column(slowest[PEER] / spent if PEER in slowest else None, 21),
                column(_over(findings.epoch_bytes.get(each), buffer), 8),
                column(_over(findings.peak_bytes.get(each), 1e9), 8, ".1f"),
                column(findings.errors[each], 6, ".0e"),
            )
            self._job.say(f"  {each:26} {' '.join(columns)}")
        self._job.keep(
            shape=name,
            nodes=case.shape.nodes,
            edges=case.shape.edges,
            widths=case.widths,
            best=best,
            ours_ms=slowest[best],
            aim_ms=case.aim_ms,
            reached=None if aim is None else slowest[best] <= aim,
            times_one_rank=speedups,
            reached_speedup=speedups[best] >= AIMED_SPEEDUP if aim and speedups else None,
            mg_gcn_ms=mg_gcn,
            mg_gcn_a100_ms=on_a100,
            mg_gcn_8_a100_ms=case.mg_gcn_a100_ms.get(8),
            slowest_ms=slowest,
            buffer_bytes=buffer,
            epoch_bytes=findings.epoch_bytes,
            peak_bytes=findings.peak_bytes,
            device_bytes=findings.device_bytes,
            losses=findings.losses,
            errors=findings.errors,
            partition_s=statistics.median(partitioning),
            each_partition_s=partitioning,
            each_rank_s=findings.each_rank_s,
            samples=findings.samples,
        )


def _over(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _run(options: argparse.Namespace) -> None:
    Bench(options).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rank_counts_option(parser)
    parser.add_argument("--shapes", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--exchange", help="of partition_graph, for all shapes")
    common_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # What is compared with the figures of fewer ranks is read from there.
        options.out = options.out or Path(folder) / "found.json"
        new_report(options)
        for count in options.ranks:
            launch(_run, count, options)


if __name__ == "__main__":
    main()

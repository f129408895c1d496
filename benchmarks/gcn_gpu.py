"""Claim: a GCN on several GPUs trains faster than MG-GCN and than GraphConv, in L + 3 buffers.

MG-GCN's models (section 6.1): two layers, hidden width 512, on graphs of ogbn-products' and
Reddit's size; three layers, hidden width 208, on one of ogbn-papers100M's.  In-degrees are from a
Pareto distribution, sources drawn uniformly, nodes dealt out at random.  An epoch is a forward
pass, the loss over all nodes, the backward pass, the sum of gradients over ranks and a step of
Adam.  In the same run and on the same partitioned graph: GCN as it is, with the sums of its input
kept, and in bfloat16, and ``dgl.nn.GraphConv``; products in float32 and in tf32.  The loss and all
gradients are compared first, with GraphConv in float32; for papers100M's size, at a hundredth of
it.  Losses on other numbers of ranks, one after the other in the same run, are compared as well.

A buffer is a row of hidden width for each of the rank's nodes, in float32.

    python -m benchmarks.gcn_gpu --ranks 1 2 4 8 --out gcn.json
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.nn import GraphConv  # isort: skip

from benchmarks.fullgraph import (
    SHAPES,
    Job,
    Shape,
    column,
    common_options,
    graph_of,
    new_report,
    random_rows,
)
from benchmarks.gpu import measure
from dgl_mgpu.fullgraph.gcn import GCN
from dgl_mgpu.training.launch import launch


@dataclass(frozen=True)
class Case:
    """What is trained on a graph of some shape.

    Attributes
    ----------
    hidden, layers : int
    aim_ms : float
        For an epoch on 8 GPUs, rows being kept in float32.
    mg_gcn_ms : dict
        What MG-GCN's own code took on H200s, by number of GPUs: products in float32, and in tf32.
    mg_gcn_a100_ms : float or None
        What it took on 8 A100s (section 6.5).
    exchange : str
        Of partition_graph.
    fills_memory : bool
        Whether one model at a time fits in GPUs, and GraphConv does not.
    """

    hidden: int
    layers: int
    aim_ms: float
    mg_gcn_ms: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    mg_gcn_a100_ms: float | None = None
    exchange: str = "halo"
    fills_memory: bool = False

    def widths(self, shape: Shape) -> tuple[int, ...]:
        return (shape.features, *[self.hidden] * (self.layers - 1), shape.classes)


CASES = {
    "products": Case(512, 2, 9.0, {1: (80.2, 67.3), 4: (23.4, 19.5), 8: (14.9, 13.0)}),
    "reddit": Case(512, 2, 6.3, {1: (65.8, 60.6), 4: (13.8, 12.4), 8: (9.5, 9.4)}),
    # A halo has most nodes of all ranks: only a broadcast never has more than two ranks' rows.
    "papers100M": Case(
        208, 3, 1000.0, mg_gcn_a100_ms=2890.0, exchange="broadcast", fills_memory=True
    ),
}
#: How many ranks aims are for, and how much faster than one they are to be.
AIMED_RANKS, AIMED_SPEEDUP = 8, 7.0
#: The largest errors of the loss and of gradients, relative to their size.
TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}
_PEER, _KEPT = "GraphConv fp32", ", input sums kept"
#: Epochs in a timed window, if they are short and if they are long; the first and the last are not
#: timed.
_WINDOW, _SHORT_WINDOW = 12, 4
#: Of a graph that fills memory, what gradients are compared on.
_SMALL = 0.01


class Stack(torch.nn.Module):
    """What a user of DGL writes."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            GraphConv(*ends, allow_zero_in_degree=True) for ends in pairwise(widths)
        )

    def forward(self, g: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(g, torch.relu(x) if number else x)
        return x


@dataclass
class Setting:
    """A rank's part of a graph, and what is trained on it.

    Attributes
    ----------
    num_nodes : int
        Of the whole graph.
    """

    g: dgl.DGLGraph
    x: torch.Tensor
    labels: torch.Tensor
    num_nodes: int
    widths: tuple[int, ...]

    def training(self, name: str) -> Training:
        """A contender: one of :func:`_contenders`."""
        kind, precision = name.removesuffix(_KEPT).split()
        torch.manual_seed(0)
        model: torch.nn.Module = Stack(self.widths)
        if kind == "GCN":
            start = model.state_dict()
            model = GCN(
                self.widths,
                keep_input_sums=name.endswith(_KEPT),
                activation_dtype=torch.bfloat16 if precision == "bf16" else None,
                allow_zero_in_degree=True,
            )
            model.load_state_dict(start)
        return Training(model.to(self.x.device), precision, self)


def _contenders() -> list[str]:
    ours = [f"GCN {precision}{kept}" for precision in TOLERANCES for kept in ("", _KEPT)]
    return [_PEER, "GraphConv tf32", *ours]


class Training:
    """A model that trains on a rank's part of a graph.

    Parameters
    ----------
    model : Module
    precision : {'fp32', 'tf32', 'bf16'}
        Of dense products.
    on : Setting
    """

    def __init__(self, model: torch.nn.Module, precision: str, on: Setting) -> None:
        self.model, self.precision, self.on = model, precision, on
        self._x = on.x.bfloat16() if precision == "bf16" else on.x
        self._optimizer = torch.optim.Adam(
            model.parameters(), lr=1e-3, fused=on.x.device.type == "cuda"
        )

    def gradients(self) -> torch.Tensor:
        """The loss of all ranks' nodes, detached; parameters have the gradients of all ranks."""
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        self._optimizer.zero_grad(set_to_none=True)
        out = self.model(self.on.g, self._x)
        loss = functional.cross_entropy(out.float(), self.on.labels, reduction="sum")
        loss = loss / self.on.num_nodes
        del out
        loss.backward()
        total = loss.detach()
        if dist.is_initialized():
            found = _gradients(self.model)
            flat = torch.cat([total.view(1), *(each.flatten() for each in found)])
            dist.all_reduce(flat)
            total, *summed = flat.split([1, *(each.numel() for each in found)])
            for each, sums in zip(found, summed, strict=True):
                each.copy_(sums.view_as(each))
        return total.view(1)

    def epoch(self, _: Any = None) -> None:
        """Train once over all nodes."""
        self.gradients()
        self._optimizer.step()


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Of the parameters, which all have one."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@dataclass
class Findings:
    """Of each contender: the loss before training, errors, the peak of memory, and times."""

    losses: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    #: Bytes of torch's allocator, of an epoch alone and with all that is there before.
    epoch_bytes: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, float] = field(default_factory=dict)
    each_rank_s: dict[str, list[float]] = field(default_factory=dict)
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
            shape, case = SHAPES[name].scaled(self._job.options.scale), CASES[name]
            if self._fits(shape, case):
                self._measure(name, shape, case)
            else:
                self._job.say(f"{name}: too large for {self._job.ranks.size} ranks")
            gc.collect()  # models and graphs refer to each other
            if self._job.device.type == "cuda":
                torch.cuda.empty_cache()  # also for other processes: one rank runs in the first

    def _fits(self, shape: Shape, case: Case) -> bool:
        """Whether a rank has room for L + 3 buffers, its features, and the loss's rows."""
        if self._job.device.type != "cuda":
            return True
        columns = shape.features + (case.layers + 3) * case.hidden + 2 * shape.classes
        needed = 4 * columns * shape.nodes / self._job.ranks.size
        return all(self._job.ranks.all_gather(needed < torch.cuda.mem_get_info()[0]))

    def _measure(self, name: str, shape: Shape, case: Case) -> None:
        names = _contenders()
        findings = Findings()
        if case.fills_memory:
            small, _ = self._setting(shape.scaled(_SMALL), case)
            self._compare({each: small.training(each) for each in names}, findings)
            del small
            names = [each for each in names if each.startswith("GCN")]
        setting, spent = self._setting(shape, case)
        window = [None] * (_SHORT_WINDOW if case.fills_memory else _WINDOW)
        for together in [[each] for each in names] if case.fills_memory else [names]:
            trainings = {each: setting.training(each) for each in together}
            if not case.fills_memory:
                self._compare(trainings, findings)
            for each, training in trainings.items():
                findings.losses[each] = float(training.gradients())
                self._peak(each, training, findings)
            findings.each_rank_s |= measure(
                {each: training.epoch for each, training in trainings.items()},
                lambda _: window,
                self._job.options.repeats,
                self._job.ranks,
            )
            findings.device_bytes = max(findings.device_bytes, self._device_bytes())
        self._require_same_losses(name, findings.losses)
        buffer = max(self._job.ranks.all_gather(len(setting.x))) * case.hidden * 4
        self._keep(name, shape, case, findings, buffer, spent)

    def _setting(self, shape: Shape, case: Case) -> tuple[Setting, float]:
        """This rank's part, and the seconds to partition the graph, which all ranks make."""
        device, exchange = self._job.device, self._job.options.exchange or case.exchange
        g = graph_of(*shape.csc(device))
        pg, spent = self._job.partition(g, exchange, 1 if case.fills_memory else 3)
        del g
        own = pg.ndata[dgl.NID]
        # Classes differ in size and features have a mean: so do gradients, which are compared.
        skewed = random_rows(own + shape.nodes, 1).squeeze(1).square()
        labels = (shape.classes * skewed).long()
        x = random_rows(own, shape.features)
        return Setting(pg, x, labels, shape.nodes, case.widths(shape)), spent

    def _compare(self, trainings: Mapping[str, Training], findings: Findings) -> None:
        """Raise ValueError where losses or gradients are too far from the peer's, the first."""
        wanted: list[torch.Tensor] = []
        for name, each in trainings.items():
            found = [each.gradients(), *_gradients(each.model)]
            wanted = wanted or [tensor.double() for tensor in found]
            findings.errors[name] = error = max(
                float((tensor - right).norm() / right.norm())
                for tensor, right in zip(found, wanted, strict=True)
            )
            if not error <= TOLERANCES[each.precision]:
                raise ValueError(f"widths {each.on.widths}: {name} is off by {error:.1e}")

    def _require_same_losses(self, name: str, losses: Mapping[str, float]) -> None:
        """Raise ValueError where all contenders and numbers of ranks have not the same loss."""
        figures = self._job.content["figures"]
        before = [figure["losses"] for figure in figures if figure["shape"] == name]
        right = next(iter((before or [losses])[0].values()))
        for contender, loss in losses.items():
            if not abs(loss - right) <= TOLERANCES[contender.split()[1].rstrip(",")] * abs(right):
                raise ValueError(f"{name}: {contender} has a loss of {loss}, not {right}")

    def _peak(self, name: str, training: Training, findings: Findings) -> None:
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
        self,
        name: str,
        shape: Shape,
        case: Case,
        findings: Findings,
        buffer: int,
        partition_s: float,
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
        aimed = ranks == AIMED_RANKS
        self._job.say(
            f"{name}, widths {case.widths(shape)}, {ranks} ranks; MG-GCN, ms: on H200s"
            f" {mg_gcn or '-'}, on 8 A100s {case.mg_gcn_a100_ms or '-'}; aim for {AIMED_RANKS}:"
            f" {case.aim_ms}\n"
            f"  {'':26} ms an epoch  times 1 rank  times {_PEER}  buffers  peak GB  error"
        )
        for each, spent in slowest.items():
            columns = (
                column(spent, 11),
                column(speedups.get(each), 13),
                column(slowest[_PEER] / spent if _PEER in slowest else None, 21),
                column(_over(findings.epoch_bytes.get(each), buffer), 8),
                column(_over(findings.peak_bytes.get(each), 1e9), 8, ".1f"),
                column(findings.errors[each], 6, ".0e"),
            )
            self._job.say(f"  {each:26} {' '.join(columns)}")
        self._job.keep(
            shape=name,
            nodes=shape.nodes,
            edges=shape.edges,
            widths=case.widths(shape),
            best=best,
            ours_ms=slowest[best],
            aim_ms=case.aim_ms,
            reached=slowest[best] <= case.aim_ms if aimed else None,
            times_one_rank=speedups,
            reached_speedup=speedups[best] >= AIMED_SPEEDUP if aimed and speedups else None,
            mg_gcn_ms=mg_gcn,
            mg_gcn_8_a100_ms=case.mg_gcn_a100_ms,
            slowest_ms=slowest,
            buffer_bytes=buffer,
            epoch_bytes=findings.epoch_bytes,
            peak_bytes=findings.peak_bytes,
            device_bytes=findings.device_bytes,
            losses=findings.losses,
            errors=findings.errors,
            partition_s=partition_s,
            each_rank_s=findings.each_rank_s,
        )


def _over(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _run(options: argparse.Namespace) -> None:
    Bench(options).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpus = torch.cuda.device_count()
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[count for count in (1, 2, 4, 8) if count <= max(1, gpus)],
        help="numbers of them, one after the other",
    )
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

"""Claim: what exchange='auto' settles on is within 5 % of the best of all ways that there are.

Every GPU has its part of a graph of ogbn-products' or Reddit's size, as in fullgraph_gpu.  For each
width, forwards and backwards: every way to exchange rows is timed, remote reads with every pipeline
(MGG's ranges in powers of two).  Then the tuner chooses, from calls like those of a training.  The
fastest of the sweep, the tuner's pick and the default are timed once more side by side, as the
fastest of 150 noisy figures looks faster than it is.

    python -m benchmarks.exchange_sweep_gpu --out exchange_sweep.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dgl_mgpu

import dgl  # isort: skip

from benchmarks.fullgraph_gpu import SHAPES, WIDTHS
from benchmarks.gpu import PowerLaw, measure, this_device
from benchmarks.machine import describe_machine
from dgl_mgpu.fullgraph.exchange.auto import Auto, Case
from dgl_mgpu.fullgraph.exchange.ways import Way, Ways
from dgl_mgpu.fullgraph.exchange.window import Window, reaches_all
from dgl_mgpu.store import Ranks
from dgl_mgpu.training.launch import launch

#: How much longer than the best of all ways the tuner's pick may take.
AIM = 1.05
#: Timed calls of a window.
_WINDOW = 4
#: Calls after which the tuner must have chosen.
_MOST_CALLS = 1000


class Sweep:
    """What one rank measures, together with the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, this_device()
        self._ranks = Ranks.of_all_machines()
        self._content: dict[str, Any] = {
            "machine": describe_machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "ranks": self._ranks.size,
            "figures": [],
        }

    def run(self) -> None:
        """Print every case and keep it in a file."""
        self._say("shape      width          best      pick   of best  calls   the best; the pick")
        for shape in self._options.shapes:
            ways = self._ways(shape)
            for width in self._options.widths or WIDTHS[shape]:
                for transposed in (False, True):
                    self._keep(self._case(shape, ways, width, transposed))

    def _ways(self, shape: str) -> Ways:
        nodes, edges = (int(size * self._options.scale) for size in SHAPES[shape])
        indptr, indices = PowerLaw(nodes, edges).csc(self._device, torch.int32)
        ends = ("csc", (indptr.int(), indices, torch.empty(0, dtype=torch.int32)))
        graph = dgl_mgpu.partition_graph(dgl.graph(ends, num_nodes=nodes), device=self._device)
        group = dist.group.WORLD if self._ranks.size > 1 else None
        window = None
        if group is not None and reaches_all(group, self._device):
            window = Window(group, self._device)
        return Ways(graph._graph.parts[0].part, group, window)

    def _case(self, shape: str, ways: Ways, width: int, transposed: bool) -> dict[str, Any]:
        part = ways.part
        count = part.num_own_dst if transposed else part.num_own_src
        rows = torch.randn(count, width, device=self._device)
        case = Case(transposed, 4 * width, rows.dtype, 0)
        allowed = [way for way in ways.by_name.values() if case.allows(way)]
        swept = self._slowest(ways, allowed, rows, transposed, self._options.repeats)
        best = min(swept, key=swept.__getitem__)

        auto = Auto(ways, cached=False)
        calls, seconds = self._tune(auto, case, rows)
        pick = auto.found.get(case, ways.default)
        chosen = dict.fromkeys((best, pick, ways.default))
        final = self._slowest(ways, chosen, rows, transposed, 3 * self._options.repeats)
        return {
            "shape": shape,
            "width": width,
            "transposed": transposed,
            "best": str(best),
            "pick": str(pick),
            "default": str(ways.default),
            "of_best": final[pick] / min(final.values()),
            "calls": calls,
            "tuning_s": seconds,
            "final_ms": _by_name(final),
            "swept_ms": _by_name(swept),
            "estimated_ms": _by_name(
                {way: auto.model.seconds(way, case.row_bytes) for way in ways.candidates}
            ),
        }

    def _tune(self, auto: Auto, case: Case, rows: torch.Tensor) -> tuple[int, float]:
        """How many calls it takes until the tuner has chosen, and how long they last."""
        begin = time.perf_counter()
        if self._ranks.size == 1:
            return 0, 0.0
        for calls in range(1, _MOST_CALLS):
            (auto.transposed_sums if case.transposed else auto.sums)(rows)
            if case in auto.found:
                return calls, time.perf_counter() - begin
        raise RuntimeError(f"nothing was chosen for {case} in {_MOST_CALLS} calls")

    def _slowest(
        self, ways: Ways, chosen: Iterable[Way], rows: torch.Tensor, transposed: bool, repeats: int
    ) -> dict[Way, float]:
        """Seconds that each way takes the slowest rank."""

        def call(way: Way) -> Callable[[Any], torch.Tensor]:
            return lambda _: ways[way].transposed_sums(rows) if transposed else ways[way].sums(rows)

        contenders = {str(way): call(way) for way in chosen}
        batches = [None] * (_WINDOW + 2)
        found = measure(contenders, lambda _: batches, repeats, self._ranks)
        return {ways.by_name[name]: max(seconds) for name, seconds in found.items()}

    def _keep(self, figure: dict[str, Any]) -> None:
        final = figure["final_ms"]
        backwards = "back" if figure["transposed"] else ""
        self._say(
            f"{figure['shape']:10} {figure['width']:5} {backwards:4}"
            f" {final[figure['best']]:9.3f} {final[figure['pick']]:9.3f} {figure['of_best']:9.3f}"
            f" {figure['calls']:6}   {figure['best']}; {figure['pick']}"
            f"{'' if figure['of_best'] <= AIM else '  MISSED'}"
        )
        self._content["figures"].append(figure)
        if self._options.out and self._ranks.rank == 0:
            # Anew each time: a run that is cut off leaves what it has found.
            self._options.out.write_text(json.dumps(self._content, indent=1) + "\n")

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0:
            print(text, flush=True)


def _by_name(seconds: dict[Way, float]) -> dict[str, float]:
    return {str(way): 1e3 * spent for way, spent in seconds.items()}


def _run(options: argparse.Namespace) -> None:
    Sweep(options).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--widths", nargs="+", type=int, help="by default fullgraph_gpu's")
    parser.add_argument("--scale", type=float, default=1.0, help="of nodes and edges")
    parser.add_argument("--repeats", type=int, default=3, help="timed windows of the sweep")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    launch(_run, options.ranks, options)


if __name__ == "__main__":
    main()

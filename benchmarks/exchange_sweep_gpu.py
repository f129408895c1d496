"""Claim: what exchange='auto' settles on is within 5 % of the best of all ways that there are.

Every GPU has its part of a graph of ogbn-products', Reddit's or proteins' size, as in
fullgraph_gpu.  For each width, forwards and backwards: every way to exchange rows is timed, remote
reads with every pipeline (MGG's ranges in powers of two), and those that come near the fastest
several times.  Then the tuner chooses, from calls like those of a training.  The fastest of the
sweep, the tuner's pick and the default are timed once more side by side: the fastest of 150 noisy
figures looks faster than it is.

    python -m benchmarks.exchange_sweep_gpu --out exchange_sweep.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.fullgraph import (
    SHAPES,
    Job,
    common_options,
    graph_of,
    new_report,
    ranks_option,
    tuned,
)
from benchmarks.fullgraph_gpu import WIDTHS as WIDTHS_OF_SUMS
from benchmarks.gpu import measure, window
from dgl_mgpu.distributed.exchange.schedule import CommSchedule
from dgl_mgpu.distributed.exchange.strategies import ExchangeStrategies, ExchangeStrategy
from dgl_mgpu.distributed.exchange.tuner import Auto, Case
from dgl_mgpu.train.launch.launch import launch

#: Of each shape; sums of proteins' size take a fraction of a millisecond.
WIDTHS = {**WIDTHS_OF_SUMS, "proteins": (16, 112)}
#: How much longer than the best of all ways the tuner's pick may take.
AIM = 1.05
#: Ways that take so many times as long as the fastest are timed once, the others more often, in
#: windows of so many calls.
_NEAR, _WINDOW = 1.5, 4


class Sweep:
    """What one rank measures, together with the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._job = Job(options)

    def run(self) -> None:
        """Print every case and keep it in a file."""
        job, options = self._job, self._job.options
        job.say("shape      width          best      pick   of best  calls   the best; the pick")
        for shape in options.shapes:
            graph = graph_of(*SHAPES[shape].scaled(options.scale).csc(job.device))
            (spread,) = job.partition(graph, repeats=1)[0]._graph.parts
            del graph
            ways = job.ways(spread)
            for width in options.widths or WIDTHS[shape]:
                for transposed in (False, True):
                    self._keep(shape=shape, **self._case(ways, width, transposed))

    def _case(self, ways: ExchangeStrategies, width: int, transposed: bool) -> dict[str, Any]:
        part, repeats = ways.part, self._job.options.repeats
        count = part.num_own_dst if transposed else part.num_own_src
        rows = torch.randn(count, width, device=self._job.device)
        case = Case(transposed, 4 * width, rows.dtype, 0)
        allowed = [way for way in ways.by_name.values() if case.allows(way)]
        expected = _call(ways[ways.default], transposed)(rows)
        swept = {way: self._once(ways[way], rows, transposed, expected) for way in allowed}
        limit = _NEAR * min(swept.values())
        near = [way for way in allowed if way.pipeline is None or swept[way] <= limit]
        again, swept_samples = self._slowest(ways, near, rows, transposed, repeats, _WINDOW)
        swept |= again
        best = min(near, key=swept.__getitem__)

        auto = Auto(ways, cached=False)
        calls, seconds = tuned(auto, case, rows)
        pick = auto.found.get(case, ways.default)
        chosen = dict.fromkeys((best, pick, ways.default))
        final, samples = self._slowest(ways, chosen, rows, transposed, 3 * repeats, _WINDOW)
        return {
            "width": width,
            "transposed": transposed,
            "best": str(best),
            "pick": str(pick),
            "default": str(ways.default),
            "of_best": final[pick] / min(final.values()),
            "calls": calls,
            "tuning_s": seconds,
            "final_ms": _by_name(final),
            "final_samples_s": samples,
            "swept_ms": _by_name(swept),
            "swept_samples_s": swept_samples,
            "estimated_ms": _by_name(
                {way: auto.model.seconds(way, case.row_bytes) for way in ways.candidates}
            ),
        }

    def _once(
        self, rounds: CommSchedule, rows: torch.Tensor, transposed: bool, expected: torch.Tensor
    ) -> float:
        """Seconds of one call, after others, of the slowest rank: most ways are far behind.

        Raises
        ------
        AssertionError
            If its sums are not those of another way.
        """
        sums = _call(rounds, transposed)
        torch.testing.assert_close(sums(rows), expected, rtol=1e-4, atol=1e-3)
        self._job.wait()
        spent = window(lambda _: sums(rows), [None] * 3, rows.device)
        return max(self._job.ranks.all_gather(spent))

    def _slowest(
        self,
        ways: ExchangeStrategies,
        chosen: Iterable[ExchangeStrategy],
        rows: torch.Tensor,
        transposed: bool,
        repeats: int,
        calls: int,
    ) -> tuple[dict[ExchangeStrategy, float], dict[str, list[list[float]]]]:
        """Seconds that each way takes the slowest rank, and of each rank all that were measured."""

        def call(way: ExchangeStrategy) -> Callable[[Any], torch.Tensor]:
            return lambda _: _call(ways[way], transposed)(rows)

        contenders = {str(way): call(way) for way in chosen}
        batches = [None] * (calls + 2)
        found, samples = measure(contenders, lambda _: batches, repeats, self._job.ranks)
        return {ways.by_name[name]: max(seconds) for name, seconds in found.items()}, samples

    def _keep(self, **figure: Any) -> None:
        final = figure["final_ms"]
        backwards = "back" if figure["transposed"] else ""
        self._job.say(
            f"{figure['shape']:10} {figure['width']:5} {backwards:4}"
            f" {final[figure['best']]:9.3f} {final[figure['pick']]:9.3f} {figure['of_best']:9.3f}"
            f" {figure['calls']:6}   {figure['best']}; {figure['pick']}"
            f"{'' if figure['of_best'] <= AIM else '  MISSED'}"
        )
        self._job.keep(**figure)


def _call(rounds: CommSchedule, transposed: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return rounds.transposed_sums if transposed else rounds.sums


def _by_name(seconds: dict[ExchangeStrategy, float]) -> dict[str, float]:
    return {str(way): 1e3 * spent for way, spent in seconds.items()}


def _run(options: argparse.Namespace) -> None:
    Sweep(options).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--widths", nargs="+", type=int, help="by default each shape's own")
    ranks_option(parser)
    common_options(parser)
    parser.set_defaults(repeats=3)
    options = parser.parse_args()
    new_report(options)
    launch(_run, options.ranks, options)


if __name__ == "__main__":
    main()

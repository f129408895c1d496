"""All benchmarks of the papers' claims: run what this machine can, or render the kept results.

    python -m benchmarks                        # make bench; results in outputs/benchmarks
    python -m benchmarks bench.scale=smoke      # minutes on CPUs
    python -m benchmarks bench.scale=full       # the papers' sizes, on 8 GPUs
    python -m benchmarks bench.only=[mgg_gpu]
    python -m benchmarks report                 # docs/benchmarks: its pages and pictures
    python -m benchmarks rerun gpus=1           # docs/benchmarks: its results of one GPU, or two

A run's folder gets each program's JSON and what it printed, and a page and pictures like those of
``report``, of this run's results alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.claims.kept import CLAIMS_PAGE
from benchmarks.claims.registry import Results
from benchmarks.rerun import report, report_kept, rerun
from benchmarks.runs import Outcome, carry_out, configured
from dgl_mgpu.errors import DGLMGPUError


def _table(outcomes: list[Outcome]) -> Table:
    grid = Table("run", "", "seconds", "")
    for each in outcomes:
        grid.add_row(each.run, each.what, f"{each.seconds:.0f}" if each.seconds else "", each.why)
    return grid


def main(arguments: list[str]) -> int:
    """Exit status: 0, 1 if a program failed, 2 if what is asked for is not possible."""
    try:
        if arguments == ["report"]:
            report_kept()
            return 0
        if arguments[:1] == ["rerun"]:
            outcomes = rerun(arguments[1:])
            Console().print(_table(outcomes))
            is_complete = all(each.what == "ok" for each in outcomes)
            print("all results were replaced" if is_complete else "no result was replaced")
            return int(not is_complete)
        config = configured(arguments)
        out = Path(config.bench.out)
        outcomes = carry_out(config, out)
        report(Results(out, by_run=True), out)
    except DGLMGPUError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    Console().print(_table(outcomes))
    print(f"results, {CLAIMS_PAGE} and pictures are in {out}")
    return int(any(each.what == "failed" for each in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

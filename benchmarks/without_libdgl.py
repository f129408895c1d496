"""Claim: without its binary, DGL is not slower on CPUs.

:mod:`benchmarks.without_libdgl_script` runs with DGL's binary and without, in turns.

    python -m benchmarks.without_libdgl --out without_libdgl.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

ROOT = Path(__file__).parents[1]
#: By side, what the environment says of DGL's binary.
SIDES = {"binary": "auto", "without": "off"}


def main() -> None:
    """Print a row for each case, and keep all of them in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each case, in each turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, list[float]]]] = {side: [] for side in SIDES}
    for _ in range(options.turns):
        for side, choice in SIDES.items():
            runs[side].append(_run(choice, options))
    figures = [_figure(case, runs) for case in runs["binary"][0]]
    for figure in figures:
        ms = figure["ms"]
        print(
            f"{figure['case']:40} {ms['binary']:9.3f} ms, without {ms['without']:9.3f} ms:"
            f" {figure['ratio']:.2f} times as fast"
        )
    if options.out is not None:
        told = {key: value for key, value in vars(options).items() if key != "out"}
        content = {"machine": describe_machine(), "options": told, "figures": figures}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


def _run(choice: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """What the script printed."""
    command = [sys.executable, "-m", "benchmarks.without_libdgl_script"]
    for name in ("nodes", "edges", "seconds", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "DGL_MGPU_LIBDGL": choice}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "DGLBACKEND": "pytorch"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _figure(case: str, runs: dict[str, list[dict[str, list[float]]]]) -> dict[str, Any]:
    """Medians over all turns and of each; the ratio is how many times as fast it is without."""
    medians = {
        side: statistics.median(ms for run in each for ms in run[case])
        for side, each in runs.items()
    }
    by_turn = {side: [statistics.median(run[case]) for run in each] for side, each in runs.items()}
    return {
        "case": case,
        "ms": medians,
        "ratio": medians["binary"] / medians["without"],
        "turns": by_turn,
    }


if __name__ == "__main__":
    main()

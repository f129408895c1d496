"""Claim: without its binary, DGL is not slower on CPUs.

:mod:`benchmarks.without_libdgl_script` runs in two processes, with DGL's binary and without, and
each case in both in turns.

    python -m benchmarks.without_libdgl --out without_libdgl.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.machine import keep

ROOT = Path(__file__).parents[1]
#: By side, what the environment says of DGL's binary.
SIDES = {"binary": "auto", "without": "off"}


def main() -> None:
    """Print a row for each case, and keep all of them in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each case, in each turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    options = parser.parse_args()
    figures = []
    with ExitStack() as stack:
        sides = {side: stack.enter_context(_start(side, options)) for side in SIDES}
        names, _ = (answer(process) for process in sides.values())
        for case in names:
            if options.only not in case:
                continue
            turns: dict[str, list[float]] = {side: [] for side in SIDES}
            for _ in range(options.turns):
                for side, process in sides.items():
                    turns[side].append(statistics.median(_time(process, case)))
            figures.append(_figure(case, turns))
            ms = figures[-1]["ms"]
            print(
                f"{case:40} {ms['binary']:9.3f} ms, without {ms['without']:9.3f} ms:"
                f" {figures[-1]['ratio']:.2f} times as fast",
                flush=True,
            )
    keep(options, figures)


def _start(side: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A process that times cases; it ends when its input does."""
    command = [sys.executable, "-m", "benchmarks.without_libdgl_script"]
    for name in ("nodes", "edges", "seconds", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "DGL_MGPU_LIBDGL": SIDES[side]}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "DGLBACKEND": "pytorch"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def _time(process: subprocess.Popen[str], case: str) -> list[float]:
    """Milliseconds of a case's calls."""
    assert process.stdin is not None
    process.stdin.write(case + "\n")
    process.stdin.flush()
    times: list[float] = answer(process)
    return times


def answer(process: subprocess.Popen[str]) -> Any:
    """What a process prints next."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a process ended with {process.wait()}: see above")
    return json.loads(line)


def _figure(case: str, turns: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of turns, and the median of what turns say: how many times as fast it is without."""
    ratios = [a / b for a, b in zip(turns["binary"], turns["without"], strict=True)]
    return {
        "case": case,
        "ms": {side: statistics.median(each) for side, each in turns.items()},
        "ratio": statistics.median(ratios),
        "turns": turns,
    }


if __name__ == "__main__":
    main()

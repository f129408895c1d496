"""Claim: GraphBolt samples on a CPU 2.5 times as fast as with its own C++, weighted 1.5 times.

:mod:`benchmarks.graphbolt_script` samples mini-batches in this interpreter, and in one that has
DGL 2.1 with its own library (torch 2.2.1), in turns.

    python -m benchmarks.graphbolt_cpu --reference OTHER/bin/python --out graphbolt_cpu.json
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

SCRIPT = Path(__file__).with_name("graphbolt_script.py")
#: Options of the script by what is sampled, and times as fast as the reference that is aimed at.
CASES = {
    "uniform": ([], 2.5),
    "weighted": (["--weighted"], 1.5),
    "replace": (["--replace"], None),
    "by layer": (["--by-layer"], None),
}
#: Most that a batch's edges differ by between both, as a share.
_SAME_WORK = 0.02


def main() -> None:
    """Print a row for each case, and keep all of them in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, help="Python that has DGL with its own library")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=16_000_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--batches", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    options = parser.parse_args()
    pythons = {"ours": Path(sys.executable)}
    if options.reference is not None:
        pythons["reference"] = options.reference
    figures = []
    for name, (words, aim) in CASES.items():
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in pythons}
        for _ in range(options.turns):
            for side, python in pythons.items():
                runs[side].append(_run(python, options, words))
        figures.append(_figure(name, aim, runs))
        print(f"{name:10}" + "  ".join(f"{k} {v:.2f}" for k, v in _shown(figures[-1]).items()))
    if options.out is not None:
        told = {key: str(value) for key, value in vars(options).items() if key != "out"}
        content = {"machine": describe_machine(), "options": told, "figures": figures}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


def _run(python: Path, options: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """What the script printed."""
    command: list[Any] = [python, SCRIPT, *words, "--fanouts", *options.fanouts]
    for name in ("nodes", "edges", "batch", "batches", "warm_up"):
        command += [f"--{name.replace('_', '-')}", getattr(options, name)]
    # Only this interpreter is to find this checkout; DGL asks for a backend where none is chosen.
    path = os.environ.get("PYTHONPATH", "")
    if python == Path(sys.executable):
        path = os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), path]))
    environment = {**os.environ, "PYTHONPATH": path, "DGLBACKEND": "pytorch"}
    done = subprocess.run(
        [*map(str, command)], check=True, capture_output=True, text=True, env=environment
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _figure(name: str, aim: float | None, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    edges = {side: statistics.mean(run["edges"] for run in each) for side, each in runs.items()}
    if max(edges.values()) > (1 + _SAME_WORK) * min(edges.values()):
        raise RuntimeError(f"{name}: mini-batches have {edges} edges")
    medians = {
        side: statistics.median(ms for run in each for ms in run["ms"])
        for side, each in runs.items()
    }
    ratio = medians["reference"] / medians["ours"] if "reference" in medians else None
    return {"case": name, "ms": medians, "ratio": ratio, "aim": aim, "runs": runs}


def _shown(figure: dict[str, Any]) -> dict[str, float]:
    shown = {f"{side}_ms": ms for side, ms in figure["ms"].items()}
    return shown | {key: figure[key] for key in ("ratio", "aim") if figure[key] is not None}


if __name__ == "__main__":
    main()

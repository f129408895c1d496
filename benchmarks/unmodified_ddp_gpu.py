"""Claim: a script for several GPUs is never slower with its graph in a store than without.

:mod:`benchmarks.unmodified_ddp_script`, which trains GraphSAGE with ``use_uva=True, use_ddp=True``,
is run by ``python -m dgl_mgpu`` with its graph pinned in the host's memory (``--store=off``) and in
a store, eagerly and with its model captured as CUDA graphs. Seeds that all GPUs train on in a
second are the median of several windows of steps.

    python -m benchmarks.unmodified_ddp_gpu --out unmodified_ddp.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=4_000_000)
    parser.add_argument("--edges", type=int, default=40_000_000)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[10, 10])
    parser.add_argument("--batch", type=int, default=1024, help="seeds of a rank's mini-batch")
    parser.add_argument("--warm-up", type=int, default=80, help="steps before the first window")
    parser.add_argument("--steps", type=int, default=100, help="of a window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1, help="of each way, in turns")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    options = parser.parse_args()
    steps = options.warm_up + options.steps * options.windows
    if (steps + 1) * options.gpus * options.batch > options.nodes:
        parser.error(
            f"{options.nodes} nodes are less than {steps + 1} steps of {options.gpus} GPUs"
        )
    ways = itertools.product(("off", "on"), ("off", "on"))
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(options.repeats):
        for (store, capture), kept in runs.items():
            kept.append(_run(options, store, capture))
            rate = _seeds_per_s(kept)
            print(f"store {store:<3} capture {capture:<3} {rate:>10,.0f} seeds/s", flush=True)
            if options.out is not None:  # After each run, since a run takes half a minute.
                _write(options, runs)


def _seeds_per_s(runs: list[dict[str, Any]]) -> float:
    return statistics.median(rate for run in runs for rate in run["seeds_per_s"])


def _write(options: argparse.Namespace, runs: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    figures = [
        {"store": store, "capture": capture, "seeds_per_s": _seeds_per_s(kept), "runs": kept}
        for (store, capture), kept in runs.items()
        if kept
    ]
    told = {key: value for key, value in vars(options).items() if key != "out"}
    content = {"machine": describe_machine(), "options": told, "figures": figures}
    options.out.write_text(json.dumps(content, indent=1) + "\n")


def _run(options: argparse.Namespace, store: str, capture: str) -> dict[str, Any]:
    """What the script writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        words: list[Any] = [f"--store={store}", f"--capture={capture}"]
        words.append(ROOT / "benchmarks" / "unmodified_ddp_script.py")
        for name in ("gpus", "nodes", "edges", "batch", "warm_up", "steps", "windows"):
            words += [f"--{name.replace('_', '-')}", getattr(options, name)]
        words += ["--fanouts", *options.fanouts, "--out", out]
        words += ["--meeting-point", f"file://{folder}/meeting"]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        subprocess.run(
            [sys.executable, "-m", "dgl_mgpu", *map(str, words)],
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        return json.loads(out.read_text())


if __name__ == "__main__":
    main()

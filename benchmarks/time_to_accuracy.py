"""Claim: an unmodified script reaches its accuracy many times sooner than DGL alone has it.

:mod:`benchmarks.time_to_accuracy_script`, which trains GraphSAGE on mini-batches as DGL's user
guide has it, runs until its validation accuracy is ``--level``:

- ``CPU``: graph, samples and model on the CPU, by DGL's own C++ and torch;
- ``pinned, eager``: graph and features pinned in the host's memory (``use_uva=True``) and the model
  kernel by kernel, as DGL's CUDA build has it (by this package's kernels: that build does not run
  with today's torch);
- ``pinned, ours``: the same script as ``python -m dgl_mgpu --store=on`` runs it, with the graph in
  a store and its model as CUDA graphs;
- ``GPU, eager`` and ``GPU, ours``: the script with ``g.to("cuda")``, without a store.

The CPU has the workers, which sample, and threads, which the model has, of the fastest of
``--settings``; all are kept.  After ``--seconds`` of training no way goes on: one that has not
reached the level by then, as the CPU may, takes at least as long as it took.  On several GPUs the
model is DistributedDataParallel, a step has as many seeds of each GPU, and there is no CPU.

The graph has communities (:class:`benchmarks.graphs.PlantedPartition`), whose class is that of
their nodes, and features say little of it: it takes neighbours, and several epochs.  Each way is a
process, which runs with every seed.  The time is of training, captures and the first steps
included; a short run before has loaded libraries and compiled kernels.

    python -m benchmarks.time_to_accuracy --out time_to_accuracy.json
    python -m benchmarks.time_to_accuracy --gpus 2 --out time_to_accuracy_2.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.fullgraph import column
from benchmarks.gpu import this_device
from benchmarks.graphs import PlantedPartition
from benchmarks.machine import keep

ROOT = Path(__file__).parents[1]
#: Steps, seconds and accuracies of a run; the last one has reached the level, or is the last step,
#: or the last one in time.
Curve = Sequence[dict[str, float]]
CLASSES, FEATURES, VALID = 16, 128, 8192
#: Distance of the centroids of classes from the origin, where noise has unit variance a dimension.
SIGNAL = 1.0
#: Share of the nodes whose label is drawn, whatever their community.
DRAWN = 0.05


@dataclass(frozen=True)
class Way:
    """How the script runs.

    Attributes
    ----------
    place : str
        Where it has its graph.
    options : tuple of str
        Of ``python -m dgl_mgpu``.
    """

    place: str
    options: tuple[str, ...] = ()


_AS_DGL = ("--store=off", "--capture=off")
CPU = "CPU"
WAYS = {
    CPU: Way("host", _AS_DGL),
    "pinned, eager": Way("pinned", _AS_DGL),
    "pinned, ours": Way("pinned", ("--store=on",)),
    "GPU, eager": Way("gpu", _AS_DGL),
    "GPU, ours": Way("gpu"),
}


def write_graph(file: Path, options: argparse.Namespace) -> None:
    """What the script reads: a graph, its features and labels, and nodes to train on and to try."""
    device, source = this_device(), PlantedPartition(options.nodes, options.edges, inside=0.7)
    indptr, indices = source.csc(device, torch.int32)
    label = source.community(torch.arange(options.nodes, device=device)) % CLASSES
    content = {"indptr": indptr.int(), "indices": indices, **labelled(label, options.train)}
    torch.save({name: tensor.cpu() for name, tensor in content.items()}, file)


def labelled(label: torch.Tensor, num_train: int) -> dict[str, torch.Tensor]:
    """Features of nodes of these classes, their labels, and nodes to train on and to try."""
    nodes, device = len(label), label.device
    draw = torch.Generator(device).manual_seed(1)
    centroids = torch.randn(CLASSES, FEATURES, generator=draw, device=device)
    centroids *= SIGNAL / centroids.norm(dim=1, keepdim=True)
    feat = torch.randn(nodes, FEATURES, generator=draw, device=device) + centroids[label]
    others = torch.randint(CLASSES, label.shape, generator=draw, device=device)
    is_drawn = torch.rand(nodes, generator=draw, device=device) < DRAWN
    order = torch.randperm(nodes, generator=draw, device=device)
    valid, train = order[: min(VALID, nodes // 4)], order[nodes // 4 :]
    return {
        "feat": feat,
        "label": torch.where(is_drawn, others, label),
        "train": train[:num_train].int(),
        "valid": valid.int(),
    }


@dataclass(frozen=True)
class Runs:
    """What a way's process found.

    Attributes
    ----------
    curves : sequence of Curve
        Of each seed.
    setting : str
        Its workers and threads.
    step_ms_by_setting : dict
        Of those that were tried.
    """

    curves: Sequence[Curve]
    setting: str = ""
    step_ms_by_setting: Mapping[str, float] = field(default_factory=dict)


class Bench:
    """All ways and seeds, on one graph."""

    def __init__(self, options: argparse.Namespace, graph: Path) -> None:
        self._options, self._graph = options, graph
        self._runs: dict[str, Runs] = {}
        self._failures: dict[str, str] = {}

    def run(self) -> bool:
        """Print and keep what is found, after each way; whether none failed."""
        for way in self._options.ways:
            try:
                self._runs[way] = self._run(way)
            except subprocess.TimeoutExpired:
                self._failures[way] = f"took longer than {self._options.limit:g} s"
            except subprocess.CalledProcessError as error:
                self._failures[way] = f"ended with status {error.returncode}"
            self._keep(way)
        return not self._failures

    def _run(self, way: str) -> Runs:
        options = self._options
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            told = {
                "graph": self._graph, "place": WAYS[way].place, "gpus": options.gpus,
                "batch": options.batch, "hidden": options.hidden, "lr": options.lr,
                "every": options.every, "level": options.level,
                "most_steps": options.most_steps, "seconds": options.seconds,
                "meeting_point": f"file://{folder}/meeting", "out": out,
            }  # fmt: skip
            words = [*WAYS[way].options, ROOT / "benchmarks" / "time_to_accuracy_script.py"]
            words += ["--fanouts", *options.fanouts, "--seeds", *range(options.seeds)]
            words += ["--settings", *options.settings] if way == CPU else []
            for name, value in told.items():
                words += [f"--{name.replace('_', '-')}", value]
            paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
            subprocess.run(
                [sys.executable, "-m", "dgl_mgpu", *map(str, words)],
                check=True,
                timeout=options.limit,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
            return Runs(**json.loads(out.read_text()))

    def _keep(self, way: str) -> None:
        """Print a way's figure, and keep those of all."""
        figures = figures_of(self._runs, self._options.level, self._options.gpus)
        if way in self._failures:
            print(f"{way:14} failed: {self._failures[way]}", flush=True)
        for figure in figures:
            if figure["way"] != way:
                continue
            spread = ", ".join(column(seconds, 1) for seconds in figure["each_s"])
            times = {name: figure.get(f"{name}_over_this") for name in ("cpu", "eager")}
            print(
                f"{figure['way']:14} {column(figure['seconds'], 8)} s ({spread}), "
                f"{figure['steps'] or '-'} steps, accuracy {figure['accuracy']:.3f}; CPU takes "
                f"{'at least ' if figure['cpu_was_stopped'] else ''}{column(times['cpu'], 1)}, "
                f"eager {column(times['eager'], 1)} times as long",
                flush=True,
            )
        failed = [{"way": way, "failed": why} for way, why in self._failures.items()]
        keep(self._options, [*figures, *failed])


def figures_of(runs: Mapping[str, Runs], level: float, gpus: int) -> list[dict[str, Any]]:
    """Of each way, the seconds and steps to the level: medians over seeds, and each seed's.

    None where a run has not reached it.  Then ``cpu_over_this`` of others is by the seconds after
    which the CPU was stopped, and so at most what it would be.
    """
    found: dict[str, dict[str, Any]] = {}
    for way, each in runs.items():
        ends = [curve[-1] for curve in each.curves]
        has_reached = all(end["accuracy"] >= level for end in ends)
        found[way] = {
            "way": way,
            "gpus": 0 if way == CPU else gpus,
            "level": level,
            "seconds": statistics.median(end["seconds"] for end in ends) if has_reached else None,
            "steps": statistics.median(end["steps"] for end in ends) if has_reached else None,
            "accuracy": statistics.median(end["accuracy"] for end in ends),
            "each_s": [end["seconds"] for end in ends],
            "step_ms": 1e3 * statistics.median(map(step_seconds, each.curves)),
            **vars(each),
        }
    cpu = found.get(CPU)
    for way, figure in found.items():
        figure["cpu_was_stopped"] = cpu is not None and cpu["seconds"] is None
        if figure["seconds"] is None:
            continue
        if cpu is not None and way != CPU:
            figure["cpu_over_this"] = min(cpu["each_s"]) / figure["seconds"]
            if cpu["seconds"] is not None:
                figure["cpu_over_this"] = cpu["seconds"] / figure["seconds"]
        eager = way.replace("ours", "eager")
        seconds = found.get(eager, {}).get("seconds")
        if eager != way and seconds is not None:
            figure["eager_over_this"] = seconds / figure["seconds"]
    return list(found.values())


def step_seconds(curve: Curve) -> float:
    """What a step takes after those before the first accuracy, if there are more."""
    first, last = curve[0], curve[-1]
    if first is last:
        return last["seconds"] / last["steps"]
    return (last["seconds"] - first["seconds"]) / (last["steps"] - first["steps"])


def settings_of(cores: int) -> list[str]:
    """Workers and threads that divide so many cores: none, a quarter or half of them sample."""
    return [f"{workers}:{cores - workers}" for workers in sorted({0, cores // 4, cores // 2})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=16_000_000)
    parser.add_argument("--train", type=int, default=100_000, help="nodes to train on")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), help="all that there are")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--level", type=float, default=0.87)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[10, 10])
    parser.add_argument("--batch", type=int, default=1024, help="seeds of each GPU")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--every", type=int, default=16, help="steps between two accuracies")
    parser.add_argument("--most-steps", type=int, default=2000, help="of a run")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a process")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of a way's training, with all seeds"
    )
    parser.add_argument(
        "--settings", nargs="+", default=settings_of(len(os.sched_getaffinity(0))),
        help="of the CPU, workers of its DataLoader and threads of its model: all are tried",
    )  # fmt: skip
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    here = [way for way in WAYS if way != CPU] if torch.cuda.is_available() else []
    # The longest last: a run that is cut off has the others.
    options.ways = options.ways or ([*here, CPU] if options.gpus == 1 else here)
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "graph.pt"
        write_graph(graph, options)
        has_all = Bench(options, graph).run()
    sys.exit(not has_all)


if __name__ == "__main__":
    main()

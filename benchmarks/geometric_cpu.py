"""Claim: on a CPU an unmodified script takes no longer than torch-geometric with its own loader.

On the same graph, features, seeds and fanouts, with the same GraphSAGE:

- ``binary``: a script with DGL's DataLoader and SAGEConv as ``python -m dgl_mgpu`` runs it where
  DGL's wheel has its C++, which then samples, gathers and sums;
- ``without``: the same script without that library, by this package's own kernels;
- ``peer``: torch-geometric's NeighborLoader and its SAGEConv, or its product with a CSR matrix.

Each is a process (:mod:`benchmarks.geometric_cpu_script`).  Timed are epochs of the loader alone,
features and labels included, and of whole training steps.  Each side has the workers, threads and
layout of a layer's edges that are the fastest in a sweep, which is kept; then all take turns.

Samples are checked before, that batches of all sides are about as large, and that losses are alike.
DGL samples the neighbours of a seed anew in each hop, and torch-geometric once: its batches have
somewhat fewer nodes.

    python -m benchmarks.geometric_cpu --out geometric_cpu.json
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
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import PowerLaw
from benchmarks.graphs import PlantedPartition
from benchmarks.machine import keep
from benchmarks.peers.geometric import why_no_loader
from benchmarks.time_to_accuracy import CLASSES, labelled
from benchmarks.without_libdgl import answer

ROOT = Path(__file__).parents[1]
#: By side, how the script runs, and what the environment says of DGL's binary.
SIDES = {
    "binary": (("-m", "dgl_mgpu"), "dgl", "auto"),
    "without": (("-m", "dgl_mgpu"), "dgl", "off"),
    "peer": ((), "torch-geometric", "auto"),
}
GRAPHS = ("power-law", "communities")
#: Seconds after which threads of the side before sleep.
_PAUSE = 0.1
#: Most that sides differ by, as a share.
ALIKE = {"batch_nodes": 0.1, "batch_edges": 0.02, "last_loss": 0.05}
#: Between a setting's loading and layout.
SETTING = ", "


def write_graph(file: Path, kind: str, options: argparse.Namespace) -> None:
    """What the script reads.  Classes are of communities; where there are none, they are drawn."""
    device = torch.device("cpu")
    if kind == "communities":
        source = PlantedPartition(options.nodes, options.edges, inside=0.7)
        indptr, indices = source.csc(device, torch.int64)
        label = source.community(torch.arange(options.nodes)) % CLASSES
    else:
        law = PowerLaw(options.nodes, options.edges, in_step=True)
        indptr, indices = law.csc(device, torch.int64)
        label = torch.randint(CLASSES, (options.nodes,), generator=torch.Generator().manual_seed(2))
    content = {"indptr": indptr, "indices": indices}
    content |= labelled(label, options.batch * options.batches)
    content["train"] = content["train"].long()
    torch.save(content, file)


class Side:
    """The script's process on one side; it ends when its input does.

    Attributes
    ----------
    loadings, layouts : list of str
        What can be chosen.
    """

    def __init__(self, name: str, graph: Path, options: argparse.Namespace) -> None:
        runner, side, libdgl = SIDES[name]
        command = [sys.executable, *runner, "-m", "benchmarks.geometric_cpu_script"]
        command += ["--side", side, "--graph", str(graph), "--batch", str(options.batch)]
        for each in ("fanouts", "workers", "threads"):
            command += [f"--{each}", *map(str, getattr(options, each))]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "DGL_MGPU_LIBDGL": libdgl}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DGLBACKEND": "pytorch"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )
        choices = answer(self._process)
        self.loadings: list[str] = choices["loadings"]
        self.layouts: list[str] = choices["layouts"]

    def ask(self, what: str, loading: str = "", layout: str = "") -> Any:
        """What the script finds, with its first choices where none are told."""
        time.sleep(_PAUSE)
        asked = {
            "what": what,
            "loading": loading or self.loadings[0],
            "layout": layout or self.layouts[0],
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return answer(self._process)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def sweep(side: Side, what: str) -> dict[tuple[str, str], float]:
    """Milliseconds by loading and layout, which does not matter to a loader alone."""
    layouts = side.layouts if what == "step" else side.layouts[:1]
    return {each: side.ask(what, *each) for each in itertools.product(side.loadings, layouts)}


def measure(sides: dict[str, Side], kind: str, turns: int) -> list[dict[str, Any]]:
    """Figures of the loader alone and of whole steps, on one graph."""
    work = {name: side.ask("work") for name, side in sides.items()}
    losses = {name: side.ask("losses") for name, side in sides.items()}
    alike = {
        "batch_nodes": {name: each["inputs"] for name, each in work.items()},
        "batch_edges": {name: sum(each["edges"]) for name, each in work.items()},
        "last_loss": {name: each[-1] for name, each in losses.items()},
    }
    require_alike(alike)
    figures = []
    for what in ("load", "step"):
        swept = {name: sweep(side, what) for name, side in sides.items()}
        best = {name: min(ms, key=ms.__getitem__) for name, ms in swept.items()}
        settings = {name: SETTING.join(each) for name, each in best.items()}
        tried = {
            name: {SETTING.join(each): ms for each, ms in found.items()}
            for name, found in swept.items()
        }
        figures.append(
            {
                "case": f"{what}, {kind}",
                **figure_of(take_turns(sides, what, best, turns)),
                "setting": settings,
                **alike,
                "losses": losses,
                "swept_ms": tried,
            }
        )
    return figures


def take_turns(
    sides: Mapping[str, Side], what: str, settings: Mapping[str, tuple[str, str]], turns: int
) -> dict[str, list[float]]:
    """Milliseconds of each turn by side, after one that starts workers; the order rotates."""
    names = list(sides)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1 + turns):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            found[name].append(sides[name].ask(what, *settings[name]))
    return {name: each[1:] for name, each in found.items()}


def figure_of(turns: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians of turns, and how many times as long the peer takes: medians of what turns say."""
    return {
        "ms": {name: statistics.median(each) for name, each in turns.items()},
        "peer_over": {
            name: statistics.median(a / b for a, b in zip(turns["peer"], each, strict=True))
            for name, each in turns.items()
            if name != "peer"
        },
        "turns": turns,
    }


def require_alike(found: Mapping[str, Mapping[str, float]]) -> None:
    """Raise ValueError unless all sides do about as much work, and learn as much by it."""
    for what, share in ALIKE.items():
        if max(found[what].values()) > (1 + share) * min(found[what].values()):
            raise ValueError(f"{what} is not alike, by more than {share:.0%}: {found[what]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=GRAPHS)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=16_000_000)
    parser.add_argument("--batch", type=int, default=1024, help="seeds of a mini-batch")
    parser.add_argument("--batches", type=int, default=16, help="of an epoch")
    parser.add_argument(
        "--fanouts", type=int, nargs="+", default=[10, 10], help="from the seeds on"
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[0, 1, 2], help="processes that sample, tried"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="of the training process, tried"
    )
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if reason := why_no_loader():
        sys.exit(reason)
    figures: list[dict[str, Any]] = []
    for kind in options.graphs:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            graph = Path(folder) / "graph.pt"
            write_graph(graph, kind, options)
            sides = {name: stack.enter_context(Side(name, graph, options)) for name in SIDES}
            found = measure(sides, kind, options.turns)
        for figure in found:
            cells = (
                f"{name} {figure['ms'][name]:.1f} ms ({figure['setting'][name]})" for name in SIDES
            )
            times = (f"{name} {ratio:.2f}" for name, ratio in figure["peer_over"].items())
            print(f"{figure['case']}: {', '.join(cells)}; peer over {', '.join(times)}", flush=True)
        figures += found
        keep(options, figures)


if __name__ == "__main__":
    main()

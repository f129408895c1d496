"""Claim: an unmodified script takes no longer than torch-geometric with its own loader.

On the same graph, features, seeds and fanouts, with the same GraphSAGE, run a script with DGL's
DataLoader and SAGEConv, by ``python -m dgl_mgpu``, and

- ``peer``: torch-geometric's NeighborLoader and its SAGEConv, or its product with a CSR matrix.

Where there is no GPU, the script is

- ``binary``: with the C++ of DGL's wheel, which then samples, gathers and sums;
- ``without``: the same without that library, by this package's own kernels.

On one GPU it has the graph and features in GPU memory, its model

- ``eager``: kernel by kernel;
- ``captured``: as CUDA graphs.

The peer's workers sample on the CPU there, from features in either memory.

Each is a process (:mod:`benchmarks.geometric_script`).  Timed are epochs of the loader alone,
features and labels included, and of whole training steps.  Each side has the workers, threads,
place of the features and layout of a layer's edges that are the fastest in a sweep, which is kept;
then all take turns.

Samples are checked before, that batches of all sides are about as large, and that losses are alike.
DGL samples the neighbours of a seed anew in each hop, and torch-geometric once: its batches have
somewhat fewer nodes, and other numbers of edges unless all hops have the same fanout.

    python -m benchmarks.geometric --out geometric_gpu.json
    CUDA_VISIBLE_DEVICES= python -m benchmarks.geometric --out geometric_cpu.json
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import PowerLaw, this_device
from benchmarks.graphs import PlantedPartition
from benchmarks.machine import keep
from benchmarks.peers.geometric import why_no_loader
from benchmarks.time_to_accuracy import CLASSES, labelled
from benchmarks.without_libdgl import answer

ROOT = Path(__file__).parents[1]
#: By device and side, how the script runs, and what the environment says of DGL's binary.
SIDES = {
    "cpu": {
        "binary": (("-m", "dgl_mgpu"), "dgl", "auto"),
        "without": (("-m", "dgl_mgpu"), "dgl", "off"),
        "peer": ((), "torch-geometric", "auto"),
    },
    "cuda": {
        "eager": (("-m", "dgl_mgpu", "--capture=off"), "dgl", "auto"),
        "captured": (("-m", "dgl_mgpu"), "dgl", "auto"),
        "peer": ((), "torch-geometric", "auto"),
    },
}
#: By device.  On a GPU an epoch ends when it has been timed for long enough: one of a peer without
#: workers would take many times as long as ours.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "nodes": 1_000_000,
        "edges": 16_000_000,
        "batches": 16,
        "fanouts": [10, 10],
        "workers": [0, 1, 2],
        "threads": [1, 2],
        "turns": 7,
        "warm_up": 0,
        "seconds": math.inf,
        "finalists": None,
    },
    "cuda": {
        "nodes": 5_000_000,
        "edges": 80_000_000,
        "batches": 100,
        "fanouts": [10, 10, 10],
        "workers": [0, 4, 8, 12],
        "threads": [len(os.sched_getaffinity(0))],
        "turns": 5,
        "warm_up": 4,
        "seconds": 0.5,
        "finalists": 3,
    },
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
    device = this_device()
    if kind == "communities":
        source = PlantedPartition(options.nodes, options.edges, inside=0.7)
        indptr, indices = source.csc(device, torch.int64)
        label = source.community(torch.arange(options.nodes, device=device)) % CLASSES
    else:
        law = PowerLaw(options.nodes, options.edges, in_step=True)
        indptr, indices = law.csc(device, torch.int64)
        draw = torch.Generator(device).manual_seed(2)
        label = torch.randint(CLASSES, (options.nodes,), generator=draw, device=device)
    content = {"indptr": indptr, "indices": indices}
    content |= labelled(label, options.batch * options.batches)
    content["train"] = content["train"].long()
    torch.save({name: tensor.cpu() for name, tensor in content.items()}, file)


class SettingError(RuntimeError):
    """What a side was asked for failed in the setting that was told; others may do."""


class Side:
    """The script's process on one side; it ends when its input does."""

    def __init__(self, name: str, graph: Path, options: argparse.Namespace) -> None:
        device = this_device()
        runner, side, libdgl = SIDES[device.type][name]
        command = [sys.executable, *runner, "-m", "benchmarks.geometric_script"]
        command += ["--side", side, "--graph", str(graph), "--device", device.type]
        for each in ("batch", "warm_up", "seconds"):
            command += [f"--{each.replace('_', '-')}", str(getattr(options, each))]
        for each in ("fanouts", "workers", "threads"):
            command += [f"--{each}", *map(str, getattr(options, each))]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "DGL_MGPU_LIBDGL": libdgl}
        environment |= {"DGLBACKEND": "pytorch"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )

    @property
    def loadings(self) -> list[str]:
        """Those that can be chosen, the one that is likely to be fast last."""
        return self._choices["loadings"]

    @property
    def layouts(self) -> list[str]:
        """Those that can be chosen."""
        return self._choices["layouts"]

    @functools.cached_property
    def _choices(self) -> dict[str, list[str]]:
        # Waited for when it is asked for: the sides begin all at once.
        found: dict[str, list[str]] = answer(self._process)
        return found

    def ask(self, what: str, loading: str = "", layout: str = "") -> Any:
        """What the script finds, with its first choices where none are told.

        Raises
        ------
        SettingError
            If it failed, by what the script says.
        """
        time.sleep(_PAUSE)
        asked = {
            "what": what,
            "loading": loading or self.loadings[0],
            "layout": layout or self.layouts[0],
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found = answer(self._process)
        if "failed" in found:
            raise SettingError(found["failed"])
        return found["found"]

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


class Swept(NamedTuple):
    """Milliseconds, or why there are none, by loading and layout."""

    ms: dict[tuple[str, str], float]
    failed: dict[tuple[str, str], str]

    @property
    def best(self) -> tuple[str, str]:
        """The fastest."""
        return min(self.ms, key=self.ms.__getitem__)

    def loadings(self, most: int | None) -> list[str]:
        """The fastest ones, no more than so many."""
        return [loading for loading, _ in sorted(self.ms, key=self.ms.__getitem__)][:most]


def sweep(side: Side, what: str, loadings: Sequence[str], layouts: Sequence[str]) -> Swept:
    """Try all."""
    swept = Swept({}, {})
    for each in itertools.product(loadings, layouts):
        try:
            swept.ms[each] = side.ask(what, *each)
        except SettingError as error:  # as where shared memory is too small for workers' batches
            swept.failed[each] = str(error)
    if not swept.ms:
        raise SettingError(f"{what} failed in all settings: {swept.failed}")
    return swept


def sweeps(side: Side, finalists: int | None) -> dict[str, Swept]:
    """Of the loader alone, to which layouts do not matter, and of steps with the fastest ones."""
    load = sweep(side, "load", side.loadings, side.layouts[:1])
    return {
        "load": load,
        "step": sweep(side, "step", load.loadings(finalists), side.layouts),
    }


def measure(sides: dict[str, Side], kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of the loader alone and of whole steps, on one graph."""
    work = {name: side.ask("work", side.loadings[-1]) for name, side in sides.items()}
    losses = {name: side.ask("losses", side.loadings[-1]) for name, side in sides.items()}
    alike = {
        "batch_nodes": {name: each["inputs"] for name, each in work.items()},
        "batch_edges": {name: sum(each["edges"]) for name, each in work.items()},
        "last_loss": {name: each[-1] for name, each in losses.items()},
    }
    require_alike(alike)
    every = {name: sweeps(side, options.finalists) for name, side in sides.items()}
    figures = []
    for what in ("load", "step"):
        swept = {name: each[what] for name, each in every.items()}
        best = {name: each.best for name, each in swept.items()}
        figures.append(
            {
                "case": f"{what}, {kind}",
                **figure_of(take_turns(sides, what, best, options.turns)),
                "setting": {name: SETTING.join(each) for name, each in best.items()},
                **alike,
                "losses": losses,
                "swept_ms": {name: _by_setting(each.ms) for name, each in swept.items()},
                "failed": {name: _by_setting(each.failed) for name, each in swept.items()},
            }
        )
    return figures


def _by_setting(found: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    return {SETTING.join(each): value for each, value in found.items()}


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
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--edges", type=int)
    parser.add_argument("--batch", type=int, default=1024, help="seeds of a mini-batch")
    parser.add_argument("--batches", type=int, help="of an epoch")
    parser.add_argument("--fanouts", type=int, nargs="+", help="from the seeds on")
    parser.add_argument("--workers", type=int, nargs="+", help="processes that sample, tried")
    parser.add_argument("--threads", type=int, nargs="+", help="of the training process, tried")
    parser.add_argument("--turns", type=int)
    parser.add_argument(
        "--warm-up", type=int, help="batches before an epoch is timed, beside workers' queues"
    )
    parser.add_argument("--seconds", type=float, help="after which a timed epoch ends")
    parser.add_argument(
        "--finalists", type=int, help="settings of the loader that steps are tried with; or all"
    )
    parser.add_argument("--out", type=Path)
    device = this_device().type
    parser.set_defaults(**DEFAULTS[device])
    options = parser.parse_args()
    if reason := why_no_loader():
        sys.exit(reason)
    figures: list[dict[str, Any]] = []
    for kind in options.graphs:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            graph = Path(folder) / "graph.pt"
            write_graph(graph, kind, options)
            names = SIDES[device]
            sides = {name: stack.enter_context(Side(name, graph, options)) for name in names}
            found = measure(sides, kind, options)
        for figure in found:
            cells = (
                f"{name} {figure['ms'][name]:.1f} ms ({figure['setting'][name]})" for name in names
            )
            times = (f"{name} {ratio:.2f}" for name, ratio in figure["peer_over"].items())
            print(f"{figure['case']}: {', '.join(cells)}; peer over {', '.join(times)}", flush=True)
        figures += found
        keep(options, figures)


if __name__ == "__main__":
    main()

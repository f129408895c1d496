"""Claim: an unmodified training loop runs at the speed of its GPU where its model is captured.

Each case is a script of ``benchmarks.unmodified_scripts``, over a graph and features in GPU memory
or pinned in the host's (``use_uva=True``). It runs eagerly, with ``dgl_mgpu.capture_models()``, and
with the one change that ``dgl_mgpu.CapturedStep`` asks for, in turns. Captured losses are compared
with eager ones. ``--graph`` says on which graph. Beside a step's time stands the time of the GPU's
kernels in it, from torch's profiler; kernels of two streams that overlap count twice.

    python -m benchmarks.unmodified_gpu --out unmodified_gpu.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import dgl_mgpu

import dgl  # isort: skip

from benchmarks.gpu import this_device
from benchmarks.graphs import graph_of, graph_options
from benchmarks.machine import keep
from benchmarks.unmodified_scripts import (
    CASES,
    Case,
    Script,
    graph_for,
    made_graph,
    sage_with_dropout,
    script,
)
from dgl_mgpu.capture import calls

#: Steps before the first one that counts: prefetching and captures have settled by then.
WARM_UP = 64
#: Steps between two waits for the GPU: the host gets ahead of it by a few, and not by hundreds.
WINDOW = 16
#: Between eager and captured losses, as a share: sums in another order, grown over the steps.  They
#: grow without bounds where a model learns little, so that only the first steps are compared.
_TOLERANCE, _COMPARED = 2e-2, 20


def train(
    g: dgl.DGLGraph, case: Case, mode: str, steps: int, profiled: bool = False
) -> tuple[float, list[float], float | None]:
    """Milliseconds of a step (median), the losses, and milliseconds of kernels in a step."""
    dgl_mgpu.capture_models(mode == "captured")
    of = script(g, case, steps + WARM_UP)
    losses, times, profile = [], [], None
    for number, loss in enumerate(_steps(of, mode)):
        losses.append(loss.detach().clone())
        if (number + 1) % WINDOW == 0:
            torch.cuda.synchronize()
            times.append(time.perf_counter())
        if number + 1 == WARM_UP and profiled:
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profile.start()
    torch.cuda.synchronize()
    kernels = None
    if profile is not None:
        profile.stop()
        spans = (
            event.time_range.elapsed_us()
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        kernels = sum(spans) / steps / 1e3
    if mode == "captured":
        require_captured(case)
    dgl_mgpu.capture_models(False)
    return statistics.median(windows_of(times)), torch.stack(losses).tolist(), kernels


def windows_of(times: Sequence[float]) -> list[float]:
    """Milliseconds of a step in each window that counts, by when the windows ended."""
    counted = times[WARM_UP // WINDOW - 1 :]
    return [1e3 * (after - before) / WINDOW for before, after in itertools.pairwise(counted)]


def require_captured(case: Case) -> None:
    """Raise RuntimeError unless a model has been captured."""
    kinds = [kind for it in calls._models.values() for kind in it._kinds.values()]
    if not any(kind.graphs is not None for kind in kinds):
        raise RuntimeError(f"{case.name} was not captured: {[kind.refusal for kind in kinds]}")


def _steps(of: Script, mode: str) -> Iterator[torch.Tensor]:
    """The loss of each step."""
    if mode == "step":
        step = dgl_mgpu.CapturedStep(
            of.model, lambda blocks: of.model(blocks, blocks[0].srcdata["feat"]), F.cross_entropy
        )
        for batch in step.batches(of.loader):
            loss = step(batch)
            of.optimizer.step()
            yield loss
        return
    for batch in of.loader:
        loss = of.loss(batch)
        of.optimizer.zero_grad()
        loss.backward()
        of.optimizer.step()
        yield loss


def require_same_losses(
    case: Case, mode: str, expected: Sequence[float], found: Sequence[float]
) -> None:
    """Raise RuntimeError unless a mode's losses are those of the eager one."""
    # Dropout draws other numbers in a graph.
    is_random = case.model is sage_with_dropout
    first = zip(expected[:_COMPARED], found[:_COMPARED], strict=True)
    pairs = [(sum(expected), sum(found))] if is_random else first
    if any(abs(one - other) > _TOLERANCE * abs(one) for one, other in pairs):
        raise RuntimeError(f"{case.name}, {mode}: losses are others than eager ones")


def _row(g: dgl.DGLGraph, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    times: dict[str, list[float]] = {mode: [] for mode in case.modes}
    losses: dict[str, list[float]] = {}
    for _ in range(options.turns):
        for mode, taken in times.items():
            time_, losses[mode], _ = train(g, case, mode, options.steps)
            taken.append(time_)
    expected = losses.pop("eager")
    for mode, found in losses.items():
        require_same_losses(case, mode, expected, found)
    _, _, kernels = train(g, case, "captured", 2 * WINDOW, profiled=True)
    medians = {mode: statistics.median(taken) for mode, taken in times.items()}
    return {
        "name": case.name,
        **{f"{mode}_ms": medians.get(mode) for mode in ("eager", "captured", "step")},
        "kernels_ms": kernels,
        "ratio": medians["eager"] / medians["captured"],
        "all_ms": times,
    }


def main() -> None:
    """Print a row for each case, and keep all of them in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=5_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    graph_options(parser)
    options = parser.parse_args()
    g = made_graph(*graph_of(options).csc(this_device(), torch.int32))
    rows: list[dict[str, Any]] = []
    columns = "eager", "captured", "step", "kernels"
    print(f"{'ms of a step':40}" + "".join(f"{name:>10}" for name in (*columns, "ratio")))
    for case in CASES:
        if case.batch > g.num_nodes():
            continue  # of a real graph
        row = _row(graph_for(case, g), case, options)
        rows.append(row)
        shown = [row[f"{name}_ms"] for name in columns] + [row["ratio"]]
        cells = (f"{'' if it is None else format(it, '.2f'):>10}" for it in shown)
        print(f"{case.name:40}" + "".join(cells), flush=True)
        keep(options, rows)


if __name__ == "__main__":
    main()

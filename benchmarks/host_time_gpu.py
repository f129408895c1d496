"""Where the host's time of a training step goes, statement by statement of an unmodified script.

The script is that of ``unmodified_gpu``, with the time of the host taken between its statements.
The loader's and the model's are this package's; the loss, ``zero_grad``, the optimizer's step and
what a backward pass takes without the model are torch's alone, and in every script.

What bounds them is seen in small operations of torch's, three times in a row in the middle of a
step and many times in a loop: whatever comes once a step takes several times as long as in a loop.

    python -m benchmarks.host_time_gpu --out host_time_gpu.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import dgl_mgpu

import dgl  # isort: skip

from benchmarks.gpu import PowerLaw, this_device
from benchmarks.machine import keep
from benchmarks.unmodified_gpu import WARM_UP, WINDOW, require_captured
from benchmarks.unmodified_scripts import CLASSES, Case, made_graph, sage, script

CASES = Case(sage, 1024, (25, 10)), Case(sage, 1024, (15, 10, 5))
#: Calls of one small operation after another.
_IN_A_ROW = 3
STATEMENTS = "batch", "model", "loss", "zero_grad", "backward", "optimizer"


def statements(
    g: dgl.DGLGraph, case: Case, mode: str, steps: int
) -> tuple[Mapping[str, float], float]:
    """Microseconds of the host for each statement, and of a step with the GPU's; medians."""
    dgl_mgpu.capture_models(mode == "captured")
    loader, model, optimizer, _ = script(g, case, steps + WARM_UP)
    batches, taken, windows = iter(loader), [], []
    for number in range(steps + WARM_UP):
        if number >= WARM_UP and number % WINDOW == 0:
            torch.cuda.synchronize()
            windows.append(time.perf_counter())
        times = [time.perf_counter()]
        _, _, blocks = next(batches)
        times.append(time.perf_counter())
        scores = model(blocks, blocks[0].srcdata["feat"])
        times.append(time.perf_counter())
        loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
        times.append(time.perf_counter())
        optimizer.zero_grad()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        if number >= WARM_UP:
            taken.append(times)
    torch.cuda.synchronize()
    windows.append(time.perf_counter())
    if mode == "captured":
        require_captured(case)
    dgl_mgpu.capture_models(False)
    of_step = statistics.median(b - a for a, b in itertools.pairwise(windows)) / WINDOW
    return _medians(STATEMENTS, taken), 1e6 * of_step


def operations(g: dgl.DGLGraph, case: Case, steps: int) -> dict[str, dict[str, Any]]:
    """Microseconds of the host for small operations between a captured step's batch and model."""
    dgl_mgpu.capture_models()
    loader, _, optimizer, loss_of = script(g, case, steps + WARM_UP)
    rows, event = torch.zeros(1024, device=this_device()), torch.cuda.Event()
    calls: dict[str, Callable[[], object]] = {
        "allocate": lambda: torch.empty(1024, device=rows.device),
        "add in place": lambda: rows.add_(1),
        "record an event": event.record,
        "make a view": lambda: rows.narrow(0, 1, 5),
    }
    taken: dict[str, list[list[float]]] = {name: [] for name in calls}
    for number, batch in enumerate(loader):
        for name, call in calls.items():
            times = [time.perf_counter()]
            for _ in range(_IN_A_ROW):
                call()
                times.append(time.perf_counter())
            if number >= WARM_UP:
                taken[name].append(times)
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
    require_captured(case)
    dgl_mgpu.capture_models(False)
    turns = [f"call {number}" for number in range(1, _IN_A_ROW + 1)]
    return {
        name: {**_medians(turns, taken[name]), "in a loop": _in_a_loop(call)}
        for name, call in calls.items()
    }


def _in_a_loop(call: Callable[[], object], times: int = 500) -> float:
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * spent / times


def torchs_own(case: Case, steps: int) -> Mapping[str, float]:
    """Microseconds of the host for torch's statements where the model's results are there."""
    device = this_device()
    model = case.model(len(case.fanouts)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, fused=True)
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    given = torch.randn(case.batch, CLASSES, device=device)
    labels = torch.randint(CLASSES, (case.batch,), device=device)
    taken = []
    for _ in range(steps):
        scores = given.detach().requires_grad_()
        times = [time.perf_counter()]
        loss = F.cross_entropy(scores, labels)
        times.append(time.perf_counter())
        optimizer.zero_grad()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        before = time.perf_counter()
        optimizer.step()
        times.append(times[-1] + time.perf_counter() - before)
        taken.append(times)
    return _medians(STATEMENTS[2:], taken)


def _medians(names: Sequence[str], taken: Sequence[Sequence[float]]) -> dict[str, float]:
    return {
        name: 1e6 * statistics.median(times[at + 1] - times[at] for times in taken)
        for at, name in enumerate(names)
    }


def main() -> None:
    """Print the host's time of each statement, and keep it in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=5_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    g = made_graph(*PowerLaw(options.nodes, options.edges).csc(this_device(), torch.int32))
    figures: dict[str, list[dict[str, Any]]] = {"operations": [], "statements": []}
    for name, times in operations(g, CASES[0], options.steps).items():
        figures["operations"].append({"case": name, **times})
        print(f"{name:46} {' '.join(f'{at} {of:.1f}' for at, of in times.items())}", flush=True)
    rows = figures["statements"]
    for case in CASES:
        found: dict[str, list[Any]] = {"eager": [], "captured": []}
        for _ in range(options.turns):
            for mode, turns in found.items():
                turns.append(statements(g, case, mode, options.steps))
        own = torchs_own(case, options.steps)
        for mode, turns in found.items():
            host = {name: statistics.median(each[name] for each, _ in turns) for name in STATEMENTS}
            step = statistics.median(of_step for _, of_step in turns)
            rows.append(
                {
                    "case": f"{case.name}, {mode}",
                    "host_us": host,
                    "host_total_us": sum(host.values()),
                    "step_us": step,
                    "torchs_own_us": own,
                    "turns": [{"host_us": each, "step_us": of} for each, of in turns],
                }
            )
            cells = " ".join(f"{name} {host[name]:.0f}" for name in STATEMENTS)
            print(f"{rows[-1]['case']:36} {step:6.0f} us: {cells}", flush=True)
            keep(options, figures)
        print(f"{'torch alone':46} {' '.join(f'{name} {of:.0f}' for name, of in own.items())}")


if __name__ == "__main__":
    main()

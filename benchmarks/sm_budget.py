"""Claim: a gather fills its link from a few multiprocessors, and leaves the others to the model.

Rows come from the GPUs (partitioned over all of them) and from host memory, and mini-batches are
sampled, on as many multiprocessors as each budget says; meanwhile matrix products run on another
stream.  Bandwidth and products' throughput are shown over the budget, alone and together
(PyTorch-Direct, figure 10), and the budget that a store's calibration finds is marked.  All ranks
at once; figures are the mean over ranks.

    python -m benchmarks.sm_budget --ranks 2 --out sm_budget.json --plot sm_budget.png
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gather_gpu import rows_of
from benchmarks.gpu import NumberedWords, PowerLaw, built_store, require_words, this_device
from benchmarks.machine import describe_machine
from benchmarks.sampling_gpu import Checker, our_hops
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.ops import GraphView, SampleKey, gather_rows, sample_blocks
from dgl_mgpu.store.calibration import calibrate, candidates
from dgl_mgpu.store.memory import FeatureSource, Store, TopologySource
from dgl_mgpu.store.planning import StoreOptions
from dgl_mgpu.train.launch.launch import launch

SUBJECTS = ("gpus", "host", "sampling")
ROW_BYTES = 512
#: Side of the matrices, and how long each stream works, in seconds, when it is alone.
SIDE, ALONE_SECONDS = 8192, 0.04
#: Batches of ids or seeds that take turns.
BATCHES = 8


@dataclass(frozen=True)
class Work:
    """What a stream does: so many calls, one after another."""

    call: Callable[[], Any]
    calls: int
    priority: int = 0


@dataclass(frozen=True)
class Subject:
    """An operator under a budget.

    Attributes
    ----------
    unit : str
        Of its speed.
    units : float
        In one call.
    call : callable
        Takes the budget.
    calibrated : int
        The budget that calibration found.
    seconds : float
        How long that took.
    """

    unit: str
    units: float
    call: Callable[[int], Any]
    calibrated: int
    seconds: float


@functools.cache
def stream(priority: int) -> torch.cuda.Stream:
    """The stream of a priority: always the same, which keeps its memory."""
    return torch.cuda.Stream(priority=priority)


def multiprocessors() -> int:
    """Of this rank's GPU."""
    return torch.cuda.get_device_properties(this_device()).multi_processor_count


def rates(*works: Work) -> list[float]:
    """Calls a second of each stream while all of them work."""
    stamps = []
    torch.cuda.synchronize()
    for work in works:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(work.calls + 1)]
        with torch.cuda.stream(stream(work.priority)):
            events[0].record()
            for event in events[1:]:
                work.call()
                event.record()
        stamps.append(events)
    torch.cuda.synchronize()
    first = stamps[0][0]
    return overlapping([[first.elapsed_time(event) / 1e3 for event in e] for e in stamps])


def overlapping(stamps: Sequence[Sequence[float]]) -> list[float]:
    """Calls a second from when the last stream begins until the first one ends.

    Parameters
    ----------
    stamps : sequence of sequences of float
        For each stream, when it began and when each of its calls was done, in seconds.
    """
    begin, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    if begin >= end:
        raise ValueError(f"one stream ended {begin - end:.3f} s before another began")
    done = [np.interp([begin, end], times, range(len(times))) for times in stamps]
    return [float(stop - start) / (end - begin) for start, stop in done]


def curve(subject: Subject, budgets: Sequence[int], ranks: Communicator) -> list[dict[str, Any]]:
    """Speed and TFLOP/s for each budget, alone and together: means, and what each rank had."""
    shape, device = (SIDE, SIDE), this_device()
    left, right = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    teraflop = 2 * SIDE**3 / 1e12

    def timed(call: Callable[[], Any], priority: int) -> Work:
        rates(Work(call, 1, priority))
        calls = math.ceil(ALONE_SECONDS * rates(Work(call, 2, priority))[0])
        return Work(call, max(2, calls), priority)

    points = []
    for budget in budgets:
        products = timed(lambda: torch.mm(left, right, out=product), 0)
        # A few blocks should not have to wait until a whole product is done.
        ours = timed(partial(subject.call, budget), -1)
        ranks.all_gather(None)
        alone = [*rates(products), *rates(ours)]
        ranks.all_gather(None)
        # Products first: a sampler waits for the GPU, and meanwhile nothing else is launched.
        both = rates(products, ours)
        points.append({
            "sms": float(budget),
            "alone": alone[1] * subject.units,
            "beside_gemm": both[1] * subject.units,
            "gemm_alone": alone[0] * teraflop,
            "gemm_beside": both[0] * teraflop,
        })  # fmt: skip
    everyone = ranks.all_gather(points)
    return [
        {
            **{key: float(np.mean([point[key] for point in same])) for key in same[0]},
            "each_rank": same,
        }
        for same in zip(*everyone, strict=True)
    ]


@contextlib.contextmanager
def gather_subject(
    where: str, options: argparse.Namespace, ranks: Communicator
) -> Iterator[Subject]:
    """A gather of rows in GPUs or in host memory."""
    nbytes = int(options.gb_per_gpu * 1e9) * ranks.size
    store_options: dict[str, Any] = {"policy": "partitioned"}
    if where == "host":
        nbytes = int(options.host_gb * 1e9)
        store_options = {"policy": "host", "host_memory": 2 * nbytes}
    source = {"rows": FeatureSource(NumberedWords(nbytes // ROW_BYTES, ROW_BYTES))}
    with built_store(source if ranks.rank == 0 else None, {}, ranks, store_options) as store:
        seconds = calibrated(store, StoreOptions(**store_options), ranks)
        view, device = rows_of(store.tables["rows"]), this_device()
        batches = list(torch.randint(view.num_rows, (BATCHES, options.ids), device=device))
        out = torch.empty(options.ids, *view.row_shape, device=device)
        words = torch.arange(view.row_shape[0], device=device)
        for sms in (0, 1):
            require_words(
                f"rows from {where}",
                partial(gather_rows, view, sms=sms),
                batches[0],
                lambda ids: ids[:, None] * len(words) + words,
            )
        turns = itertools.cycle(batches)
        yield Subject(
            "GB/s",
            options.ids * ROW_BYTES / 1e9,
            lambda sms: gather_rows(view, next(turns), out, sms=sms),
            view.host_sms if where == "host" else view.sms,
            seconds,
        )


@contextlib.contextmanager
def sampling_subject(options: argparse.Namespace, ranks: Communicator) -> Iterator[Subject]:
    """Sampling of mini-batches of the size that stores are planned for."""
    store_options, device = StoreOptions(policy="partitioned"), this_device()
    fanouts, batch = store_options.fanouts, store_options.batch_size
    indptr, indices = PowerLaw(options.nodes, options.edges).csc(device, torch.int32)
    source = None
    if ranks.rank == 0:
        arrays = indptr.cpu().numpy(), indices.cpu().numpy()
        source = {"graph": TopologySource(*arrays, None, options.nodes, torch.int32)}
    with built_store(source, {}, ranks, {"policy": "partitioned"}) as store:
        seconds = calibrated(store, store_options, ranks)
        view = store.tables["graph"].view
        assert isinstance(view, GraphView)
        seeds = torch.randperm(options.nodes, device=device)[: BATCHES * batch].int()
        batches = seeds.split(batch)
        for sms in (0, 1):
            hops = our_hops(sample_blocks(view, batches[0], fanouts, SampleKey(0), sms=sms))
            Checker(indptr, indices).require("sampling", batches[0], fanouts[::-1], *hops)
        turns = itertools.cycle(batches)
        yield Subject(
            "batches/s",
            1.0,
            lambda sms: sample_blocks(view, next(turns), fanouts, SampleKey(0), sms=sms),
            view.sms,
            seconds,
        )


def calibrated(store: Store, options: StoreOptions, ranks: Communicator) -> float:
    """Calibrate a store by measuring; how long it took, with kernels compiled, in seconds."""
    calibrate(store, options, ranks, cached=False)
    begin = time.perf_counter()
    calibrate(store, options, ranks, cached=False)
    return time.perf_counter() - begin


def work(options: argparse.Namespace) -> None:
    """All that a rank does."""
    ranks = Communicator.of_this_machine()
    torch.manual_seed(ranks.rank)
    num_sms = multiprocessors()
    found: dict[str, dict[str, Any]] = {}
    for name in options.subjects:
        make = sampling_subject if name == "sampling" else partial(gather_subject, name)
        with make(options, ranks) as subject:
            chosen = subject.calibrated or num_sms
            budgets = sorted({*candidates(num_sms), chosen})
            found[name] = {
                "unit": subject.unit,
                "calibrated": chosen,
                "calibration_seconds": max(ranks.all_gather(subject.seconds)),
                "points": curve(subject, budgets, ranks),
            }
    if ranks.rank == 0:
        show(found)
        about = {key: value for key, value in vars(options).items() if key not in ("out", "plot")}
        result = {"machine": describe_machine(), "options": about, "row_bytes": ROW_BYTES,
                  "subjects": found}  # fmt: skip
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        if options.plot:
            plot(found, options.ranks, options.plot)


def show(found: dict[str, dict[str, Any]]) -> None:
    """Print the curves; a star is at the calibrated budget."""
    for name, subject in found.items():
        unit = subject["unit"]
        print(f"{name}: calibrated in {subject['calibration_seconds']:.2f} s")
        print(f"{'SMs':>6} {unit:>10} {'beside GEMM':>12} {'TFLOP/s':>10} {'beside it':>10}")
        for p in subject["points"]:
            star = "*" if p["sms"] == subject["calibrated"] else " "
            print(
                f"{p['sms']:5.0f}{star} {p['alone']:10.1f} {p['beside_gemm']:12.1f}"
                f" {p['gemm_alone']:10.1f} {p['gemm_beside']:10.1f}"
            )


def plot(found: dict[str, dict[str, Any]], num_ranks: int, path: Path) -> None:
    """Draw the curves: speed above, throughput of products below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    gpus = f"{num_ranks} GPU{'s' if num_ranks > 1 else ''}"
    titles = {
        "gpus": f"{ROW_BYTES}-byte rows partitioned over {gpus}",
        "host": f"{ROW_BYTES}-byte rows from host memory, {gpus}",
        "sampling": f"sampling, topology partitioned over {gpus}",
    }
    figure = Figure(figsize=(4.8 * len(found), 6.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(found), sharex="col", squeeze=False)
    for (above, below), (name, subject) in zip(axes.T, found.items(), strict=True):
        points, chosen = subject["points"], subject["calibrated"]
        budgets = [p["sms"] for p in points]
        at = budgets.index(chosen)
        short = "gather" if subject["unit"] == "GB/s" else "sampler"
        for axis, keys, labels, colour in (
            (above, ("alone", "beside_gemm"), (f"{short} alone", "beside GEMM"), "#0072B2"),
            (below, ("gemm_alone", "gemm_beside"), ("GEMM alone", f"beside {short}"), "#D55E00"),
        ):
            for key, label, style in zip(keys, labels, ("o--", "o-"), strict=True):
                values = [p[key] for p in points]
                shade = colour if style == "o-" else "#999999"
                axis.plot(budgets, values, style, color=shade, label=label, markersize=4)
            axis.plot(chosen, values[at], "*", color=colour, markersize=14, zorder=3)
            axis.axvline(chosen, color="black", linewidth=1, linestyle=":", zorder=0,
                         label=f"calibrated: {chosen} SMs")  # fmt: skip
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            axis.legend(loc="lower right" if axis is above else "lower left", fontsize=8)
        above.set_title(titles[name], fontsize=10)
        above.set_ylabel(f"{short}, {subject['unit']} a GPU")
        below.set_ylabel(f"bfloat16 GEMM of {SIDE}, TFLOP/s a GPU")
        below.set_xlabel(f"multiprocessors for the {short}")
        below.set_xscale("log", base=2)
        below.set_xticks(budgets, [f"{budget:.0f}" for budget in budgets], fontsize=8)
        below.xaxis.set_minor_locator(NullLocator())
    canvas.print_png(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    parser.add_argument("--ids", type=int, default=500_000, help="rows a gather")
    parser.add_argument("--gb-per-gpu", type=float, default=2.0, help="partitioned table")
    parser.add_argument("--host-gb", type=float, default=8.0, help="table in host memory")
    parser.add_argument("--nodes", type=int, default=20_000_000, help="of the graph sampled")
    parser.add_argument("--edges", type=int, default=320_000_000)
    parser.add_argument("--out", type=Path, help="write the curves here, as JSON")
    parser.add_argument("--plot", type=Path, help="draw them here, as PNG")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it takes a GPU to share")
    launch(work, options.ranks, options)


if __name__ == "__main__":
    main()

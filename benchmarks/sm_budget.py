"""Claim: a gather fills its link from a few multiprocessors, and leaves the others to the model.

Rows come from the peers (partitioned over all GPUs) and from host memory, on as many
multiprocessors as each budget says; meanwhile a matrix product runs on another stream.  Bandwidth
and matrix throughput are shown over the budget, alone and together (PyTorch-Direct, figure 10).

    python -m benchmarks.sm_budget --ranks 2 --out sm_budget.json --plot sm_budget.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gather_gpu import rows_of
from benchmarks.gpu import NumberedWords, built_store, require_words, this_device
from benchmarks.machine import describe_machine
from dgl_mgpu.minibatch.launch import launch
from dgl_mgpu.ops import RowView, gather_rows
from dgl_mgpu.store import FeatureSource, Ranks

BUDGETS = (2, 4, 8, 16, 32, 64, 96, 132)
ROW_BYTES = 512
#: Side of the matrices, and how long each stream works, in milliseconds, when it is alone.
SIDE, ALONE_MS = 8192, 40.0


def milliseconds(*streams: tuple[torch.cuda.Stream, Callable[[], Any], int]) -> list[float]:
    """Time of each stream's calls, all streams at once."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in streams]
    torch.cuda.synchronize()
    for (stream, _, _), (start, _) in zip(streams, events, strict=True):
        start.record(stream)
    most = max(calls for _, _, calls in streams)
    for turn in range(most):
        for stream, call, calls in streams:
            # Launched in turns, so that neither waits for the host.
            if (turn + 1) * calls // most > turn * calls // most:
                with torch.cuda.stream(stream):
                    call()
    for (stream, _, _), (_, stop) in zip(streams, events, strict=True):
        stop.record(stream)
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def curve(view: RowView, num_ids: int, ranks: Ranks) -> list[dict[str, float]]:
    """GB/s and TFLOP/s for each budget, on this rank while all work."""
    device = this_device()
    ids = torch.randint(view.num_rows, (num_ids,), device=device)
    out = torch.empty(num_ids, *view.row_shape, device=device)
    left, right = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    gathers, products = torch.cuda.Stream(), torch.cuda.Stream()
    words = torch.arange(view.row_shape[0], device=device)
    require_words(
        "sm_budget",
        lambda ids: gather_rows(view, ids),
        ids,
        lambda i: i[:, None] * len(words) + words,
    )

    def multiply() -> None:
        torch.mm(left, right, out=product)

    points = []
    for budget in BUDGETS:

        def gather(budget: int = budget) -> None:
            gather_rows(view, ids, out, sms=budget)

        calls = []
        for stream, call in ((gathers, gather), (products, multiply)):
            milliseconds((stream, call, 1))
            calls.append(max(2, round(ALONE_MS / milliseconds((stream, call, 2))[0] * 2)))
        ranks.all_gather(None)
        alone = [milliseconds((gathers, gather, calls[0]))[0]]
        alone += milliseconds((products, multiply, calls[1]))
        ranks.all_gather(None)
        both = milliseconds((gathers, gather, calls[0]), (products, multiply, calls[1]))
        gigabytes = calls[0] * num_ids * view.row_bytes / 1e6
        teraflop = calls[1] * 2 * SIDE**3 / 1e9
        points.append({
            "sms": budget,
            "gather_alone": gigabytes / alone[0],
            "gather_beside_gemm": gigabytes / both[0],
            "gemm_alone": teraflop / alone[1],
            "gemm_beside_gather": teraflop / both[1],
        })  # fmt: skip
    return points


def work(options: argparse.Namespace) -> None:
    """All that a rank does."""
    ranks = Ranks.of_this_machine()
    torch.manual_seed(ranks.rank)
    tables = {"host": ({"policy": "host", "host_memory": 2 * int(options.host_gb * 1e9)},
                       int(options.host_gb * 1e9))}  # fmt: skip
    if ranks.size > 1:
        tables["peers"] = ({"policy": "partitioned"}, ranks.size * 2_000_000_000)
    curves = {}
    for name, (store_options, nbytes) in tables.items():
        source = {"rows": FeatureSource(NumberedWords(nbytes // ROW_BYTES, ROW_BYTES))}
        with built_store(source if ranks.rank == 0 else None, {}, ranks, store_options) as store:
            curves[name] = curve(rows_of(store.tables["rows"]), options.ids, ranks)
    if ranks.rank == 0:
        show(curves)
        result = {"machine": describe_machine(), "row_bytes": ROW_BYTES, "ranks": ranks.size,
                  "ids": options.ids, "host_gb": options.host_gb, "curves": curves}  # fmt: skip
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        if options.plot:
            plot(curves, options.plot)


def show(curves: dict[str, list[dict[str, float]]]) -> None:
    """Print the curves."""
    for name, points in curves.items():
        print(f"{name:8} {'SMs':>4} {'GB/s':>7} {'beside GEMM':>12} {'TFLOP/s':>8} {'beside':>7}")
        for p in points:
            print(
                f"{'':8} {p['sms']:4} {p['gather_alone']:7.1f} {p['gather_beside_gemm']:12.1f}"
                f" {p['gemm_alone']:8.1f} {p['gemm_beside_gather']:7.1f}"
            )


def plot(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Draw the curves: bandwidth above, matrix throughput below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, len(curves), sharex=True, squeeze=False, figsize=(5 * len(curves), 6)
    )
    for column, (name, points) in enumerate(curves.items()):
        budgets = [p["sms"] for p in points]
        for row, (kind, unit) in enumerate((("gather", "GB/s of rows"), ("gemm", "TFLOP/s"))):
            axis = axes[row][column]
            other = "gemm" if kind == "gather" else "gather"
            axis.plot(budgets, [p[f"{kind}_alone"] for p in points], "o-", label="alone")
            together = [p[f"{kind}_beside_{other}"] for p in points]
            axis.plot(budgets, together, "s--", label=f"beside the {other}")
            axis.set_ylim(bottom=0)
            axis.set_ylabel(f"{kind}, {unit}")
            axis.set_xscale("log", base=2)
            axis.set_xticks(budgets, [str(budget) for budget in budgets])
            axis.legend()
        axes[0][column].set_title(f"{ROW_BYTES}-byte rows from {name}")
        axes[1][column].set_xlabel("multiprocessors given to the gather")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--ids", type=int, default=500_000, help="rows a gather")
    parser.add_argument("--host-gb", type=float, default=8.0, help="table in host memory")
    parser.add_argument("--out", type=Path, help="write the curves here, as JSON")
    parser.add_argument("--plot", type=Path, help="draw them here, as PNG")
    options = parser.parse_args()
    launch(work, options.ranks, options)


if __name__ == "__main__":
    main()

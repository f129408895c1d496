"""Claim: the placement solver answers in under 50 ms, and no named placement beats its answer.

On the parts of a DGX-1 that XGNN compares placements on (section 6.6) and on machines with
NVSwitch, for two tables each of the shapes of the Twitter and Friendster graphs: the solver's
time (medians, all set-up included, of the clock and of the processor, whose difference other
programs on the machine make) and the modelled time of the slowest GPU for one mini-batch under
every policy.  Graphs are power laws of the shapes' mean degrees at 1/20 of their size, in GPU
memory of 1/20.  No time is reported for a plan that does not check.

    python -m benchmarks.placement_solver --out placement.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from dgl_mgpu.errors import PlanDoesNotFitError, UnreachableError
from dgl_mgpu.machine import Topology, preset
from dgl_mgpu.placement import POLICIES, Plan, TableSpec, solve

MACHINES = ("dgx1-4gf", "dgx1-4gc", "dgx1-6g", "dgx1-8g", "quad-v100", "dgx-a100", "hgx-h200")
#: Nodes, edges and feature width (XGNN, table 3).
SHAPES = {
    "twitter": (41_700_000, 1_500_000_000, 256),
    "friendster": (65_600_000, 3_600_000_000, 140),
}
#: GPU memory that tables get, up to what a V100 with 16 GB can give.
GIB_PER_GPU = (4, 8, 14)
SCALE = 20
LIMIT_MS = 50.0


def tables(shape: str) -> list[TableSpec]:
    """Topology and features; a mini-batch of 6000 seeds at fanouts 25, 10."""
    nodes, edges, width = (value // SCALE if value > 10_000 else value for value in SHAPES[shape])
    weights = np.random.default_rng(0).pareto(1.5, nodes) + 1
    degrees = np.sort(np.maximum(weights * edges / weights.sum(), 1).astype(np.int64))[::-1]
    # No hub has more neighbours than a thousandth of the nodes, so that none is much of the whole.
    degrees = np.minimum(degrees, nodes // 1000)
    return [
        TableSpec.topology("topology", degrees, accesses_per_step=66_000, fanout=24, id_bytes=4),
        TableSpec.features("features", nodes, 4 * width, degrees, accesses_per_step=600_000),
    ]


def timed(
    topology: Topology, specs: list[TableSpec], policy: str, budget: int, repeats: int
) -> Any:
    """Plan, and milliseconds of the clock and the processor of each repeat.

    None where a policy cannot be used.
    """
    spent = []
    plan: Plan | None = None
    for _ in range(repeats):
        start, used = time.perf_counter(), time.process_time()
        try:
            plan = solve(topology, specs, policy, gpu_budget_bytes=budget)
        except (UnreachableError, PlanDoesNotFitError):
            return None, None
        seconds = time.perf_counter() - start, time.process_time() - used
        spent.append([each * 1e3 for each in seconds])
    assert plan is not None
    plan.validate(topology)
    return plan, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    policies = [policy for policy in POLICIES if policy != "auto"]
    grid = Table(title="Modelled milliseconds of the slowest GPU for one mini-batch")
    for heading in ("machine", "graph", "GiB/GPU", "solver ms", "tiers", "auto", *policies):
        grid.add_column(heading, justify="left" if heading in ("machine", "graph") else "right")
    results: list[dict[str, Any]] = []
    for shape in SHAPES:
        specs = tables(shape)
        for name in MACHINES:
            topology = preset(name)
            for gib in GIB_PER_GPU:
                budget = gib * 2**30 // SCALE
                auto, samples = timed(topology, specs, "auto", budget, arguments.repeats)
                spent, used = (statistics.median(each) for each in zip(*samples, strict=True))
                _, of_xgnn = timed(topology, specs, "xgnn", budget, arguments.repeats)
                others = {
                    policy: timed(topology, specs, policy, budget, 1)[0] for policy in policies
                }
                modelled = {
                    policy: plan and plan.step_seconds * 1e3 for policy, plan in others.items()
                }
                tiers = [len(table.tiers) for table in auto.tables.values()]
                results.append({
                    "machine": name, "graph": shape, "gib_per_gpu": gib, "solver_ms": spent,
                    "solver_processor_ms": used, "samples": samples, "tiers": tiers,
                    "xgnn_ms": of_xgnn and statistics.median(clock for clock, _ in of_xgnn),
                    "modelled_ms": {"auto": auto.step_seconds * 1e3, **modelled},
                })  # fmt: skip
                grid.add_row(
                    name, shape, str(gib), f"{spent:.1f}", "+".join(map(str, tiers)),
                    f"{auto.step_seconds * 1e3:.3f}",
                    *("-" if value is None else f"{value:.3f}" for value in modelled.values()),
                )  # fmt: skip
    Console(width=160).print(grid)
    slowest = max(results, key=lambda row: row["solver_ms"])
    worst = max(
        row["modelled_ms"]["auto"] / value
        for row in results
        for value in row["modelled_ms"].values()
        if value
    )
    of_search = max(row["xgnn_ms"] for row in results if row["xgnn_ms"])
    print(
        f"slowest answer of auto {slowest['solver_ms']:.1f} ms ({slowest['machine']}; of the "
        f"processor {max(row['solver_processor_ms'] for row in results):.1f}; limit {LIMIT_MS} "
        f"ms), of XGNN's search alone {of_search:.1f} ms; auto is at most {worst:.4f} of any "
        "named policy's modelled time"
    )
    if arguments.out:
        report = {"machine": describe_machine(), "limit_ms": LIMIT_MS, "cases": results}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Claim: on XGNN's machines the solver's placement reads mini-batches faster than other systems'.

What XGNN measured on 8 V100s (tables 1 and 4, figures 10 to 13 and 15a), by the cost model: the
time of the slowest GPU to sample a mini-batch of 6000 seeds and to read its features, and the share
of features on GPUs, for placements as DGL, DGL with a cache, PyTorch-Direct, Quiver, CliqueOpt,
WholeGraph and XGNN make them, and for this package's ``auto``.  Nothing is measured, and only
reads are modelled: no software of these systems, no training.

Graphs have the papers' sizes at 1/20, in GPU memory of 1/20; times are those of the whole size.
Nodes are neighbours as often as a power law says, with the exponent at which one cache of XGNN's
table 4 has the hit rate stated there; the memory of a GPU that a store gets is what the caches of
the same table take.  No time is given for a plan that does not check; a system whose placement
does not fit or needs links that are not there has none.

    python -m benchmarks.placement_modelled --out placement_modelled.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from dgl_mgpu.errors import PlanDoesNotFitError, UnreachableError
from dgl_mgpu.machine import Topology, preset
from dgl_mgpu.placement import Degrees, Plan, TableSpec, Tier, minibatch_reads, solve
from dgl_mgpu.placement.cost import Resources, table_load

SCALE = 20
BATCH = 6000


@dataclass(frozen=True)
class Graph:
    """A data set of XGNN's table 3.

    Attributes
    ----------
    nodes, edges, width : int
    exponent : float
        Of the power law of how often nodes are neighbours: with it a cache has the hit rate that
        table 4 states for one of a system's caches (``fitted_to``: model, share, hit rate).
    fitted_to : tuple
    """

    nodes: int
    edges: int
    width: int
    exponent: float
    fitted_to: tuple[str, float, float]


GRAPHS = {
    "TW": Graph(41_700_000, 1_500_000_000, 256, 0.92, ("GCN", 0.09, 0.72)),
    "PA": Graph(111_000_000, 1_600_000_000, 128, 1.25, ("GCN", 0.08, 0.44)),
    "UK": Graph(77_700_000, 3_000_000_000, 256, 1.5, ("GCN", 0.42, 0.70)),
    "CF": Graph(65_600_000, 3_600_000_000, 140, 1.11, ("GCN", 0.10, 0.54)),
}
#: Neighbours drawn of each node, from the seeds on (section 6.1); for PinSAGE those that it keeps
#: of its random walks.
FANOUTS = {"GCN": (15, 10, 5), "GSG": (25, 10), "PSG": (5, 5, 5)}
#: Shares of the features that caches hold in table 4, on 8 GPUs: DGL+C's beside a copy of the
#: graph on each GPU where it runs, otherwise XGNN's, two copies of all it holds on 8 GPUs.
CACHED: dict[tuple[str, str], tuple[str, float]] = {
    ("GCN", "TW"): ("DGL+C", 0.09), ("GCN", "PA"): ("DGL+C", 0.08),
    ("GCN", "UK"): ("XGNN", 0.42), ("GCN", "CF"): ("XGNN", 0.10),
    ("GSG", "TW"): ("DGL+C", 0.16), ("GSG", "PA"): ("DGL+C", 0.11),
    ("GSG", "UK"): ("DGL+C", 0.01), ("GSG", "CF"): ("XGNN", 0.93),
    ("PSG", "TW"): ("DGL+C", 0.10), ("PSG", "PA"): ("DGL+C", 0.08),
    ("PSG", "UK"): ("XGNN", 0.35), ("PSG", "CF"): ("XGNN", 0.28),
}  # fmt: skip


@dataclass(frozen=True)
class System:
    """How a system places both tables, one after the other.

    Attributes
    ----------
    graph, features : str
        Policies; a graph that is not left to the host must be on GPUs as a whole.
    whole_graph : bool
        Whether that is so; otherwise as much of it is on GPUs as there is room for.
    features_first : bool
    """

    graph: str
    features: str
    whole_graph: bool = True
    features_first: bool = False


SYSTEMS = {
    "DGL": System("replicated", "host"),
    "DGL+C": System("replicated", "replicated"),
    "PyTorch-Direct": System("host", "host"),
    "Quiver": System("host", "clique"),
    "WholeGraph": System("partitioned", "partitioned"),
    "XGNN": System("xgnn", "xgnn"),
}
AUTO = "auto"
#: XGNN's figure 10, without what is not placement.
FACTORS = {
    "BASE": SYSTEMS["DGL+C"],
    "+MSG": System("clique", "replicated"),
    "+MSF": System("clique", "clique"),
    "+PSA": SYSTEMS["XGNN"],
}
#: Figure 13: the features alone are placed in other ways.
PLACEMENTS = {
    "Clique": System("xgnn", "clique"),
    "CliqueOpt": System("xgnn", "clique_opt"),
    "Solver": SYSTEMS["XGNN"],
}
#: Figure 15a, on one GPU that cannot hold the graph.
PRIORITIES = {
    "DGL-Host": System("host", "host"),
    "Quiver": System("host", "replicated"),
    "XGNN-G": System("replicated", "replicated", whole_graph=False),
    "XGNN-F": System("replicated", "replicated", whole_graph=False, features_first=True),
}


@cache
def tables(model: str, data: str) -> tuple[TableSpec, TableSpec]:
    """Graph and features, at 1/20 of their size, with the expected reads of a mini-batch."""
    graph = GRAPHS[data]
    n = graph.nodes // SCALE
    weights = ((np.arange(n) + 0.5) / n) ** (-1 / graph.exponent)
    degrees = np.full(n, graph.edges / graph.nodes)
    # No row that is sampled is taken to be shorter than what is drawn: hot ones are long.
    long = Degrees("", np.full(n, 1000))
    reads = minibatch_reads({"": weights}, [long], BATCH // SCALE, FANOUTS[model][::-1])
    return (
        TableSpec.topology("graph", degrees, reads.sampled[""], fanout=reads.fanout, id_bytes=4),
        TableSpec.features("features", n, 4 * graph.width, reads.nodes[""]),
    )


def gpu_budget(model: str, data: str) -> int:
    """Bytes of a GPU that a store gets, at 1/20: what the caches of XGNN's table 4 take."""
    graph, features = tables(model, data)
    system, share = CACHED[model, data]
    if system == "DGL+C":
        return int(graph.total_bytes + share * features.total_bytes)
    return int((graph.total_bytes + share * features.total_bytes) * 2 / 8)


def placed(topology: Topology, model: str, data: str, system: System | None) -> dict[str, Any]:
    """What the cost model says of a placement; of ``auto``, if there is no system.

    Keys are ``sample_ms``, ``extract_ms`` and ``read_ms``, both together, None if the placement
    is not possible; ``cached`` and ``hit_rate``, the shares of the features and of their reads that
    are on GPUs; and ``copies``, bytes on all GPUs over those of distinct rows there.
    """
    specs = tables(model, data)
    budget = gpu_budget(model, data)
    try:
        plans = _plans(topology, specs, budget, system)
    except (UnreachableError, PlanDoesNotFitError):
        return dict.fromkeys(("sample_ms", "extract_ms", "read_ms", "cached", "hit_rate", "copies"))
    tiers = {name: plan.tables[name].tiers for plan in plans for name in plan.tables}
    resources = Resources.of(topology)
    loads = [table_load(resources, spec, tiers[spec.name]) for spec in specs]
    times = [resources.gpu_seconds(load).max() * 1e3 * SCALE for load in (*loads, np.add(*loads))]
    on_gpus = [_on_gpus(spec, tiers[spec.name]) for spec in specs]
    _, features = specs
    return {
        **dict(zip(("sample_ms", "extract_ms", "read_ms"), map(float, times), strict=True)),
        "cached": on_gpus[1] / features.total_bytes,
        "hit_rate": 1 - _hit_rates(plans, features.name)["host"],
        "copies": sum(sum(plan.gpu_bytes) for plan in plans) / max(sum(on_gpus), 1),
    }


def _plans(
    topology: Topology, specs: Sequence[TableSpec], budget: int, system: System | None
) -> list[Plan]:
    if system is None:
        plans = [solve(topology, specs, AUTO, gpu_budget_bytes=budget)]
    else:
        graph, features = specs
        ratio = 1.0 if system.whole_graph and system.graph != "host" else None
        order: list[tuple[TableSpec, str]] = [(graph, system.graph), (features, system.features)]
        plans, budgets = [], np.full(topology.num_gpus, budget)
        for spec, policy in reversed(order) if system.features_first else order:
            plan = solve(
                topology, [spec], policy, gpu_budget_bytes=budgets.tolist(), graph_ratio=ratio
            )
            budgets = budgets - np.array(plan.gpu_bytes)
            plans.append(plan)
    for plan in plans:
        plan.validate(topology)
    return plans


def _on_gpus(spec: TableSpec, tiers: Sequence[Tier]) -> float:
    """Bytes of a table's rows that some GPU holds."""
    return sum(
        float(np.diff(spec.bytes_before((tier.start, tier.stop)))[0])
        for tier in tiers
        if tier.memory == "gpu"
    )


def _hit_rates(plans: Sequence[Plan], table: str) -> Any:
    return next(plan.hit_rates[table] for plan in plans if table in plan.hit_rates)


def table_1() -> list[dict[str, Any]]:
    """GraphSAGE on Twitter's graph, on one GPU, on 4 that are all linked and on 8 that are not."""
    return [
        {"gpus": machine.num_gpus, "system": name, **placed(machine, "GSG", "TW", system)}
        for machine in (preset("dgx1", 1), preset("dgx1-4gf"), preset("dgx1-8g"))
        for name, system in [*SYSTEMS.items(), (AUTO, None)]
    ]


def table_4() -> list[dict[str, Any]]:
    """All systems on 8 GPUs of a DGX-1; WholeGraph's needs GPUs that are all linked."""
    topology = preset("dgx1-8g")
    return [
        {"model": model, "data": data, "system": name, **placed(topology, model, data, system)}
        for model, data in CACHED
        for name, system in [*SYSTEMS.items(), (AUTO, None)]
    ]


def figure_10() -> list[dict[str, Any]]:
    topology = preset("dgx1-8g")
    return [
        {"model": model, "data": data, "with": name, **placed(topology, model, data, system)}
        for model, data in (("GCN", "TW"), ("GCN", "PA"), ("GSG", "UK"), ("GSG", "CF"))
        for name, system in FACTORS.items()
    ]


def figures_11_and_12() -> list[dict[str, Any]]:
    """By numbers of GPUs; ``epoch_ms`` is what an epoch's reads take, over its mini-batches."""
    found = []
    for model, data in (("GCN", "PA"), ("GSG", "UK")):
        for gpus in (1, 2, 4, 8):
            for name in ("DGL+C", "XGNN", AUTO):
                result = placed(preset("dgx1", gpus), model, data, SYSTEMS.get(name))
                found.append({
                    "model": model, "data": data, "gpus": gpus, "system": name, **result,
                    "epoch_ms": result["read_ms"] and result["read_ms"] / gpus,
                })  # fmt: skip
    return found


def figure_13() -> list[dict[str, Any]]:
    return [
        {"machine": name, "data": data, "policy": policy, **placed(machine, "GSG", data, system)}
        for name in ("4gf", "4gc", "6g", "8g")
        for machine in [preset(f"dgx1-{name}")]
        for data in ("TW", "CF")
        for policy, system in [*PLACEMENTS.items(), (AUTO, None)]
    ]


def figure_15a() -> list[dict[str, Any]]:
    machine = preset("dgx1", 1)
    return [
        {"system": name, **placed(machine, "GSG", "CF", system)}
        for name, system in [*PRIORITIES.items(), (AUTO, None)]
    ]


def _printed(title: str, rows: list[dict[str, Any]]) -> Table:
    grid = Table(title=title)
    for heading in rows[0]:
        grid.add_column(heading)
    for row in rows:
        shown = (f"{each:.3g}" if isinstance(each, float) else str(each) for each in row.values())
        grid.add_row(*("-" if each == "None" else each for each in shown))
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    found = {
        function.__name__: function()
        for function in (table_1, table_4, figure_10, figures_11_and_12, figure_13, figure_15a)
    }
    console = Console(width=140)
    for name, rows in found.items():
        console.print(_printed(f"Modelled: XGNN's {name.replace('_', ' ')}", rows))
    if options.out:
        graphs = {name: asdict(graph) for name, graph in GRAPHS.items()}
        report = {"machine": describe_machine(), "modelled": True, "graphs": graphs, **found}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

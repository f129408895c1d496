"""Placements whose plans must be the same bits on every machine.

    python -m tests.placement.cases > tests/placement/digests.json

writes their digests anew: after a change that is meant to change plans.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np

from dgl_mgpu.machine import HostGroup, Topology, preset
from dgl_mgpu.placement import POLICIES, Plan, TableSpec, minibatch_reads, solve
from dgl_mgpu.placement.hotness import Degrees

PRESETS = (
    "single", "dgx1-4gf", "dgx1-4gc", "dgx1-6g", "dgx1", "hgx-h200", "dgx-a100", "dgx-h100",
    "pcie", "quad-v100", "cpu",
)  # fmt: skip
RANDOM_CASES = 50


def plans() -> Iterator[tuple[str, Plan]]:
    """All cases, by name."""
    tables = _graph(np.random.default_rng(1), 40_000, 100)
    total = sum(table.total_bytes for table in tables)
    for name in PRESETS:
        for share in (0.05, 0.3):
            topology = preset(name)
            plan = solve(topology, tables, gpu_budget_bytes=int(share * total))
            yield f"{name} {share}", plan
    for case in range(RANDOM_CASES):
        yield f"random {case}", _random(np.random.default_rng(case))


def _graph(rng: np.random.Generator, rows: int, width: int) -> list[TableSpec]:
    """A graph's topology and features, read as mini-batches read them, hottest rows first."""
    degrees = np.minimum(rng.zipf(1.7, rows), rows // 4)
    reads = minibatch_reads(
        {"_N": degrees}, [Degrees("_N", degrees)], int(rng.integers(16, 1024)), (10, 10)
    )
    sampled, read = (np.sort(each["_N"])[::-1] for each in (reads.sampled, reads.nodes))
    return [
        TableSpec.topology("graph", np.sort(degrees)[::-1], sampled),
        TableSpec.features("feat", rows, 4 * width, read),
    ]


def _random(rng: np.random.Generator) -> Plan:
    """Some machine, some graph, some budget and policy."""
    n = int(rng.integers(1, 6))
    links = np.diag(np.full(n, float(rng.choice([700.0, 2000.0]))))
    for one in range(n):
        for other in range(one):
            links[one, other] = links[other, one] = rng.choice([0.0, 25.0, 50.0, 300.0])
    groups = ()
    if n > 2 and rng.random() < 0.5:
        groups = (HostGroup((0, 1), 16.0),)
    topology = Topology(
        "drawn", links, np.full(n, 10**12), np.full(n, 12.5), 10**12, groups,
        None, 3.0, 10**12,
    )  # fmt: skip
    tables = _graph(rng, int(rng.integers(3_000, 60_000)), int(rng.integers(4, 300)))
    total = sum(table.total_bytes for table in tables)
    policies = [name for name in POLICIES if name != "partitioned"]
    policy = str(rng.choice(policies)) if rng.random() < 0.3 else "auto"
    budgets = [int(total * share) for share in rng.random(n) * 0.6]
    if rng.random() < 0.5:
        budgets = budgets[:1] * n
    return solve(
        topology, tables, policy, gpu_budget_bytes=budgets,
        host_budget=int(total * (0.3 + 0.7 * rng.random())), allow_disk=True,
    )  # fmt: skip


def digests() -> dict[str, str]:
    """Case → digest of its plan: tiers, copies, readers, bytes and modelled times."""
    return {
        name: hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
        for name, plan in plans()
    }


if __name__ == "__main__":
    print(json.dumps(digests(), indent=1))

from __future__ import annotations

import numpy as np
import pytest

from dgl_mgpu.machine import preset
from dgl_mgpu.placement import TableSpec, Tier, solve
from dgl_mgpu.placement.rounding import simplify


def gpu(start: int, stop: int, *copies: tuple[int, ...]) -> Tier:
    """A tier of two GPUs whose parts are read from their first copy."""
    first = tuple(holders[0] for holders in copies)
    return Tier(start, stop, "gpu", len(copies), copies, (first, first))


def off_gpu(start: int, stop: int, memory: str) -> Tier:
    return Tier(start, stop, memory, 1, ((),), ((-1,), (-1,)))  # type: ignore[arg-type]


def test_a_patchwork_becomes_one_tier_for_each_kind_of_memory():
    patchwork = [
        off_gpu(0, 100, "host"),
        gpu(100, 400, (0,), (1,)),
        off_gpu(400, 450, "disk"),
        gpu(450, 550, (0, 1)),
        off_gpu(550, 700, "host"),
        gpu(700, 1000, (0,), (1,)),
    ]
    tiers = simplify(TableSpec.features("f", 1000, 64), patchwork)
    assert [(t.start, t.stop, t.memory, t.copies) for t in tiers] == [
        (0, 100, "gpu", ((0, 1),)),
        (100, 700, "gpu", ((0,), (1,))),
        (700, 950, "host", ((),)),
        (950, 1000, "disk", ((),)),
    ]


def test_kinds_keep_their_bytes_where_rows_differ_in_size():
    degrees = np.arange(1000, 0, -1)
    spec = TableSpec.topology("t", degrees)
    tiers = simplify(spec, [off_gpu(0, 300, "host"), gpu(300, 1000, (0,), (1,))])
    assert [tier.memory for tier in tiers] == ["gpu", "host"]
    kept = float(spec.bytes_before(tiers[0].stop))
    asked = float(spec.total_bytes - spec.bytes_before(300))
    assert abs(kept - asked) <= 8 * 1001  # one row


def test_patterns_of_as_many_copies_are_mixed_by_their_share():
    runs = [gpu(0, 600, (0,)), gpu(600, 900, (1,)), gpu(900, 1000, (0,))]
    (tier,) = simplify(TableSpec.features("f", 1000, 64), runs)
    assert (tier.start, tier.stop) == (0, 1000)
    share = tier.copies.count((0,)) / tier.parts
    assert share == pytest.approx(0.7, abs=0.02)
    assert tier.source == (tuple(c[0] for c in tier.copies),) * 2


@pytest.mark.parametrize("machine", ["cpu", "hgx-h200", "pcie", "quad-v100"])
@pytest.mark.parametrize("mebibytes", [1, 4, 16])
def test_fully_linked_machines_get_few_tiers(machine, mebibytes):
    degrees = np.sort(np.random.default_rng(0).pareto(1.5, 50_000).astype(int) + 1)[::-1]
    tables = [
        TableSpec.topology("t", degrees, degrees),
        TableSpec.features("f", 50_000, 400, degrees),
    ]
    plan = solve(preset(machine), tables, gpu_budget_bytes=mebibytes << 20)
    plan.validate(preset(machine))
    assert all(len(table.tiers) <= 5 for table in plan.tables.values())

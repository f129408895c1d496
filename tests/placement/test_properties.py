"""Properties that hold on any machine, for any tables and budgets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dgl_mgpu.machine import HostGroup, Topology
from dgl_mgpu.placement import Plan, TableSpec, solve

# The solver stops within 0.3 % of the optimum (a readable plan: 0.4 %), and then rounds to whole
# rows: tables are drawn so that no row counts for much.
SLACK = 1.005
#: All but the one that asks for all links.
POLICIES = ["auto", "xgnn", "clique", "clique_opt", "replicated", "host"]


@st.composite
def machines(draw):
    n = draw(st.integers(1, 5))
    links = np.diag(np.full(n, draw(st.sampled_from([500.0, 2000.0]))))
    for one in range(n):
        for other in range(one):
            width = draw(st.sampled_from([0.0, 0.0, 20.0, 25.0, 50.0, 300.0]))
            links[one, other] = links[other, one] = width
            if draw(st.booleans()):  # perhaps one GPU reads, and the other does not
                links[draw(st.sampled_from([(one, other), (other, one)]))] = 0.0
    groups = ()
    if n > 1 and draw(st.booleans()):
        members = tuple(sorted(draw(st.sets(st.integers(0, n - 1), min_size=2, max_size=n))))
        groups = (HostGroup(members, draw(st.sampled_from([10.0, 15.0, 30.0]))),)
    return Topology(
        "drawn", links, np.full(n, 10**12), np.full(n, draw(st.sampled_from([10.0, 25.0]))),
        10**12, groups, draw(st.sampled_from([None, 40.0])),
    )  # fmt: skip


@st.composite
def tables(draw):
    specs = []
    for index in range(draw(st.integers(1, 2))):
        rows = draw(st.integers(20_000, 2_000_000))
        at = np.unique(np.geomspace(1, rows, 40).astype(np.int64))
        hot = np.concatenate([[0.0], (at / rows) ** draw(st.floats(0.7, 1.0))])
        row_bytes = draw(st.sampled_from([16, 100, 512, 2048]))
        specs.append(
            TableSpec(
                f"table {index}", draw(st.sampled_from(["topology", "features"])),
                np.concatenate([[0], at]), np.concatenate([[0], at]) * float(row_bytes),
                hot * draw(st.floats(1e3, 1e6)), float(row_bytes), float(row_bytes),
            )
        )  # fmt: skip
    return specs


@settings(max_examples=60)
@given(machines(), tables(), st.floats(0, 1.2), st.sampled_from(POLICIES))
def test_plans_are_valid(machine, specs, share, policy):
    budget = int(share * sum(spec.total_bytes for spec in specs))
    plan = solve(machine, specs, policy, gpu_budget_bytes=budget)
    plan.validate(machine)
    assert max(plan.gpu_bytes) <= budget
    for spec in specs:
        assert plan.tables[spec.name].num_rows == spec.num_rows
    assert Plan.from_dict(plan.to_dict()).to_dict() == plan.to_dict()


@settings(max_examples=40)
@given(machines(), tables(), st.floats(0, 1.2), st.floats(0, 1.2))
def test_more_memory_is_never_worse(machine, specs, one, other):
    total = sum(spec.total_bytes for spec in specs)
    less, more = (
        solve(machine, specs, gpu_budget_bytes=int(share * total)).step_seconds
        for share in sorted((one, other))
    )
    assert more <= SLACK * less


@settings(max_examples=25)
@given(machines(), tables(), st.floats(0, 1.2))
def test_another_link_is_never_worse(machine, specs, share):
    budget = int(share * sum(spec.total_bytes for spec in specs))
    linked = [
        (one, other)
        for one in range(machine.num_gpus)
        for other in range(one)
        if machine.link_bandwidth[one, other]
    ]
    if linked:
        less = solve(machine.without_links(linked[0]), specs, gpu_budget_bytes=budget)
        more = solve(machine, specs, gpu_budget_bytes=budget)
        assert more.step_seconds <= SLACK * less.step_seconds

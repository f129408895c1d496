"""What is asked for is what is planned; what cannot be is refused with a way out."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import highspy
import numpy as np
import pytest

from dgl_mgpu.errors import ConfigError, InvalidInputError, PlanDoesNotFitError
from dgl_mgpu.machine import preset
from dgl_mgpu.placement import HOST, POLICIES, TableSpec, cost, solve
from dgl_mgpu.placement.cost import Resources, estimate
from tests.placement.oracle import plan_seconds

ROWS = 100_000
DEGREES = np.sort((np.random.default_rng(1).pareto(1.5, ROWS) * 10 + 1).astype(int))[::-1]
GRAPH = TableSpec.topology("graph", np.minimum(DEGREES, 2000), accesses_per_step=2e4)
FEATURES = TableSpec.features("feat", ROWS, 400, DEGREES, 1e5)
TABLES = [GRAPH, FEATURES]
TOTAL = sum(table.total_bytes for table in TABLES)
# The solver stops within 0.3 % of the optimum, and a readable plan may cost 0.4 %.
SLACK = 1.005


def rows_on_gpus(plan, name):
    return sum(tier.num_rows for tier in plan.tables[name].tiers if tier.memory == "gpu")


@pytest.mark.parametrize(
    ("name", "share"),
    list(itertools.product(
        ["single", "dgx1-4gf", "dgx1-4gc", "dgx1-6g", "dgx1", "hgx-h200", "dgx-a100", "pcie",
         "quad-v100", "cpu"],
        [0.0, 0.1, 0.4, 1.5],
    )),
)  # fmt: skip
def test_auto_is_valid_and_no_named_policy_beats_it(name, share):
    topology = preset(name)
    budget = int(share * TOTAL / topology.num_gpus)
    auto = solve(topology, TABLES, gpu_budget_bytes=budget)
    auto.validate(topology)
    for policy in POLICIES:
        if policy == "partitioned" and (share < 1 or not topology.fully_linked):
            continue
        plan = solve(topology, TABLES, policy, gpu_budget_bytes=budget)
        plan.validate(topology)
        assert auto.step_seconds <= SLACK * plan.step_seconds, policy


def test_modelled_seconds_are_those_of_the_plain_model():
    """With ports, host groups, disk and the switch; requests at full efficiency."""
    spec = TableSpec.features("x", 100_000, 4096, 1 / np.arange(1, 100_001), 1e4)
    for name, kwargs in (
        ("hgx-h200", {"gpu_budget_bytes": 10**7}),
        ("pcie", {"gpu_budget_bytes": 3 * 10**7}),
        ("dgx1", {"gpu_budget_bytes": 10**7, "host_budget": 2 * 10**8, "allow_disk": True}),
    ):
        plan = solve(preset(name), [spec], **kwargs)
        expected = plan_seconds(preset(name), [spec], plan)
        np.testing.assert_allclose(plan.seconds, expected, rtol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 12])
def test_equal_memory_keeps_one_copy_partitioned_over_all_ranks(ranks):
    topology = preset("cpu", ranks)
    plan = solve(topology, TABLES)
    for table in plan.tables.values():
        (tier,) = table.tiers
        assert (tier.memory, tier.parts) == ("gpu", ranks)
        assert tier.copies == tuple((rank,) for rank in range(ranks))
    less = solve(topology, TABLES, gpu_budget_bytes=int(0.5 * TOTAL / ranks))
    assert sum(less.gpu_bytes) + less.host_bytes == pytest.approx(TOTAL, rel=1e-4)


def test_switched_gpus_replicate_the_hottest_and_partition_the_rest():
    plan = solve(preset("hgx-h200"), [FEATURES], gpu_budget_bytes=int(0.2 * TOTAL))
    copies = [len(tier.copies[0]) for tier in plan.tables["feat"].tiers]
    assert copies[0] == 8 and copies == sorted(copies, reverse=True)
    assert plan.host_bytes == 0


def test_a_gpu_without_links_reads_the_others_parts_from_the_host():
    """A line of two, and one alone: with little memory not everything can be everywhere."""
    topology = preset("dgx1-4gf", 3).without_links((0, 2), (1, 2))
    plan = solve(topology, [FEATURES], gpu_budget_bytes=int(0.1 * FEATURES.total_bytes))
    plan.validate(topology)
    for tier in plan.tables["feat"].tiers:
        if tier.memory == "gpu":
            assert set(tier.source[2]) <= {2, HOST}
    assert plan.gpu_bytes[2] > 0.9 * plan.gpu_budget[2]  # it still caches for itself


@pytest.mark.parametrize("policy", ["auto", "xgnn", "clique_opt", "replicated"])
def test_ratios_say_how_many_rows_are_on_gpus(policy):
    plan = solve(preset("dgx1"), TABLES, policy, graph_ratio=0.5, feature_ratio=0.123,
                 gpu_budget_bytes=int(TOTAL))  # fmt: skip
    assert rows_on_gpus(plan, "graph") == 50_000
    assert rows_on_gpus(plan, "feat") == 12_300


def test_one_ratio_leaves_the_other_to_the_solver():
    plan = solve(preset("dgx1"), TABLES, graph_ratio=0.0, feature_ratio="auto",
                 gpu_budget_bytes=int(0.05 * TOTAL))  # fmt: skip
    assert rows_on_gpus(plan, "graph") == 0
    assert 0 < rows_on_gpus(plan, "feat") < ROWS


@pytest.mark.parametrize("ratio", [-0.1, 1.01, float("nan"), "all", True])
@pytest.mark.parametrize("which", ["graph_ratio", "feature_ratio"])
def test_ratios_outside_0_to_1_are_refused(which, ratio):
    with pytest.raises(ConfigError, match=which):
        solve(preset("dgx1"), TABLES, **{which: ratio})


@pytest.mark.parametrize("which", ["graph_ratio", "feature_ratio"])
def test_the_policy_host_keeps_no_share_on_gpus(which):
    with pytest.raises(ConfigError, match=which):
        solve(preset("dgx1"), TABLES, "host", **{which: 0.5})
    assert rows_on_gpus(solve(preset("dgx1"), TABLES, "host", **{which: 0.0}), "feat") == 0


def test_a_ratio_that_does_not_fit_says_by_how_much_and_which_would():
    topology, budget = preset("hgx-h200", 4), int(0.2 * TOTAL)
    with pytest.raises(PlanDoesNotFitError) as caught:
        solve(topology, TABLES, graph_ratio=1.0, feature_ratio=1.0, gpu_budget_bytes=budget)
    error = caught.value
    # One copy of everything, over four GPUs.
    assert error.needed == pytest.approx(TOTAL / 4, rel=0.01)
    assert error.available == budget
    solve(topology, TABLES, graph_ratio=1.0, feature_ratio=1.0,
          gpu_budget_bytes=int(error.needed * 1.01))  # fmt: skip
    offered = {
        name: float(value) for name, value in re.findall(r"(\w+_ratio)=([\d.]+)", str(error))
    }
    assert set(offered) == {"graph_ratio", "feature_ratio"}
    solve(topology, TABLES, **offered, gpu_budget_bytes=budget)
    with pytest.raises(PlanDoesNotFitError):
        solve(topology, TABLES, gpu_budget_bytes=budget,
              **{name: value * 1.02 for name, value in offered.items()})  # fmt: skip


def test_rows_that_fit_nowhere_are_counted():
    arguments = {"gpu_budget_bytes": int(0.01 * TOTAL), "host_budget": int(0.5 * TOTAL)}
    with pytest.raises(PlanDoesNotFitError, match="allow the disk") as caught:
        solve(preset("dgx1"), TABLES, **arguments)
    missing = caught.value.needed - caught.value.available
    # A row takes two of the eight GPUs, or some could not read it: 1 - 0.5 - 8 * 0.01 / 2.
    assert missing == pytest.approx(0.46 * TOTAL, rel=0.01)
    plan = solve(preset("dgx1"), TABLES, **arguments, allow_disk=True)
    plan.validate(preset("dgx1"))
    assert 0.99 * missing <= plan.disk_bytes < 1.3 * missing
    coldest = plan.tables["feat"].tiers[-1]
    assert coldest.memory == "disk"


def test_disk_needs_a_disk():
    with pytest.raises(ConfigError, match="has no disk"):
        solve(replace(preset("dgx1"), disk_bandwidth=0.0), TABLES, allow_disk=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"gpu_budget_bytes": -1},
        {"gpu_budget_bytes": [1, 2, 3]},
        {"gpu_budget_bytes": 1.5},
        {"host_budget": -5},
    ],
)
def test_budgets_that_are_none_are_refused(arguments):
    with pytest.raises(ConfigError):
        solve(preset("dgx1"), TABLES, **arguments)


def test_unknown_policy_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'clique_opt'"):
        solve(preset("dgx1"), TABLES, "cliqueopt")


@pytest.mark.parametrize("tables", [[], [FEATURES, FEATURES]])
def test_tables_are_named_once_each(tables):
    with pytest.raises(InvalidInputError):
        solve(preset("dgx1"), tables)


@pytest.mark.parametrize("rows", [0, 1, 3, 50])
@pytest.mark.parametrize("name", ["dgx1", "hgx-h200", "cpu"])
def test_tables_smaller_than_the_machine(name, rows):
    spec = TableSpec.features("x", rows, 8, accesses_per_step=10.0)
    for budget in (0, 8, 100, None):
        plan = solve(preset(name), [spec], gpu_budget_bytes=budget)
        plan.validate(preset(name))
        assert plan.tables["x"].num_rows == rows


def test_a_row_that_is_much_of_the_whole_is_not_dealt_out():
    """Half of all reads are of one row: the plan must not take it for divisible."""
    hotness = np.array([100.0, *np.ones(100)])
    spec = TableSpec.features("x", 101, 4096, hotness, 1e4)
    topology = preset("dgx1-4gf")
    auto = solve(topology, [spec])
    named = [solve(topology, [spec], policy).step_seconds for policy in ("replicated", "xgnn")]
    assert auto.step_seconds <= min(named) * SLACK
    assert auto.policy == "auto"


@pytest.mark.parametrize("share", [0.02, 0.05, 0.5, 3.0])
def test_hubs_of_the_size_of_thousands_of_rows(share):
    """One row may be more than what rounding is given: the plan still keeps to its budgets."""
    hubs = np.sort((np.random.default_rng(0).pareto(1.1, 200_000) * 10 + 1).astype(int))[::-1]
    specs = [
        TableSpec.topology("graph", np.minimum(hubs, 50_000), accesses_per_step=2e4),
        TableSpec.features("feat", 200_000, 400, hubs, 1e5),
    ]
    topology = preset("dgx1-6g")
    budget = int(share * sum(spec.total_bytes for spec in specs) / 6)
    solve(topology, specs, gpu_budget_bytes=budget).validate(topology)


def test_the_same_question_has_the_same_answer():
    one, other = (
        solve(preset("dgx1"), TABLES, gpu_budget_bytes=int(0.1 * TOTAL)) for _ in range(2)
    )
    assert one.to_dict() == other.to_dict()


def test_what_highs_gives_up_is_solved_from_the_beginning(monkeypatch):
    arguments = {"gpu_budget_bytes": int(0.1 * TOTAL)}
    expected = solve(preset("dgx1"), TABLES, **arguments)
    run, calls = highspy.Highs.run, itertools.count()
    monkeypatch.setattr(highspy.Highs, "run", lambda highs: next(calls) % 2 and run(highs))
    plan = solve(preset("dgx1"), TABLES, **arguments)
    assert next(calls) > 2
    assert plan.step_seconds == pytest.approx(expected.step_seconds, rel=0.01)


def test_budgets_may_differ_between_gpus():
    budgets = [int(0.1 * TOTAL), 0, int(0.02 * TOTAL), int(0.2 * TOTAL)]
    plan = solve(preset("hgx-h200", 4), TABLES, gpu_budget_bytes=budgets)
    plan.validate(preset("hgx-h200", 4))
    assert plan.gpu_bytes[1] == 0
    assert plan.gpu_bytes[3] > 0.95 * budgets[3]


def test_nothing_fits_where_there_is_no_memory():
    with pytest.raises(PlanDoesNotFitError) as caught:
        solve(preset("single"), TABLES, gpu_budget_bytes=0, host_budget=0)
    assert caught.value.needed - caught.value.available == pytest.approx(TOTAL, rel=1e-6)


def test_links_as_wide_as_ports_need_not_be_told_apart(monkeypatch):
    machine = preset("gb200-nvl72", 18)
    plan = solve(machine, TABLES, gpu_budget_bytes=int(0.02 * TOTAL))
    few = Resources.of(machine)
    monkeypatch.setattr(cost, "_MOST_LINKED", 18)
    each = Resources.of(machine)
    assert len(each.link) - len(few.link) == 18 * 17
    assert estimate(each, TABLES, plan.tables).seconds == pytest.approx(plan.seconds)
    # Narrower ones are.
    narrow = replace(machine, link_bandwidth=machine.link_bandwidth / 2)
    monkeypatch.setattr(cost, "_MOST_LINKED", 16)
    assert len(Resources.of(narrow).link) == len(each.link)


@pytest.mark.parametrize("machine", ["hgx-h200", "dgx1-4gc", "cpu"])
def test_tables_that_are_never_read_have_a_valid_plan(machine):
    topology = preset(machine, 4) if machine != "dgx1-4gc" else preset(machine)
    tables = [
        TableSpec.topology("graph", np.full(1000, 10), accesses_per_step=0.0),
        TableSpec.features("feat", 1000, 400, np.zeros(1000), 0.0),
    ]
    plan = solve(topology, tables, graph_ratio=1.0, feature_ratio=0.0)
    plan.validate(topology)
    assert rows_on_gpus(plan, "graph") == 1000 and rows_on_gpus(plan, "feat") == 0

"""What ``dgl-mgpu plan`` prints, against the plan that it is of."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console

from dgl_mgpu.machine import Network, preset, probe_shared_memory
from dgl_mgpu.placement import MachineShare, TableSpec, solve
from dgl_mgpu.placement.cost import over_network
from dgl_mgpu.report.placement import placement_tables

NAMES = ("topology/_N:_E:_N", "node/_N/feat")


def printed(plan, width=80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for part in placement_tables(plan, "a title", 10, [5, 5]):
        console.print(part, highlight=False)
    return console.file.getvalue()


def a_plan(topology, names=NAMES, policy="auto", budget=50_000):
    hot = np.arange(1000, 0, -1) ** 2
    graph, *others = names
    specs = [TableSpec.topology(graph, hot % 9, hot)]
    specs += [TableSpec.features(name, 1000, 256, hot) for name in others]
    return solve(topology, specs, gpu_budget_bytes=budget, policy=policy)


@pytest.mark.parametrize("policy", ["auto", "xgnn", "clique", "clique_opt", "replicated", "host"])
@pytest.mark.parametrize("name", ["dgx1", "quad-v100", "single"])
def test_every_mark_that_is_there_is_explained_and_no_other(name, policy):
    shown = printed(a_plan(preset(name), policy=policy), 200)
    table, legend = shown[: shown.index("modelled:")].split("\n" * 1, 2)[2], shown
    rows = [line for line in table.splitlines() if re.search(r"\d\.\d%", line)]
    marks = " ".join(line.rpartition("%")[2] for line in rows)
    assert ("0+1: " in legend) == bool(re.search(r"\d\+\d", marks))
    assert ("0 | 1: " in legend) == ("|" in marks)
    assert ("2 patterns: " in legend) == ("patterns" in marks)
    assert ("(and host): " in legend) == ("(and host)" in marks)
    assert ("copies: " in legend) == ("GPU " in table)


def test_without_gpus_it_speaks_of_ranks():
    shown = printed(a_plan(probe_shared_memory(2)))
    assert "GPU" not in shown and "gpu" not in shown
    assert "on the slowest rank" in shown and "rank: shared memory" in shown


def test_machines_that_share_rows_are_told():
    plan = a_plan(preset("quad-v100"))
    assert "machines" not in printed(plan)
    share = MachineShare(8, 0.25, 25 << 20, 9 << 20, {NAMES[0]: 0.5, NAMES[1]: 0.125})
    plan = over_network(plan, share, Network(10.0, 2.0), 1 << 20, 4)
    shown = " ".join(printed(plan).split())
    assert (
        "8 machines: each has 9.00 MiB that no other has, and 25.0 MiB that all have, 25% of the "
        "whole over the network: of the reads, 50% of topology, 12.5% of node/feat; each GPU "
        "receives 1.00 MiB a step at 10 GB/s, and sends as much, in 8.00 s"
    ) in shown
    assert "busiest: the network between machines" in shown


def test_many_gpus_take_a_line():
    plan = a_plan(preset("gb200-nvl72"), policy="partitioned")
    assert "0 | 1 | … | 71" in printed(plan)


def test_long_names_are_broken_between_their_parts():
    names = (
        "topology/institution:rev_affiliated_with:author",
        "node/field_of_study/learned",
        "node/_N/inv_sqrt_degrees",
    )
    shown = printed(a_plan(preset("dgx1"), names))
    assert max(map(len, shown.splitlines())) <= 80
    for part in ("institution:", "rev_affiliated_with:", "author", "field_of_study/", "learned"):
        assert re.search(rf"(^|[/:]){part}( |$)", shown, re.MULTILINE), part
    for row in a_plan(preset("dgx1"), names).summary():
        assert f"{row['rows']:,}" in shown

"""Named policies are the placements that their papers describe."""

from __future__ import annotations

import numpy as np
import pytest

from dgl_mgpu.errors import UnreachableError
from dgl_mgpu.machine import Topology, preset
from dgl_mgpu.placement import TableSpec, solve
from dgl_mgpu.placement.policies import clique_pattern, cliques, xgnn_pattern
from tests.placement.oracle import connected_graphs, machine


def test_xgnn_on_dgx1_stores_one_more_part_and_uses_all_links_evenly():
    """Figure 7 of XGNN."""
    topology = preset("dgx1")
    pattern = xgnn_pattern(topology)
    for gpu in range(8):
        assert sum(gpu in holders for holders in pattern.copies) == 2
        count = np.bincount(pattern.source[gpu], minlength=8)
        assert count[gpu] == 2  # what it holds it reads itself
        over_links = {count[peer] / topology.link_bandwidth[gpu, peer]
                      for peer in topology.neighbors(gpu)}  # fmt: skip
        assert over_links == {1 / 25}  # a double link serves two parts, a single one


def test_xgnn_on_full_links_keeps_one_copy():
    for name in ("dgx1-4gf", "hgx-h200"):
        pattern = xgnn_pattern(preset(name))
        assert pattern.copies == tuple((gpu,) for gpu in range(preset(name).num_gpus))


def test_xgnn_reaches_every_part_on_every_small_machine():
    for graph in connected_graphs(5):
        topology = machine(graph, "mixed", 1000)
        pattern = xgnn_pattern(topology)
        for gpu, source in enumerate(pattern.source):
            for part, holder in enumerate(source):
                assert holder in pattern.copies[part]
                assert topology.link_bandwidth[gpu, holder] > 0


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("dgx1-4gf", [4]), ("dgx1-4gc", [2, 2]), ("dgx1-6g", [2, 2, 2]), ("dgx1-8g", [4, 4])],
)
def test_cliques_are_those_of_section_6_6(name, sizes):
    topology = preset(name)
    groups = cliques(topology)
    assert sorted(map(len, groups)) == sizes
    assert sorted(gpu for group in groups for gpu in group) == list(range(topology.num_gpus))
    for group in groups:
        assert (topology.link_bandwidth[np.ix_(group, group)] > 0).all()


@pytest.mark.parametrize("blind", [0, 1])
def test_what_is_read_one_way_only_makes_no_clique(blind):
    links = np.full((2, 2), 50.0)
    links[blind, 1 - blind] = 0.0
    topology = Topology("one way", links, np.full(2, 10**9), np.full(2, 10.0), 10**9)
    assert cliques(topology) == [(0,), (1,)]


def test_each_clique_holds_all_parts_and_reads_none_outside():
    pattern = clique_pattern([(0, 1), (2, 3, 4)], 5)
    assert len(pattern.copies) == 6
    for gpu, group in ((0, {0, 1}), (3, {2, 3, 4})):
        assert set(pattern.source[gpu]) == group
    assert all(len(holders) == 2 for holders in pattern.copies)


def table():
    hotness = 1 / np.arange(1, 200_001) ** 0.7
    return TableSpec.features("feat", 200_000, 512, hotness, 1e5)


def test_six_gpus_beat_cliques_as_in_figure_13():
    """Cliques of two hold 2 of 6 GPUs' worth; XGNN keeps each part twice: half as much again."""
    topology, spec = preset("dgx1-6g"), table()
    budget = int(0.2 * spec.total_bytes)
    share, seconds = {}, {}
    for policy in ("clique", "clique_opt", "xgnn", "auto"):
        plan = solve(topology, [spec], policy, gpu_budget_bytes=budget)
        share[policy] = sum(
            tier.num_rows for tier in plan.tables["feat"].tiers if tier.memory == "gpu"
        )
        seconds[policy] = plan.step_seconds
    assert share["xgnn"] == pytest.approx(1.5 * share["clique"], rel=1e-3)
    assert seconds["auto"] < seconds["xgnn"] < seconds["clique_opt"] <= seconds["clique"]


def test_full_links_make_xgnn_and_cliques_the_same():
    """Section 6.6: on 4Gf both place data alike, and CliqueOpt does better by replication."""
    topology, spec = preset("dgx1-4gf"), table()
    budget = int(0.3 * spec.total_bytes)
    xgnn, clique, opt = (
        solve(topology, [spec], policy, gpu_budget_bytes=budget)
        for policy in ("xgnn", "clique", "clique_opt")
    )
    assert xgnn.tables == clique.tables
    assert opt.step_seconds < clique.step_seconds


def test_partitioned_needs_all_links():
    with pytest.raises(UnreachableError, match="GPU 0 is linked only to"):
        solve(preset("dgx1"), [table()], "partitioned")


def test_partitioned_keeps_nothing_off_the_gpus():
    plan = solve(preset("hgx-h200"), [table()], "partitioned")
    (tier,) = plan.tables["feat"].tiers
    assert (tier.memory, tier.parts, plan.host_bytes) == ("gpu", 8, 0)
    assert tier.copies == tuple((gpu,) for gpu in range(8))


def test_host_keeps_nothing_on_gpus():
    plan = solve(preset("dgx1"), [table()], "host")
    assert [tier.memory for tier in plan.tables["feat"].tiers] == ["host"]
    assert plan.hit_rates["feat"]["host"] == 1.0


def test_replicated_reads_locally_what_it_holds():
    plan = solve(preset("dgx1"), [table()], "replicated", gpu_budget_bytes=10**7)
    assert plan.hit_rates["feat"]["peer"] == 0.0
    assert 0 < plan.hit_rates["feat"]["local"] < 1

"""The modelled placements of XGNN's systems."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.placement_modelled import (
    CACHED,
    GRAPHS,
    PRIORITIES,
    SYSTEMS,
    gpu_budget,
    placed,
    tables,
)
from dgl_mgpu.machine import preset


@pytest.mark.parametrize("data", GRAPHS)
def test_exponents_fit_the_hit_rate_that_they_are_fitted_to(data: str) -> None:
    model, share, hit_rate = GRAPHS[data].fitted_to
    _, features = tables(model, data)
    reads = features.accesses_before(share * features.num_rows) / features.total_accesses
    assert reads == pytest.approx(hit_rate, abs=0.015)


def test_reads_of_a_minibatch() -> None:
    """The expected number of distinct nodes, against a batch that is drawn."""
    graph, features = tables("GSG", "PA")
    n, rng = features.num_rows, np.random.default_rng(0)
    chances = ((np.arange(n) + 0.5) / n) ** (-1 / GRAPHS["PA"].exponent)
    edges = np.cumsum(chances / chances.sum())
    seeds = rng.integers(n, size=300)
    drawn = np.searchsorted(edges, rng.random(300 * 25))
    frontier = np.unique(np.concatenate([seeds, drawn]))
    drawn = np.concatenate([drawn, np.searchsorted(edges, rng.random(10 * len(frontier)))])
    # Each hop samples again from the seeds, and seeds seldom are drawn.
    assert graph.total_accesses == pytest.approx(len(frontier), rel=0.05)
    assert features.total_accesses == pytest.approx(len(np.unique(drawn)) + 300, rel=0.05)


def test_memory_is_what_the_paper_s_caches_take() -> None:
    topology = preset("dgx1-8g")
    for (model, data), (system, share) in [(("GCN", "TW"), CACHED["GCN", "TW"]),
                                           (("GSG", "CF"), CACHED["GSG", "CF"])]:  # fmt: skip
        found = placed(topology, model, data, SYSTEMS[system])
        assert found["cached"] == pytest.approx(share, abs=1e-3)
    graph, features = tables("GCN", "TW")
    copies = graph.total_bytes + 0.09 * features.total_bytes
    assert gpu_budget("GCN", "TW") == pytest.approx(copies, rel=1e-6)


def test_what_systems_can_and_cannot_do() -> None:
    """As XGNN's tables 1 and 4 have it."""
    on = {gpus: preset("dgx1-4gf") if gpus == 4 else preset("dgx1", gpus) for gpus in (1, 4, 8)}
    whole = {
        gpus: placed(machine, "GSG", "TW", SYSTEMS["WholeGraph"]) for gpus, machine in on.items()
    }
    assert [whole[gpus]["read_ms"] is None for gpus in (1, 4, 8)] == [True, False, True]
    assert whole[4]["hit_rate"] == whole[4]["cached"] == 1
    assert placed(on[8], "GCN", "CF", SYSTEMS["DGL+C"])["read_ms"] is None
    direct = placed(on[1], "GSG", "TW", SYSTEMS["PyTorch-Direct"])
    assert direct["cached"] == direct["hit_rate"] == direct["copies"] == 0
    _, features = tables("GSG", "TW")
    # 12.5 GB/s, of which random rows of 1024 bytes get 93 %.
    rows = 20 * features.total_accesses * 1024 / 12.5e9
    assert direct["extract_ms"] == pytest.approx(1e3 * rows / 0.93, rel=0.01)


def test_what_comes_first_gets_the_memory() -> None:
    machine = preset("dgx1", 1)
    graph = placed(machine, "GSG", "CF", PRIORITIES["XGNN-G"])
    features = placed(machine, "GSG", "CF", PRIORITIES["XGNN-F"])
    assert graph["cached"] < 0.01 < 0.3 < features["cached"]
    assert graph["sample_ms"] < features["sample_ms"] / 10
    assert features["extract_ms"] < graph["extract_ms"] / 2

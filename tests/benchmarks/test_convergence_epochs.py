"""The comparison of training curves: its statistics, what it takes to be the same, and a run."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from scipy import stats

from benchmarks import convergence_epochs
from benchmarks.convergence import SAGE
from benchmarks.convergence_epochs import (
    ALONE,
    METRICS,
    OTHER_SEEDS,
    WRONG,
    chance_beyond_spread,
    compare,
    paired_interval,
    seconds_to_accuracy,
    seed_order,
    verdict,
    welch_interval,
)
from dgl_mgpu.cli import main
from dgl_mgpu.config.schema import ModelConfig
from dgl_mgpu.models.homogeneous import build_model
from dgl_mgpu.train.minibatch.samplers import SeedBatches
from tests.benchmarks.ogb_files import NAME, write_papers


@pytest.mark.parametrize("sizes", [(5, 5), (2, 7)])
def test_intervals_are_those_of_scipy(sizes: tuple[int, int]) -> None:
    random = np.random.default_rng(3)
    ours, theirs = random.normal(1, 3, sizes[0]), random.normal(0, 1, sizes[1])
    welch = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    assert welch_interval(ours, theirs) == pytest.approx((welch.low, welch.high))
    if sizes[0] == sizes[1]:
        paired = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
        assert paired_interval(ours, theirs) == pytest.approx((paired.low, paired.high))


def test_values_that_never_vary_differ_for_sure() -> None:
    assert welch_interval([2, 2], [1, 1]) == paired_interval([2, 2], [1, 1]) == (1, 1)


def test_chance_of_differing_by_more_than_the_spread() -> None:
    # Of pairs: |z| > max(|x|, |y|), independent and normal alike, for one of three.
    assert chance_beyond_spread(2) == pytest.approx(1 / 3, abs=0.005)


def _runs(middle: float, losses: list[float]) -> list[dict[str, list[float]]]:
    noise = np.random.default_rng(0).normal(0, 0.1, (5, len(losses)))
    return [{"loss": list(np.add(losses, n)), "accuracy": list(middle + n)} for n in noise]


def test_a_claim_falls_with_more_than_a_tenth_of_its_comparisons() -> None:
    alone = _runs(0.5, [0.0] * 10)
    assert verdict(compare(alone, alone))["holds"] is True
    for shifted, holds in ((2, True), (3, False)):
        ours = _runs(0.5, [1.0] * shifted + [0.0] * (10 - shifted))
        comparisons = compare(ours, alone)
        found = verdict(comparisons)
        assert found["comparisons"] == 20 and found["without_0_by_chance"] == pytest.approx(1)
        assert found["welch_without_0"] == found["beyond_spread"] == shifted
        assert found["paired_without_0"] == shifted
        assert found["holds"] is holds
        different = [(c.metric, c.epoch) for c in comparisons if not c.is_within_spread]
        assert different == [("loss", epoch + 1) for epoch in range(shifted)]


def test_training_is_timed_to_the_accuracy_that_dgl_reaches() -> None:
    def run(*accuracies: float, epoch: float) -> dict[str, list[float]]:
        seconds = [epoch * (n + 1) for n in range(len(accuracies))]
        return {"accuracy": list(accuracies), "seconds": seconds}

    found = seconds_to_accuracy({
        ALONE: [run(0.5, 0.79, 0.8, epoch=3.0), run(0.5, 0.8, 0.8, epoch=5.0)],
        "ours": [run(0.795, 0.7, 0.8, epoch=1.0), run(0.5, 0.6, 0.9, epoch=1.0)],
        "never": [run(0.5, 0.5, 0.5, epoch=1.0), run(0.8, 0.8, 0.8, epoch=1.0)],
    })  # fmt: skip
    assert found["accuracy"] == pytest.approx(0.99 * 0.8)
    assert found["seconds"] == {ALONE: [9.0, 10.0], "ours": [1.0, 3.0], "never": [None, 1.0]}
    assert found["median"] == {ALONE: 9.5, "ours": 2.0, "never": None}
    assert found["times_dgl_alone"] == {ALONE: 1.0, "ours": 4.75}


def test_both_ways_begin_alike() -> None:
    """With the same weights, and the same seed nodes in the same order."""
    torch.manual_seed(4)
    alone = SAGE((6, 128, 3)).state_dict().values()
    torch.manual_seed(4)
    ours = build_model(ModelConfig(), 6, 3, 2).state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(alone, ours, strict=True))
    nodes = torch.arange(100, 137)
    batches = SeedBatches(nodes, 8, shuffle=True, seed=4)
    for epoch in (0, 3):
        batches.set_epoch(epoch)
        assert torch.equal(torch.cat(list(batches)), nodes[seed_order(len(nodes), 4, epoch)])


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
@pytest.mark.usefixtures("without_pictures")
def test_the_program_runs_and_draws(tmp_path, monkeypatch, capsys) -> None:
    write_papers(tmp_path)
    monkeypatch.setattr(convergence_epochs, "BATCH", 64)

    def run(command: list[str], **_: object) -> None:
        assert main([*command[3:], "store.device=cpu"]) == 0

    monkeypatch.setattr(convergence_epochs, "subprocess",
                        SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))  # fmt: skip
    out, picture = tmp_path / "found.json", tmp_path / "found.png"
    few = f"--data {tmp_path} --ranks 2 --seeds 2 --epochs 2 --out {out} --plot {picture}"
    monkeypatch.setattr(sys, "argv", ["program", *few.split(), "--set", NAME])
    convergence_epochs.main()
    found = json.loads(out.read_text())
    assert found["settings"]["data"] == NAME
    ours = "dgl-mgpu, 2 ranks"
    assert set(found["runs"]) == {ALONE, OTHER_SEEDS, WRONG, ours}
    for runs in found["runs"].values():
        assert [len(run[metric]) for run in runs for metric in METRICS] == [2] * 4
        assert all(run["loss"][1] < run["loss"][0] for run in runs)
    assert set(found["verdicts"]) == set(found["comparisons"]) == {OTHER_SEEDS, WRONG, ours}
    assert found["runs"][WRONG] != found["runs"][ALONE] != found["runs"][OTHER_SEEDS]
    for seed in range(2):  # one epoch cannot take them far apart
        first = [found["runs"][name][seed]["loss"][0] for name in (ALONE, ours)]
        assert first[0] == pytest.approx(first[1], rel=0.25)
    assert capsys.readouterr().out.count("of 4 comparisons") == 3
    for runs in found["runs"].values():
        assert all(0 < run["seconds"][0] < run["seconds"][1] for run in runs)
    assert set(found["to_accuracy"]["seconds"]) == {ALONE, ours}
    assert imread(picture).std() > 0.05  # something is drawn


def test_one_seed_is_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--seeds", "1"])
    with pytest.raises(SystemExit):
        convergence_epochs.main()
    assert "no spread" in capsys.readouterr().err

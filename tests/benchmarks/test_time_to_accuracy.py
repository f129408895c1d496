"""The benchmark of the time to an accuracy, on a small graph and on CPUs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import time_to_accuracy
from benchmarks.time_to_accuracy import CPU, WAYS, figures_of, step_seconds

GPU_OURS = "GPU, ours"


def curve(seconds: float, accuracy: float = 0.9, steps: int = 20) -> list[dict[str, float]]:
    first = {"steps": 10, "seconds": seconds / 4, "accuracy": 0.5}
    return [first, {"steps": steps, "seconds": seconds, "accuracy": accuracy}]


def test_ways_are_compared_by_the_medians_of_their_seeds() -> None:
    curves = {
        CPU: [curve(40.0), curve(80.0), curve(60.0)],
        "GPU, eager": [curve(6.0), curve(4.0), curve(5.0)],
        "GPU, ours": [curve(2.0), curve(2.5), curve(10.0, steps=30)],
    }
    cpu, eager, ours = figures_of(curves, 0.9, 2)
    assert (cpu["seconds"], eager["seconds"], ours["seconds"]) == (60.0, 5.0, 2.5)
    assert ours["cpu_over_this"] == 24 and ours["eager_over_this"] == 2
    assert eager["cpu_over_this"] == 12 and "eager_over_this" not in eager
    assert ours["each_s"] == [2.0, 2.5, 10.0] and (cpu["gpus"], ours["gpus"]) == (0, 2)
    assert ours["step_ms"] == pytest.approx(1e3 * 2.5 * 3 / 4 / 10)


def test_a_seed_that_does_not_get_there_is_not_left_out() -> None:
    eager, ours = figures_of(
        {"GPU, eager": [curve(5.0)] * 2, "GPU, ours": [curve(2.0), curve(2.0, accuracy=0.89)]},
        0.9,
        1,
    )
    assert ours["seconds"] is None and "eager_over_this" not in ours
    assert eager["seconds"] == 5.0 and step_seconds(curve(4.0)) == pytest.approx(0.3)
    assert step_seconds(curve(4.0)[:1]) == pytest.approx(0.1)


def test_a_script_is_timed_until_it_has_its_accuracy(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "found.json"
    words = (
        "--nodes 8000 --edges 120000 --train 4000 --batch 256 --hidden 32 --lr 1e-3 --every 8 "
        "--seeds 2 --level 0.6 --most-steps 200 --workers 0"
    )
    monkeypatch.setattr(sys, "argv", ["program", *words.split(), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        time_to_accuracy.main()
    assert ended.value.code == 0
    (figure,) = json.loads(out.read_text())["figures"]
    assert figure["way"] == CPU and figure["step_ms_by_workers"] == {}  # no choice
    assert figure["seconds"] > 0 and figure["step_ms"] > 0
    for each in figure["curves"]:
        *before, last = each
        assert last["accuracy"] > 0.6 - 1e-9 and all(point["accuracy"] < 0.6 for point in before)
        assert [point["steps"] for point in each] == list(range(8, last["steps"] + 1, 8))
    assert len(figure["curves"]) == 2 and figure["curves"][0] != figure["curves"][1]
    assert "CPU " in capsys.readouterr().out


def test_a_way_that_fails_is_said_and_the_others_are_timed(tmp_path, monkeypatch, capsys) -> None:
    tried = []

    def run(self, way, seeds, most_steps, workers):
        if way == "pinned, eager":
            raise subprocess.TimeoutExpired("it", 300)
        if way == "GPU, eager":
            raise subprocess.CalledProcessError(3, "it")
        tried.append((way, workers))
        return [curve(4.0 - workers / 100) for _ in seeds]

    monkeypatch.setattr(time_to_accuracy.Bench, "_run", run)
    monkeypatch.setattr(time_to_accuracy, "write_graph", lambda *_: None)
    words = ["--ways", *WAYS, "--workers", "0", "4", "--out", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as ended:
        time_to_accuracy.main()
    assert ended.value.code == 1
    figures = {
        each["way"]: each for each in json.loads((tmp_path / "found.json").read_text())["figures"]
    }
    assert set(figures) == set(WAYS) and figures[GPU_OURS]["seconds"] == 4.0
    assert figures["pinned, eager"]["failed"] == "took longer than 300 s"
    assert figures["GPU, eager"]["failed"] == "ended with status 3"
    assert "GPU, eager     failed: ended with status 3" in capsys.readouterr().out
    # The CPU has the number of workers that was fastest.
    assert tried[:3] == [(CPU, 0), (CPU, 4), (CPU, 4)] and (GPU_OURS, 0) in tried
    assert set(figures[CPU]["step_ms_by_workers"]) == {"0", "4"}


def test_it_takes_neighbours_to_know_a_node(tmp_path, monkeypatch) -> None:
    """Or the time would be that of a linear model, and any graph would do."""
    options = argparse.Namespace(nodes=20_000, edges=320_000, train=10_000)
    time_to_accuracy.write_graph(tmp_path / "graph.pt", options)
    data = torch.load(tmp_path / "graph.pt")
    label, train, valid = (data[name].long() for name in ("label", "train", "valid"))
    assert len(torch.cat([train, valid]).unique()) == len(train) + len(valid)
    dst = torch.repeat_interleave(torch.arange(20_000), data["indptr"].long().diff())
    sums = torch.zeros_like(data["feat"]).index_add_(0, dst, data["feat"][data["indices"].long()])
    means = sums / data["indptr"].diff().clamp(min=1)[:, None]

    def accuracy(rows: torch.Tensor) -> float:
        """By the nearest of the classes' means."""
        centres = torch.stack([rows[train][label[train] == each].mean(0) for each in range(16)])
        return float((torch.cdist(rows[valid], centres).argmin(1) == label[valid]).double().mean())

    assert accuracy(data["feat"]) < 0.4 and accuracy(means) > 0.6


def test_every_way_says_how_the_script_runs() -> None:
    assert {way.place for way in WAYS.values()} == {"host", "pinned", "gpu"}
    for name, way in WAYS.items():
        assert ("--capture=off" in way.options) == (not name.endswith("ours"))

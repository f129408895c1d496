"""The benchmark of the time to an accuracy, on a small graph and on CPUs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import time_to_accuracy
from benchmarks.time_to_accuracy import CPU, WAYS, Runs, figures_of, settings_of, step_seconds

GPU_OURS = "GPU, ours"


def curve(seconds: float, accuracy: float = 0.9, steps: int = 20) -> list[dict[str, float]]:
    first = {"steps": 10, "seconds": seconds / 4, "accuracy": 0.5}
    return [first, {"steps": steps, "seconds": seconds, "accuracy": accuracy}]


def test_ways_are_compared_by_the_medians_of_their_seeds() -> None:
    runs = {
        CPU: Runs([curve(40.0), curve(80.0), curve(60.0)]),
        "GPU, eager": Runs([curve(6.0), curve(4.0), curve(5.0)]),
        "GPU, ours": Runs([curve(2.0), curve(2.5), curve(10.0, steps=30)]),
    }
    cpu, eager, ours = figures_of(runs, 0.9, 2)
    assert (cpu["seconds"], eager["seconds"], ours["seconds"]) == (60.0, 5.0, 2.5)
    assert ours["cpu_over_this"] == 24 and ours["eager_over_this"] == 2
    assert eager["cpu_over_this"] == 12 and "eager_over_this" not in eager
    assert "cpu_over_this" not in cpu and not ours["cpu_was_stopped"]
    assert ours["each_s"] == [2.0, 2.5, 10.0] and (cpu["gpus"], ours["gpus"]) == (0, 2)
    assert ours["step_ms"] == pytest.approx(1e3 * 2.5 * 3 / 4 / 10)


def test_a_seed_that_does_not_get_there_is_not_left_out() -> None:
    eager, ours = figures_of(
        {
            "GPU, eager": Runs([curve(5.0)] * 2),
            "GPU, ours": Runs([curve(2.0), curve(2.0, accuracy=0.89)]),
        },
        0.9,
        1,
    )
    assert ours["seconds"] is None and "eager_over_this" not in ours
    assert eager["seconds"] == 5.0 and step_seconds(curve(4.0)) == pytest.approx(0.3)
    assert step_seconds(curve(4.0)[:1]) == pytest.approx(0.1)


def test_a_cpu_that_was_stopped_takes_at_least_as_long_as_it_took() -> None:
    runs = {"GPU, ours": Runs([curve(2.0)]), CPU: Runs([curve(60.0, accuracy=0.4)])}
    ours, cpu = figures_of(runs, 0.9, 1)
    assert cpu["seconds"] is None and cpu["accuracy"] == 0.4 and "cpu_over_this" not in cpu
    assert ours["cpu_over_this"] == 30 and ours["cpu_was_stopped"] and cpu["cpu_was_stopped"]


def test_cores_are_divided_among_workers_and_threads() -> None:
    assert settings_of(16) == ["0:16", "4:12", "8:8"]
    assert settings_of(2) == ["0:2", "1:1"] and settings_of(1) == ["0:1"]


def test_a_script_is_timed_until_it_has_its_accuracy(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "found.json"
    words = (
        "--nodes 8000 --edges 120000 --train 4000 --batch 256 --hidden 32 --lr 1e-3 --every 8 "
        "--seeds 2 --level 0.6 --most-steps 200 --settings 0:1"
    )
    monkeypatch.setattr(sys, "argv", ["program", *words.split(), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        time_to_accuracy.main()
    assert ended.value.code == 0
    (figure,) = json.loads(out.read_text())["figures"]
    assert figure["way"] == CPU and figure["step_ms_by_setting"] == {}  # no choice
    assert figure["setting"] == "0 workers, 1 threads"
    assert figure["seconds"] > 0 and figure["step_ms"] > 0
    for each in figure["curves"]:
        *before, last = each
        assert last["accuracy"] > 0.6 - 1e-9 and all(point["accuracy"] < 0.6 for point in before)
        assert [point["steps"] for point in each] == list(range(8, last["steps"] + 1, 8))
    assert len(figure["curves"]) == 2 and figure["curves"][0] != figure["curves"][1]
    assert "CPU " in capsys.readouterr().out


def test_the_fastest_setting_runs_until_its_seconds_are_over(tmp_path, monkeypatch) -> None:
    """The first seed, which does not get there, is kept, and no other begins."""
    out = tmp_path / "found.json"
    words = (
        "--nodes 8000 --edges 120000 --train 4000 --batch 256 --hidden 32 --every 4 --seeds 3 "
        "--level 0.99 --most-steps 100000 --settings 0:1 1:1 --seconds 1.5"
    )
    monkeypatch.setattr(sys, "argv", ["program", *words.split(), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        time_to_accuracy.main()
    assert ended.value.code == 0
    (figure,) = json.loads(out.read_text())["figures"]
    assert figure["seconds"] is None and figure["accuracy"] < 0.99 and figure["cpu_was_stopped"]
    (took,) = figure["each_s"]
    ends = [each[-2]["seconds"] for each in figure["curves"]]
    assert took >= 1.5 > ends[0]
    tried = figure["step_ms_by_setting"]
    assert set(tried) == {"0 workers, 1 threads", "1 workers, 1 threads"}
    assert tried[figure["setting"]] == min(tried.values())


def test_two_ranks_train_together_and_stop_at_the_same_step(tmp_path) -> None:
    options = argparse.Namespace(nodes=8000, edges=120_000, train=4000)
    time_to_accuracy.write_graph(tmp_path / "graph.pt", options)
    words = (
        "--store=off --capture=off benchmarks/time_to_accuracy_script.py --place host --gpus 2 "
        "--fanouts 10 10 --batch 256 --hidden 32 --lr 1e-3 --every 4 --level 0.6 "
        "--most-steps 200 --seconds 60 --seeds 0 1"
    )
    out = tmp_path / "found.json"
    told = ["--graph", tmp_path / "graph.pt", "--meeting-point", f"file://{tmp_path}/meeting"]
    command = [sys.executable, "-m", "dgl_mgpu", *words.split(), *map(str, told), "--out", str(out)]
    subprocess.run(command, check=True)
    curves = json.loads(out.read_text())["curves"]
    assert len(curves) == 2 and all(each[-1]["accuracy"] >= 0.6 for each in curves)


def test_a_way_that_fails_is_said_and_the_others_are_timed(tmp_path, monkeypatch, capsys) -> None:
    tried = []

    def run(self, way):
        if way == "pinned, eager":
            raise subprocess.TimeoutExpired("it", 300)
        if way == "GPU, eager":
            raise subprocess.CalledProcessError(3, "it")
        tried.append(way)
        return Runs([curve(4.0)])

    monkeypatch.setattr(time_to_accuracy.Bench, "_run", run)
    monkeypatch.setattr(time_to_accuracy, "write_graph", lambda *_: None)
    words = ["--ways", *WAYS, "--out", str(tmp_path / "found.json")]
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
    assert tried == [CPU, "pinned, ours", GPU_OURS]


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

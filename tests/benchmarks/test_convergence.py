"""Programs of accuracies: where data sets come from, and that their runs are possible."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import convergence, convergence_epochs, sampling_accuracy
from benchmarks.convergence import RUNS, Trained
from benchmarks.datasets import NO_FILES, OPTIONS, data_overrides, dataset_here
from dgl_mgpu.cli import main
from dgl_mgpu.errors import DataFormatError
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.compose import compose
from tests.benchmarks.ogb_files import NAME, SPEC, write_papers


def test_ogbs_files_are_read_where_they_lie(tmp_path):
    folder = write_papers(tmp_path)
    dataset = dataset_here(NAME, tmp_path)
    assert (dataset.num_nodes, dataset.num_classes) == (SPEC.num_nodes, 172)
    assert dataset.num_edges == 2 * SPEC.num_edges
    (folder / "split" / "time" / "test.csv.gz").unlink()
    with pytest.raises(DataFormatError, match=r"no file split/time/test\.csv\.gz in .*papers100M"):
        dataset_here(NAME, tmp_path)


def test_what_is_not_there_is_not_downloaded_but_said(tmp_path, monkeypatch, capsys):
    for program, name, option in (
        (convergence, NAME, "--sets"),
        (sampling_accuracy, "ogbn-products", "--sets"),
        (convergence_epochs, "ogbn-arxiv", "--set"),
    ):
        monkeypatch.setattr(sys, "argv", ["program", "--data", str(tmp_path), option, name])
        with pytest.raises(SystemExit, match=str(NO_FILES)):
            program.main()
        why, last = capsys.readouterr().out.splitlines()
        assert re.search(f"no folder .*{name.replace('-', '_')}/raw; put OGB's folder", why)
        assert last == f"needs the files of {name}"
    assert not list(tmp_path.iterdir())


def test_all_runs_have_configurations():
    each = {runs.overrides: runs.data for runs in RUNS.values()}
    assert len(each) == 8
    for overrides, data in each.items():
        config = compose([*data_overrides(data, "data"), *overrides])
        config.check()
        assert config.data.options == OPTIONS.get(data, {})
        assert config.trainer.eval_every == (config.trainer.epochs if "ogbn" in data else 1)
    assert sampling_accuracy.SHARED.keys() == sampling_accuracy.EPOCHS.keys()
    for name in sampling_accuracy.SHARED:
        compose(list(data_overrides(name, "data"))).check()


def test_a_set_of_a_size_is_generated(tmp_path, monkeypatch):
    few = {"num_nodes": 40, "num_edges": 300, "num_features": 4, "num_classes": 3}
    monkeypatch.setitem(OPTIONS, "proteins' size", few)
    dataset = dataset_here("proteins' size", tmp_path)
    assert (dataset.num_nodes, dataset.num_edges, dataset.num_classes) == (40, 300, 3)
    words = data_overrides("proteins' size", tmp_path)
    assert compose(list(words)).data.options == few


def test_accuracies_are_kept_by_run(tmp_path, monkeypatch, capsys):
    write_papers(tmp_path)
    asked = []

    def train(*overrides: str) -> Trained:
        asked.append(overrides)
        return Trained(len(asked) / 10, 1.0)

    monkeypatch.setattr(convergence, "through_the_store", train)
    out = tmp_path / "found.json"
    words = ["program", "--data", str(tmp_path), "--sets", NAME, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    convergence.main()
    names = [f"{NAME}, {each}" for each in ("GCN", "GraphSAGE", "GAT", "GCN, 120 epochs")]
    assert json.loads(out.read_text())["test_accuracy"] == {
        name: [(place + 1) / 10] for place, name in enumerate(names)
    }
    for overrides, model in zip(asked, ("gcn", "graphsage", "gat", "gcn"), strict=True):
        assert {f"data={NAME}", f"model={model}", "trainer.seed=0"} <= set(overrides)
    assert capsys.readouterr().out.count("n=1") == 4


def test_whole_graphs_and_samples_are_trained_on(tmp_path, monkeypatch, without_pictures):
    write_papers(tmp_path)
    ended = []

    def run(command: list[str], **_: object) -> None:
        assert main([*command[3:], "store.device=cpu"]) == 0
        (folder,) = (word.partition("=")[2] for word in command if "hydra.run.dir" in word)
        reports, summary = read_metrics(Path(folder) / "metrics.jsonl")
        ended.append((len(reports), summary["test_accuracy"]))

    monkeypatch.setattr(
        convergence, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL)
    )
    monkeypatch.setitem(sampling_accuracy.SHARED, NAME, ("model.hidden=8",))
    monkeypatch.setitem(sampling_accuracy.EPOCHS, NAME, {"sampled": 1, "whole": 2})
    out = tmp_path / "found.json"
    words = f"program --data {tmp_path} --sets {NAME} --seeds 1 --out {out}"
    monkeypatch.setattr(sys, "argv", words.split())
    sampling_accuracy.main()
    found = json.loads(out.read_text())
    assert [epochs for epochs, _ in ended] == [1, 2]
    assert found["test_accuracy"][NAME] == {"sampled": [ended[0][1]], "whole": [ended[1][1]]}
    assert all(found["epoch_s"][NAME][way] > 0 for way in ("sampled", "whole"))

"""Nodes that may have several labels: runs against DGL and torch alone, and all pairs of nodes."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import dgl_mgpu.train.fullgraph.run
import dgl_mgpu.train.minibatch.run
import dgl_mgpu.train.run
from dgl_mgpu.cli import main
from dgl_mgpu.data import load, load_hetero
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.minibatch.run import make_trainer
from tests.roc import roc_auc
from tests.train.epochs import train_epoch

SIZE = {"num_nodes": 900, "num_edges": 7000, "num_labels": 6, "signal": 0.5}
OPTIONS = [
    *(f"data.options.{name}={value}" for name, value in SIZE.items()),
    "trainer.batch_size=64", "trainer.lr=0.02", "model.hidden=12", "store.device=cpu",
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("without_pictures")


def figures_of(folder: Path) -> tuple[list, float]:
    reports, summary = read_metrics(folder / "metrics.jsonl")
    return reports, summary["test_accuracy"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=graphsage"],
        ["model=gcn", "trainer.ranks=2", "sampler.num_workers=1"],
        ["model=gin", "trainer.cuda_graphs=true"],
        ["model=gat", "mode=fullgraph", "trainer.epochs=20"],
        ["model=graphsage", "mode=fullgraph", "trainer.ranks=2", "trainer.epochs=20"],
    ],
    ids=" ".join,
)
def test_a_runs_figure_is_that_of_its_predictions(tmp_path, data, capsys, overrides):
    if torch.cuda.is_available() and "trainer.ranks=2" in overrides:
        pytest.skip("ranks of a whole graph need a GPU each")
    words = [data, *OPTIONS, "trainer.epochs=6", f"hydra.run.dir={tmp_path / 'run'}", *overrides]
    assert main(["train", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    if "trainer.ranks=2" not in overrides:  # whose output is not this process's
        assert "test ROC AUC" in shown and "accuracy" not in shown
        assert "ROC AUC: how often" in shown
    reports, tested = figures_of(tmp_path / "run")
    assert {report.metric_name for report in reports} == {"ROC AUC"}
    assert reports[-1].loss < reports[0].loss
    # Half is what guessing gets.
    assert reports[-1].train_accuracy > 0.6 and tested > 0.6
    assert main(["predict", str(tmp_path / "run"), f"out={tmp_path / 'found.npz'}"]) == 0
    assert "labels and logits of 900 nodes" in capsys.readouterr().out
    dataset = load("generated", data.partition("=")[2], **SIZE)
    with np.load(tmp_path / "found.npz") as found:
        logits, labels = found["logits"], found["labels"]
    assert labels.dtype == np.int8 and np.array_equal(labels, logits > 0)
    expected = roc_auc(torch.tensor(logits[dataset.test]), dataset.labels[dataset.test])
    assert tested == pytest.approx(expected, abs=1e-4)


def test_losses_are_those_of_dgl_and_torch(data):
    """A mini-batch of all training nodes, with all their neighbours."""
    config = compose([
        data, *OPTIONS, "sampler.fanouts=[-1,-1]", "trainer.batch_size=900", "model.dropout=0",
    ])  # fmt: skip
    trainer = make_trainer(config)
    model = copy.deepcopy(trainer.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    dataset = load("generated", data.partition("=")[2], **SIZE)
    graph = dataset.to_dgl()
    features = {name: graph.ndata[name].float() for name in model.inputs}
    labels = graph.ndata["label"].float()
    expected, found = [], []
    for _ in range(4):
        logits = model(graph, features)[dataset.train]
        loss = functional.binary_cross_entropy_with_logits(logits, labels[dataset.train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            area = roc_auc(model(graph, features)[dataset.valid], dataset.labels[dataset.valid])
        expected.append((loss.item(), roc_auc(logits.detach(), labels[dataset.train]), area))
        report = train_epoch(trainer)
        found.append((report.loss, report.train_accuracy, report.valid_accuracy))
    assert found == [pytest.approx(each, rel=1e-4) for each in expected]
    trainer.store.close()


def test_all_nodes_at_once_are_as_right_as_blocks(data):
    config = compose([data, *OPTIONS, "sampler.fanouts=[3,3,3]", "trainer.batch_size=32"])
    trainer = make_trainer(config)
    assert trainer._valid.all_nodes is not None
    found = trainer.evaluate(trainer._valid)
    blocks = trainer.evaluate(dataclasses.replace(trainer._valid, all_nodes=None))
    assert found == pytest.approx(blocks, abs=1e-4)
    trainer.store.close()


@pytest.mark.parametrize("mode", ["minibatch", "fullgraph"])
def test_one_type_of_several_may_have_them(tmp_path, monkeypatch, mode):
    dataset = load_hetero("generated-relations", tmp_path)
    has = np.random.default_rng(2).random((dataset.num_classes, 5)) < 0.5
    has[:2] = [[True], [False]]
    labels = has[dataset.labels].astype(np.int8)
    labels[dataset.train[::3], 1] = -1
    several = dataclasses.replace(dataset, labels=labels, num_classes=5)
    for module in (dgl_mgpu.train.minibatch.run, dgl_mgpu.train.fullgraph.run):
        monkeypatch.setattr(module, "load_dataset", lambda config: several)
    words = ["data=generated-relations", "model=rgcn", "model.hidden=12", "trainer.lr=0.02"]
    words += [f"mode={mode}", "store.device=cpu", "trainer.epochs=15", "trainer.batch_size=256"]
    assert main(["train", *words, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    reports, tested = figures_of(tmp_path / "run")
    assert reports[-1].loss < reports[0].loss and tested > 0.7

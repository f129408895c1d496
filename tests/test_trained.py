"""What a run has trained, against the run's own test and the data set's classes."""

from __future__ import annotations

from pathlib import Path

import dgl
import numpy as np
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.cli import main, predictions_asked
from dgl_mgpu.data import load, load_hetero
from dgl_mgpu.errors import (
    CheckpointError,
    ConfigError,
    InvalidInputError,
    OutputError,
    UnavailableError,
)
from dgl_mgpu.report import read_metrics
from dgl_mgpu.trained import write_predictions

SIZE = {"num_nodes": 800, "num_edges": 8000}
SIZES = {"num_users": 100, "num_tags": 20, "num_items": 400}
OPTIONS = [
    "trainer.epochs=3", "trainer.lr=0.02", "trainer.batch_size=64", "model.hidden=12",
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("without_pictures", "forked_ranks")


def run_of(folder: Path, *overrides: str, several: bool = False) -> float:
    """Train into ``folder / "run"``; the test accuracy."""
    name, sizes = ("generated-relations", SIZES) if several else ("generated", SIZE)
    words = [f"data={name}", f"data.root={folder}", *OPTIONS, f"hydra.run.dir={folder / 'run'}"]
    words += [f"data.options.{key}={value}" for key, value in sizes.items()]
    assert main(["train", *words, *overrides]) == 0
    return read_metrics(folder / "run" / "metrics.jsonl")[1]["test_accuracy"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=graphsage", "store.device=cpu", "trainer.ranks=2", "sampler.num_workers=1"],
        ["model=gcn", "store.device=cpu", "trainer.count_accesses=true"],
        ["model=gat", "store.device=cpu", "trainer.eval_every=2"],
        ["mode=fullgraph", "model=gcn"],
        ["mode=fullgraph", "model=gin"],
    ],
    ids=" ".join,
)
def test_predictions_are_as_right_as_the_runs_test(tmp_path, overrides):
    accuracy = run_of(tmp_path, *overrides)
    run = dgl_mgpu.load_run(tmp_path / "run")
    assert not run.model.training and run.config.model.hidden == 12
    logits = run.predict()
    data = load("generated", tmp_path, **SIZE)
    assert logits.shape == (data.num_nodes, data.num_classes) and logits.dtype == torch.float32
    right = logits.argmax(1).numpy()[data.test] == data.labels[data.test]
    assert right.mean() == pytest.approx(accuracy, abs=1e-9)
    assert main(["predict", str(tmp_path / "run"), f"out={tmp_path / 'all.npz'}"]) == 0
    with np.load(tmp_path / "all.npz") as found:
        assert np.array_equal(found["classes"], logits.argmax(1).numpy())
        assert np.array_equal(found["logits"], logits.numpy())


@pytest.mark.parametrize(
    "overrides",
    [["model=rgcn", "store.device=cpu"], ["model=rgcn", "mode=fullgraph"]],
    ids=["mini-batches, with learned rows", "whole graph"],
)
def test_models_of_several_types(tmp_path, overrides):
    accuracy = run_of(tmp_path, *overrides, several=True)
    logits = dgl_mgpu.load_run(tmp_path / "run").predict()
    data = load_hetero("generated-relations", tmp_path, **SIZES)
    right = logits.argmax(1).numpy()[data.test] == data.labels[data.test]
    assert len(logits) == data.num_nodes[data.target]
    assert right.mean() == pytest.approx(accuracy, abs=1e-9)


def test_random_walks(tmp_path):
    accuracy = run_of(tmp_path, "model=pinsage", "store.device=cpu", "trainer.epochs=6")
    logits = dgl_mgpu.load_run(tmp_path / "run").predict()
    data = load("generated", tmp_path, **SIZE)
    right = logits.argmax(1).numpy()[data.test] == data.labels[data.test]
    assert right.mean() == pytest.approx(accuracy, abs=0.1)  # by other walks


def test_the_best_model_takes_other_graphs_too(tmp_path):
    run_of(tmp_path, "model=graphsage", "store.device=cpu", "trainer.epochs=1")
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    drawn = torch.get_rng_state()
    run = dgl_mgpu.load_run(next((moved / "checkpoints").iterdir()), root=tmp_path)
    assert torch.equal(torch.get_rng_state(), drawn)
    g = dgl.rand_graph(50, 300)
    g.ndata["feat"] = torch.randn(50, 64)
    with torch.no_grad():
        expected = run.model(g, {"feat": g.ndata["feat"]})
    torch.testing.assert_close(dgl_mgpu.inference(run.model, g), expected)


def test_links_have_no_classes(tmp_path):
    words = [f"data.root={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}", "store.device=cpu"]
    words += [f"data.options.{key}={value}" for key, value in SIZE.items()]
    assert main(["train", "task=link_prediction", *words, *OPTIONS, "trainer.epochs=1"]) == 0
    run = dgl_mgpu.load_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="task=link_prediction; pass the model to"):
        run.predict()
    g = load("generated", tmp_path, **SIZE).to_dgl()
    assert len(dgl_mgpu.inference(run.model, g)) == g.num_nodes()


def test_what_cannot_be_loaded_or_written(tmp_path, capsys):
    with pytest.raises(CheckpointError, match=r"load the run .*: there is no such file.*name the"):
        dgl_mgpu.load_run(tmp_path / "none")
    with pytest.raises(InvalidInputError, match="device='gpu'"):
        dgl_mgpu.load_run(tmp_path, "gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="use device 'cpu'"):
            dgl_mgpu.load_run(tmp_path, "cuda")
    run_of(tmp_path, "model=gin", "store.device=cpu", "trainer.epochs=1")
    with pytest.raises(OutputError, match=r"write predictions to /proc/.*another|can be written"):
        write_predictions(tmp_path / "run", Path("/proc/none/all.npz"))
    assert main(["predict", str(tmp_path / "none"), f"out={tmp_path / 'all.npz'}"]) == 1
    assert "CheckpointError: load the run" in capsys.readouterr().err
    assert not list(tmp_path.glob("all.npz*"))
    with pytest.raises(OutputError, match="it is a folder"):
        write_predictions(tmp_path / "run", tmp_path)


def test_a_runs_folder_may_be_named_after_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lr=0.1").mkdir()
    assert predictions_asked(["lr=0.1", "out=all.npz"]) == ("lr=0.1", Path("all.npz"), "cpu")
    with pytest.raises(ConfigError, match=r"no option lr"):
        predictions_asked(["run", "lr=0.2", "out=all.npz"])

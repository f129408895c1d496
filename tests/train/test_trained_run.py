"""What a run has trained, against the run's own test and the data set's classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from dgl_mgpu.cli import _predict_on_rank, main, parse_predict
from dgl_mgpu.data import load, load_hetero
from dgl_mgpu.data.links import hold_out
from dgl_mgpu.errors import (
    CheckpointError,
    ConfigError,
    InvalidInputError,
    OutputError,
    RankFailedError,
    UnavailableError,
)
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.launch.hangs import Heartbeats
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.minibatch.trainer import MiniBatchTrainer
from dgl_mgpu.train.trained_run import write_predictions
from dgl_mgpu.utils.stages import StageTracker, stage

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


def written_by(folder: Path, ranks: int) -> dict[str, np.ndarray]:
    """What the command writes of a run on so many ranks."""
    out = folder / f"by-{ranks}.npz"
    assert main(["predict", str(folder / "run"), f"out={out}", f"ranks={ranks}"]) == 0
    with np.load(out) as found:
        return dict(found)


@pytest.mark.parametrize(
    ("overrides", "several", "is_same"),
    [
        (["model=gcn", "store.device=cpu"], False, False),
        (["model=pinsage", "store.device=cpu"], False, True),
        (["model=rgcn", "store.device=cpu", "sampler.eval_fanouts=[3,3]"], True, True),
        (["model=gcn", "mode=fullgraph"], False, False),
        (["model=rgcn", "mode=fullgraph"], True, False),
    ],
    ids=["all neighbours", "walks", "samples of several types", "whole", "whole, several types"],
)
def test_ranks_share_the_work_of_one(tmp_path, overrides, several, is_same):
    run_of(tmp_path, *overrides, "trainer.batch_size=150", several=several)
    one, three = (written_by(tmp_path, ranks) for ranks in (1, 3))
    count = SIZES["num_items"] if several else SIZE["num_nodes"]
    assert len(one["classes"]) == count
    np.testing.assert_allclose(three["logits"], one["logits"], rtol=1e-4, atol=1e-5)
    if is_same:  # where nothing is drawn, batches or parts are of other sizes and add up otherwise
        assert np.array_equal(three["logits"], one["logits"])


def test_what_fails_on_one_of_several_ranks_is_told(tmp_path, capsys):
    run_of(tmp_path, "model=gin", "store.device=cpu", "trainer.epochs=1")
    run, out = tmp_path / "run", tmp_path / "all.npz"
    assert main(["predict", str(run), "out=/proc/none/all.npz", "ranks=2"]) == 1
    assert "OutputError: cannot write predictions to /proc/none" in capsys.readouterr().err
    next((run / "checkpoints").iterdir()).write_bytes(b"none")
    assert main(["predict", str(run), f"out={out}", "ranks=2"]) == 1
    assert "CheckpointError: cannot load the run" in capsys.readouterr().err
    assert not list(tmp_path.glob("all.npz*"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=rgcn", "store.device=cpu"],
        ["model=rgcn", "mode=fullgraph"],
        ["model=rgat", "mode=fullgraph"],
    ],
    ids=["mini-batches, with learned rows", "whole graph", "attention on the whole graph"],
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


def test_embeddings_tell_links_as_well_as_in_the_runs_test(tmp_path, capsys):
    # As many negatives as make the estimate of the area that a split's own.
    links = ["task=link_prediction", "links.negatives=40", "model.dropout=0", "store.device=cpu"]
    test_auc = run_of(tmp_path, *links)
    two, one = (written_by(tmp_path, ranks) for ranks in (2, 1))
    assert list(one) == ["embeddings"] and one["embeddings"].shape == (SIZE["num_nodes"], 12)
    assert np.array_equal(one["embeddings"], two["embeddings"])
    assert f"embeddings of 800 nodes: {tmp_path / 'by-1.npz'}" in capsys.readouterr().out

    data = load("generated", tmp_path, **SIZE)
    left, _, (sources, targets) = hold_out(data, 0.05, 0.1, seed=0)
    with torch.no_grad():
        features = {"feat": torch.as_tensor(left.node_features["feat"])}
        by_dgl = dgl_mgpu.load_run(tmp_path / "run").model(left.to_dgl(), features)
    np.testing.assert_allclose(one["embeddings"], by_dgl.numpy(), rtol=1e-4, atol=1e-5)
    scores = one["embeddings"] @ one["embeddings"].T
    is_edge = np.zeros_like(scores, bool)
    is_edge[data.indices, np.repeat(np.arange(data.num_nodes), np.diff(data.indptr))] = True
    np.fill_diagonal(is_edge, True)
    areas = [
        (scores[source, target] > scores[source][~is_edge[source]]).mean()
        for source, target in zip(sources, targets, strict=True)
    ]
    assert np.mean(areas) == pytest.approx(test_auc, abs=0.01) and test_auc > 0.53


def test_what_cannot_be_loaded_or_written(tmp_path, capsys):
    with pytest.raises(CheckpointError, match=r"load the run .*: there is no such file.*name the"):
        dgl_mgpu.load_run(tmp_path / "none")
    with pytest.raises(InvalidInputError, match="no device 'gpu'"):
        dgl_mgpu.load_run(tmp_path, "gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="use device 'cpu'"):
            dgl_mgpu.load_run(tmp_path, "cuda")
    run_of(tmp_path, "model=gin", "store.device=cpu", "trainer.epochs=1")
    with pytest.raises(OutputError, match=r"write predictions to /proc/.*another|can be written"):
        write_predictions(tmp_path / "run", Path("/proc/none/all.npz"))
    assert main(["predict", str(tmp_path / "none"), f"out={tmp_path / 'all.npz'}"]) == 1
    assert "CheckpointError: cannot load the run" in capsys.readouterr().err
    assert not list(tmp_path.glob("all.npz*"))
    with pytest.raises(OutputError, match="it is a folder"):
        write_predictions(tmp_path / "run", tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_learned_rows_are_not_of_other_data(tmp_path, ranks):
    run_of(tmp_path, "model.inputs=learned", "store.device=cpu", "trainer.epochs=1")
    saved = Checkpoint.load(tmp_path / "run")
    saved.config["data"]["options"]["num_nodes"] = 700
    saved.save(tmp_path / "run" / "checkpoints")
    launch(_refuses_its_rows, ranks, tmp_path / "run")


def _refuses_its_rows(run: Path) -> None:
    refused = r"load the run .*: its model does not fit this data \('rows' has shape \(800, 12\)"
    if dist.is_initialized() and dist.get_rank() == 1:
        with pytest.raises(RankFailedError, match="fix the cause on rank 0"):
            dgl_mgpu.load_run(run)
    else:
        with pytest.raises(CheckpointError, match=refused + ".*name the data that the run was"):
            dgl_mgpu.load_run(run)


def test_fewer_ranks_than_in_training_may_have_too_little_memory(tmp_path, capsys):
    limits = ["store.gpu_memory=120KiB", "store.host_memory=0", "trainer.ranks=3"]
    run_of(tmp_path, "store.device=cpu", "trainer.epochs=1", *limits)
    assert main(["predict", str(tmp_path / "run"), f"out={tmp_path / 'x.npz'}"]) == 1
    told = capsys.readouterr().err
    assert f"PlanDoesNotFitError: cannot load the run {tmp_path / 'run'}" in told
    assert "use more ranks than 1 (the run had 3)" in told
    assert len(written_by(tmp_path, ranks=3)["classes"]) == SIZE["num_nodes"]


def test_fewer_ranks_do_not_have_the_links_of_the_run(tmp_path):
    run_of(
        tmp_path, "store.device=cpu", "trainer.epochs=1", "trainer.ranks=2", "store.links=[[0,1]]"
    )
    assert len(written_by(tmp_path, ranks=1)["classes"]) == SIZE["num_nodes"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_is_too_small(tmp_path, monkeypatch, capsys, ranks):
    run_of(tmp_path, "model=rgcn", "store.device=cpu", "trainer.epochs=1", several=True)
    monkeypatch.setattr("dgl_mgpu.cli._predict_on_rank", _with_hardly_any_memory)
    assert main(["predict", str(tmp_path / "run"), f"out={tmp_path / 'x.npz'}", f"ranks={ranks}"])
    told = capsys.readouterr().err
    assert (
        f"DeviceMemoryError: cannot predict by {tmp_path / 'run'} on rank {ranks - 1}: Tried"
        in told
    )
    assert "; use more ranks, or device=cpu" in told
    assert not list(tmp_path.glob("x.npz*"))


def _with_hardly_any_memory(*asked: Any) -> None:
    def outputs(*batch: Any) -> torch.Tensor:
        if not dist.is_initialized() or dist.get_rank() == 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return torch.zeros(64, 8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MiniBatchTrainer, "_outputs", outputs)
        _predict_on_rank(*asked)


def test_a_runs_folder_may_be_named_after_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lr=0.1").mkdir()
    asked = parse_predict(["lr=0.1", "out=all.npz"])
    assert asked == ("lr=0.1", Path("all.npz"), "cpu", 1, 300.0)
    with pytest.raises(ConfigError, match=r"no option lr"):
        parse_predict(["run", "lr=0.2", "out=all.npz"])
    for ranks in ("0", "-1", "two", ""):
        with pytest.raises(
            ConfigError, match=f"predict with ranks={ranks}: it is not a whole number"
        ):
            parse_predict(["run", "out=all.npz", f"ranks={ranks}"])


def test_predictions_may_take_as_long_as_they_are_written(tmp_path, monkeypatch):
    run_of(tmp_path, "store.device=cpu", "trainer.epochs=1")
    heartbeat, shown = Heartbeats(1).ranks[0], []
    monkeypatch.setattr(np, "savez", lambda *arrays, **named: shown.append(heartbeat.in_step))
    with StageTracker(heartbeat):
        with stage("forward"):
            pass
        write_predictions(tmp_path / "run", tmp_path / "all.npz")
        assert (shown, heartbeat.in_step) == ([False], True)


@pytest.mark.parametrize(("given", "seconds"), [("3600", 3600.0), ("null", None)])
def test_predictions_may_take_longer_between_two_stages(given, seconds):
    assert parse_predict(["run", "out=all.npz", f"hang_after={given}"])[-1] == seconds


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "abc", ""])
def test_predictions_refuse_what_is_no_number_of_seconds(given):
    with pytest.raises(ConfigError, match="it is not a number of seconds"):
        parse_predict(["run", "out=all.npz", f"hang_after={given}"])

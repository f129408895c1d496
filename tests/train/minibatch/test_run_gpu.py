"""Training on GPUs, against the same run on the CPU, which samples the same mini-batches."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dgl_mgpu.cli import main
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)

SMALL = [
    "data.options.num_nodes=2000",
    "data.options.num_edges=20000",
    "trainer.batch_size=128",
    "trainer.lr=0.01",
    "model.hidden=32",
]
#: Nothing is drawn but samples, which are the same on every device.
SAME = ["model.dropout=0", "trainer.epochs=3", "hydra.job_logging.root.level=WARNING"]


def train(folder: Path, *overrides: str) -> Path:
    assert main(["train", *SMALL, f"hydra.run.dir={folder}", *overrides]) == 0
    return folder


def losses(folder: Path) -> list[float]:
    return [report.loss for report in read_metrics(folder / "metrics.jsonl")[0]]


@pytest.mark.parametrize("model", ["graphsage", "gcn", "gat", "gin", "rgcn", "pinsage"])
def test_losses_are_those_of_the_cpu(tmp_path, data, model):
    found = {
        device: losses(
            train(tmp_path / device, data, f"model={model}", f"store.device={device}", *SAME)
        )
        for device in ("cpu", "cuda")
    }  # fmt: skip
    assert found["cuda"] == pytest.approx(found["cpu"], rel=2e-3)
    assert found["cuda"][-1] < found["cuda"][0]


@pytest.mark.parametrize("model", ["graphsage", "gcn", "pinsage"])
@pytest.mark.parametrize("task", ["node_classification", "link_prediction"])
def test_learned_inputs_have_the_losses_of_the_cpu(tmp_path, data, model, task):
    if (model, task) == ("pinsage", "link_prediction"):
        pytest.skip("random walks take the edges that are to be predicted")
    options = [data, f"model={model}", f"task={task}", "model.inputs=learned", *SAME]
    found = {
        device: losses(train(tmp_path / device, *options, f"store.device={device}"))
        for device in ("cpu", "cuda")
    }
    assert found["cuda"] == pytest.approx(found["cpu"], rel=2e-3)
    assert found["cuda"][-1] < found["cuda"][0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=gcn"],
        ["model=graphsage", "model.inputs=learned"],
        ["model=graphsage", "task=link_prediction"],
        ["model=pinsage"],
        ["model=gcn", "mode=fullgraph"],
        ["model=graphsage", "data.options.num_labels=5"],
    ],
    ids=" ".join,
)
def test_predictions_on_gpus_are_those_of_the_cpu(tmp_path, data, overrides):
    folder = train(tmp_path / "run", data, *overrides, *SAME)
    found = {}
    for device, ranks in (("cpu", 1), ("cuda", 1), ("cuda", torch.cuda.device_count())):
        out = tmp_path / f"{device}{ranks}.npz"
        asked = [f"out={out}", f"device={device}", f"ranks={ranks}"]
        assert main(["predict", str(folder), *asked]) == 0
        with np.load(out) as archive:
            found[device, ranks] = archive["logits" if "logits" in archive else "embeddings"]
    for rows in found.values():
        np.testing.assert_allclose(rows, found["cpu", 1], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("model", ["graphsage", "gcn", "gat", "gin", "rgcn", "pinsage"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_captured_steps_have_the_losses_of_others(tmp_path, data, model, precision):
    found = [
        losses(
            train(
                tmp_path / graphs, data, f"model={model}", "store.device=cuda",
                f"trainer.cuda_graphs={graphs}", f"trainer.precision={precision}",
                "trainer.batch_size=128", *SAME,
            )
        )
        for graphs in ("false", "true")
    ]  # fmt: skip
    assert found[1] == pytest.approx(found[0], rel=2e-3 if precision == "float32" else 5e-2)


@pytest.mark.parametrize("model", ["rgcn", "rgat"])
def test_captured_steps_have_the_losses_of_others_on_several_types(tmp_path, data, model):
    graph = ["data=generated-igbh", "data.options.scale=2e-5", "data.options.num_features=16"]
    options = [data, *graph, f"model={model}", "model.hidden=32", "trainer.batch_size=64", *SAME]
    for graphs in ("false", "auto"):
        words = [*options, f"trainer.cuda_graphs={graphs}", f"hydra.run.dir={tmp_path / graphs}"]
        assert main(["train", "store.device=cuda", *words]) == 0
    reports, _ = read_metrics(tmp_path / "auto" / "metrics.jsonl")
    assert reports[-1].seconds.compute is not None and reports[-1].steps > 10
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "false"), rel=2e-3)


#: Rows of 121 bytes begin anywhere.
LABELS = ["data.options.num_labels=121", "data.options.signal=0.3"]


@pytest.mark.parametrize("model", ["graphsage", "gat"])
@pytest.mark.parametrize("others", [["trainer.cuda_graphs=true"], ["store.feature_ratio=0.3"]])
def test_several_labels_have_the_figures_of_the_cpu(tmp_path, data, model, others):
    options = [data, f"model={model}", *LABELS, *SAME]
    found = []
    for name, how in (
        ("cpu", ["store.device=cpu"]),
        ("cuda", ["store.device=cuda", "trainer.cuda_graphs=false"]),
        ("other", ["store.device=cuda", *others]),
    ):
        reports, summary = read_metrics(train(tmp_path / name, *options, *how) / "metrics.jsonl")
        figures = [(each.loss, each.train_accuracy, each.valid_accuracy) for each in reports]
        found.append([*itertools.chain(*figures), summary["test_accuracy"]])
    assert found[1] == pytest.approx(found[0], rel=1e-2)
    assert found[2] == pytest.approx(found[1], rel=1e-2)
    assert found[0][-1] > 0.6


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_captured_steps_of_two_ranks_train_as_others(tmp_path, data):
    found = [
        losses(
            train(
                tmp_path / graphs, data, f"trainer.cuda_graphs={graphs}", "store.device=cuda",
                "trainer.ranks=2", "trainer.batch_size=100", *SAME,
            )
        )
        for graphs in ("false", "true")
    ]  # fmt: skip
    assert found[1] == pytest.approx(found[0], rel=2e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_of_a_gpu_each_train_as_those_of_the_cpu(tmp_path, data):
    found = {
        device: losses(
            train(
                tmp_path / device, data, f"store.device={device}", "trainer.ranks=2",
                "trainer.batch_size=250", *SAME,
            )
        )
        for device in ("cpu", "cuda")
    }  # fmt: skip
    assert found["cuda"] == pytest.approx(found["cpu"], rel=2e-3)


def test_a_run_on_a_gpu_learns_and_says_what_it_took(tmp_path, data):
    folder = train(tmp_path / "run", data, "trainer.epochs=8", "trainer.profile=3")
    reports, summary = read_metrics(folder / "metrics.jsonl")
    assert summary["test_accuracy"] > 0.75
    seconds = reports[-1].seconds
    for stage in ("sample", "gather", "compute", "update"):
        assert 0 < getattr(seconds, stage) < seconds.total
    shares = reports[-1].tier_shares("feat")
    assert shares == {"device": 1.0}
    assert reports[-1].tier_rows("label")["device"] == reports[-1].seeds
    profile = json.loads((folder / "profile.json").read_text())
    assert 0 < profile["busy_share"] <= 1
    assert {"sample", "gather", "compute", "update"} <= profile["work_seconds"].keys()


def test_half_precision_learns(tmp_path, data):
    folder = train(tmp_path / "run", data, "trainer.epochs=8", "trainer.precision=bfloat16")
    assert read_metrics(folder / "metrics.jsonl")[1]["test_accuracy"] > 0.75
    assert all(each.dtype == torch.float32 for each in Checkpoint.load(folder).model.values())


@pytest.mark.parametrize("graphs", ["auto", "false"])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(tmp_path, data, graphs):
    options = [data, "model.dropout=0.5", f"trainer.cuda_graphs={graphs}"]
    whole = train(tmp_path / "whole", *options, "trainer.epochs=6")
    half = train(tmp_path / "half", *options, "trainer.epochs=3")
    resumed = train(tmp_path / "resumed", *options, "trainer.epochs=6", f"trainer.resume={half}")
    assert losses(resumed) == losses(whole)
    ours, theirs = Checkpoint.load(resumed).model, Checkpoint.load(whole).model
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_features_on_the_host_train_too(tmp_path, data):
    found = [
        losses(train(tmp_path / share, data, f"store.feature_ratio={share}", *SAME))
        for share in ("1", "0.3")
    ]
    assert found[0] == found[1] and all(math.isfinite(loss) for loss in found[0])


def test_workers_do_not_sample_for_gpus(tmp_path, data, capsys):
    overrides = [data, f"hydra.run.dir={tmp_path}", "sampler.num_workers=1"]
    assert main(["train", *SMALL, *overrides]) == 1
    assert "use sampler.num_workers=0, or store.device=cpu" in capsys.readouterr().err

"""Training on the whole graph end to end, through the command line's own entry point."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dgl
import pytest
import torch
import torch.distributed as dist

from dgl_mgpu import partition_graph
from dgl_mgpu.cli import main
from dgl_mgpu.config.schema import ModelConfig
from dgl_mgpu.data import load, load_hetero
from dgl_mgpu.distributed import host_features
from dgl_mgpu.distributed.host_features import HostRows
from dgl_mgpu.models.full_graph import build_model, build_whole_relational_model
from dgl_mgpu.models.heterogeneous import HeteroInputs, common_width
from dgl_mgpu.report import EpochReport, read_metrics
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.fullgraph import run as fullgraph
from dgl_mgpu.train.fullgraph.trainer import FullGraphTrainer
from tests.distributed.graphs import homogeneous
from tests.train.epochs import train_epoch

pytestmark = pytest.mark.usefixtures("forked_ranks")

SMALL = [
    "mode=fullgraph",
    "data.options.num_nodes=1000",
    "data.options.num_edges=8000",
    "model.hidden=16",
    "trainer.lr=0.02",
]


def train(folder: Path, *overrides: str) -> Path:
    assert main(["train", *SMALL, f"hydra.run.dir={folder}", *overrides]) == 0
    return folder


def reports_of(folder: Path) -> list[EpochReport]:
    return read_metrics(folder / "metrics.jsonl")[0]


def losses_of(folder: Path) -> list[float]:
    return [report.loss for report in reports_of(folder)]


def test_a_run_learns_and_leaves_its_report(tmp_path, data, capsys):
    folder = train(tmp_path / "run", data, "trainer.epochs=40", "trainer.eval_every=3")
    reports, summary = read_metrics(folder / "metrics.jsonl")
    assert [report.epoch for report in reports] == list(range(1, 41))
    assert all(report.steps == 1 and report.tiers == () for report in reports)
    assert [r.epoch for r in reports if r.valid_accuracy is not None] == [*range(3, 40, 3), 40]
    # Chance is 10 %.
    assert summary["test_accuracy"] > 0.6
    best = reports[summary["best_epoch"] - 1]
    assert summary["test_accuracy"] == best.test_accuracy
    assert list(best.seconds.measured()) == ["forward", "backward", "update", "evaluate", "total"]
    parts = best.seconds.measured()
    assert sum(parts.values()) - parts["total"] <= parts["total"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.glob("events.out.tfevents.*"))
    kept = {38, 39, 40, summary["best_epoch"]}
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {f"epoch-{epoch:04d}.pt" for epoch in kept}
    shown = capsys.readouterr().out
    for word in ("test accuracy", "backward", "epoch 40/40"):
        assert word in shown


def test_checkpoints_are_written_as_often_as_asked(tmp_path, data, without_pictures, monkeypatch):
    written = []
    save = Checkpoint.save

    def note(checkpoint: Checkpoint, folder: Path, keep: int, best: int | None) -> Path:
        written.append(checkpoint.epoch)
        return save(checkpoint, folder, keep, best)

    monkeypatch.setattr(Checkpoint, "save", note)
    train(tmp_path / "run", data, "trainer.epochs=8", "trainer.checkpoint_every=3")
    assert written == [3, 6, 8]


@pytest.mark.parametrize("model", ["gcn", "gat", "gin", "rgcn"])
def test_every_model_learns(tmp_path, data, without_pictures, model):
    folder = train(tmp_path / "run", data, f"model={model}", "trainer.epochs=30")
    _, summary = read_metrics(folder / "metrics.jsonl")
    assert summary["test_accuracy"] > 0.5


RELATIONS = [
    "mode=fullgraph", "data=generated-relations", "data.options.num_items=300",
    "model.hidden=16", "model.dropout=0", "trainer.lr=0.02", "trainer.epochs=4",
]  # fmt: skip


def relational_losses(root: Path, name: str) -> list[float]:
    """Of the same run, by DGL alone."""
    content = load_hetero("generated-relations", root, num_items=300)
    g = content.to_dgl()
    inputs = HeteroInputs(g.ntypes, g.canonical_etypes, content.target, content.widths)
    width = common_width(g.ntypes, content.widths, 16)
    config = ModelConfig(name, 16, dropout=0.0, heads=4)
    torch.manual_seed(0)
    model = build_whole_relational_model(
        config, width, content.num_classes, 2, inputs, content.num_nodes
    )
    assert sorted(model.rows.embeddings) == ["tag"] and "item" in content.widths
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    nodes = {ntype: g.nodes(ntype) for ntype in g.ntypes}
    features = {ntype: g.nodes[ntype].data["feat"].float() for ntype in content.widths}
    data, found = g.nodes[content.target].data, []
    for _ in range(4):
        logits = model(g, {"feat": features, dgl.NID: nodes})[data["train_mask"]]
        loss = torch.nn.functional.cross_entropy(logits, data["label"][data["train_mask"]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("features", ["auto", "host"])
@pytest.mark.parametrize("model", ["rgcn", "rgat"])
def test_models_of_relations_train_alike(tmp_path, without_pictures, model, num_ranks, features):
    options = [*RELATIONS, f"model={model}", "model.dropout=0", "model.self_loops=false"]
    options += [f"data.root={tmp_path}", f"trainer.ranks={num_ranks}"]
    options += [f"fullgraph.features={features}"]
    assert main(["train", *options, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    expected = relational_losses(tmp_path, model)
    assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]


def test_learned_rows_go_on_with_other_ranks(tmp_path, without_pictures):
    def run(name: str, *options: str) -> list[float]:
        options = (
            *RELATIONS,
            "model=rgcn",
            f"data.root={tmp_path}",
            f"hydra.run.dir={tmp_path / name}",
            *options,
        )
        assert main(["train", *options]) == 0
        return losses_of(tmp_path / name)

    expected = run("whole")
    run("half", "trainer.epochs=2", "trainer.ranks=2")
    resumed = f"trainer.resume={tmp_path / 'half'}"
    found = run("rest", resumed, "trainer.epochs=4", "trainer.ranks=1")
    assert found == pytest.approx(expected, rel=1e-4)


@contextmanager
def kept_on_host(monkeypatch) -> Iterator[list[torch.Tensor]]:
    """Features that are kept in the host's memory here."""
    of_nodes, made = HostRows.of_nodes, []

    def noting(g: dgl.DGLGraph, rows: torch.Tensor, ntype: str) -> HostRows:
        made.append(rows)
        return of_nodes(g, rows, ntype)

    with monkeypatch.context() as patch:
        patch.setattr(HostRows, "of_nodes", noting)
        yield made


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("model", ["gcn", "graphsage"])
def test_features_in_host_memory_train_alike(
    tmp_path, data, without_pictures, monkeypatch, model, num_ranks
):
    options = [data, f"model={model}", "model.dropout=0", "trainer.epochs=4"]
    options.append(f"trainer.ranks={num_ranks}")
    expected = losses_of(train(tmp_path / "gpu", *options, "fullgraph.features=gpu"))
    with kept_on_host(monkeypatch) as made:
        found = losses_of(train(tmp_path / "host", *options, "fullgraph.features=host"))
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(made) == (num_ranks == 1)  # others are processes of their own


@pytest.mark.parametrize(
    ("option", "tolerance"),
    [("fullgraph.keep_every=2", 1e-6), ("fullgraph.activations=bfloat16", 2e-2)],
)
def test_a_gcn_trains_alike_in_less_memory(tmp_path, data, without_pictures, option, tolerance):
    options = [data, "model=gcn", "model.dropout=0", "trainer.epochs=4"]
    options += ["sampler.fanouts=[2,2,2]", "sampler.eval_fanouts=[2,2,2]"]
    expected = losses_of(train(tmp_path / "plain", *options))
    found = losses_of(train(tmp_path / "less", *options, option))
    assert found == pytest.approx(expected, rel=tolerance)
    assert found != expected or "keep_every" in option


def test_features_that_do_not_fit_are_in_host_memory(tmp_path, data, without_pictures, monkeypatch):
    monkeypatch.setattr(host_features, "free_bytes", lambda device: 1e5)  # 1000 nodes have more
    with kept_on_host(monkeypatch) as made:
        folder = train(tmp_path / "run", data, "model=gcn", "trainer.epochs=30")
    assert len(made) == 1
    # With elements of the features dropped out, as on a GPU.
    assert read_metrics(folder / "metrics.jsonl")[1]["test_accuracy"] > 0.5


def losses_of_learned_rows(root: Path, name: str) -> list[float]:
    """Of runs whose nodes learn their rows, by DGL alone."""
    g = load("generated", root, num_nodes=1000, num_edges=8000, self_loops=True).to_dgl()
    torch.manual_seed(0)
    config = ModelConfig(name, 16, dropout=0.0)
    model = build_model(config, 16, int(g.ndata["label"].max()) + 1, 2, num_learned=1000)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    mask, found = g.ndata["train_mask"], []
    for _ in range(4):
        logits = model(g, {dgl.NID: g.nodes()})[mask]
        loss = torch.nn.functional.cross_entropy(logits, g.ndata["label"][mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("model", ["gcn", "graphsage"])
def test_nodes_learn_their_rows(tmp_path, data, without_pictures, model):
    options = [data, f"model={model}", "model.inputs=learned", "model.dropout=0"]
    options += ["model.self_loops=true", "trainer.epochs=4"]
    expected = losses_of_learned_rows(Path(data.partition("=")[2]), model)
    for num_ranks in (1, 2):
        folder = train(tmp_path / f"of-{num_ranks}", *options, f"trainer.ranks={num_ranks}")
        assert losses_of(folder) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    again = [f"trainer.resume={folder}", "trainer.epochs=5", "trainer.ranks=1"]
    assert losses_of(train(tmp_path / "again", *options, *again))[:4] == losses_of(folder)


def test_nodes_without_features_learn_rows(tmp_path, without_pictures, monkeypatch):
    data = load("generated", tmp_path, num_nodes=200, num_edges=900)
    bare = dataclasses.replace(data, node_features={})
    monkeypatch.setattr(fullgraph, "load_dataset", lambda config: bare)
    folder = train(tmp_path / "run", "trainer.epochs=5")
    losses = losses_of(folder)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("model", ["gcn", "gat", "graphsage"])
def test_models_train_alike_in_bfloat16(tmp_path, data, without_pictures, model):
    options = [data, f"model={model}", "model.dropout=0", "trainer.epochs=4"]
    expected = losses_of(train(tmp_path / "float32", *options))
    options += ["trainer.precision=bfloat16"]
    for name, more in (("whole", []), ("2", ["trainer.ranks=2", "fullgraph.features=host"])):
        found = losses_of(train(tmp_path / name, *options, *more))
        assert found == pytest.approx(expected, rel=2e-2)
        assert found != pytest.approx(expected, rel=1e-5)


def test_an_unknown_place_of_features_is_refused(tmp_path, data, capsys):
    arguments = ["train", *SMALL, data, f"hydra.run.dir={tmp_path}", "fullgraph.features=disk"]
    assert main(arguments) == 1
    assert "choose from auto, gpu, host" in capsys.readouterr().err


def make_trainer(dropout: float) -> FullGraphTrainer:
    pg = partition_graph(homogeneous())
    model = build_model(ModelConfig("gcn", 6, dropout), 5, 3, 2).double()
    ids = pg.ndata[dgl.NID].long()
    return FullGraphTrainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.02),
        pg,
        {"feat": pg.ndata["x"]},
        ids % 3,
        {name: ids % 4 != part for part, name in enumerate(("train", "valid", "test"))},
    )


def losses(trainer: FullGraphTrainer, epochs: int) -> list[float]:
    return [train_epoch(trainer).loss for _ in range(epochs)]


def _stop_and_resume(folder: Path) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    trainer = make_trainer(dropout=0.5)
    losses(trainer, 3)
    state = trainer.checkpoint({})
    if rank == 0:
        state.save(folder)
    dist.barrier()
    expected, accuracy = losses(trainer, 3), trainer.test()
    torch.manual_seed(100)
    resumed = make_trainer(dropout=0.5)
    resumed.resume(Checkpoint.load(folder))
    assert losses(resumed, 3) == expected
    assert resumed.test() == accuracy
    assert len(resumed.reports) == 6
    for ours, theirs in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ranks, tmp_path):
    ranks.run(_stop_and_resume, tmp_path)
    states = Checkpoint.load(tmp_path).random
    assert len(states) == ranks.size
    assert not torch.equal(states[0], states[1])  # each rank drops out what it likes


def _go_on(folder: Path) -> list[float]:
    trainer = make_trainer(dropout=0.0)
    trainer.resume(Checkpoint.load(folder))
    return losses(trainer, 3)


def test_checkpoints_go_from_one_rank_to_three(ranks, tmp_path):
    trainer = make_trainer(dropout=0.0)
    losses(trainer, 3)
    trainer.checkpoint({}).save(tmp_path)
    expected = losses(trainer, 3)
    for found in ranks.run(_go_on, tmp_path):
        assert found == pytest.approx(expected, rel=1e-9)


def test_a_run_of_two_ranks_is_resumed_by_one(tmp_path, data):
    options = [data, "model.dropout=0"]
    whole = losses_of(train(tmp_path / "whole", *options, "trainer.epochs=6"))
    folder = tmp_path / "of-2"
    train(
        folder, *options, "trainer.epochs=3", "trainer.ranks=2", "fullgraph.exchange=broadcast",
        "fullgraph.by=metis",
    )  # fmt: skip
    assert [report.ranks for report in reports_of(folder)] == [2] * 3
    again = train(
        tmp_path / "of-1", *options, "trainer.epochs=6", "trainer.ranks=1",
        f"trainer.resume={folder}",
    )  # fmt: skip
    assert losses_of(again) == pytest.approx(whole, rel=1e-4)
    assert whole[-1] < whole[0]


def test_resume_refuses_a_run_on_mini_batches(tmp_path, data, without_pictures, capsys):
    folder = train(tmp_path / "run", data, "trainer.epochs=1")
    again = ["train", *SMALL, data, f"trainer.resume={folder}"]
    places = [f"hydra.run.dir={tmp_path / name}" for name in ("again", "once more")]
    assert main([*again, places[0], "mode=minibatch", "trainer.epochs=2"]) == 1
    assert "mode=" in capsys.readouterr().err
    assert main([*again, places[0], "trainer.epochs=2"]) == 0
    assert main([*again, places[1], "trainer.epochs=1"]) == 1
    assert "raise trainer.epochs" in capsys.readouterr().err


def test_ranks_without_a_gpu_of_their_own_are_refused(tmp_path, data, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    arguments = ["train", *SMALL, data, f"hydra.run.dir={tmp_path}", "trainer.ranks=2"]
    assert main(arguments) == 1
    assert "use at most 1 ranks" in capsys.readouterr().err

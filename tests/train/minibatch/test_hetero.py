"""Runs on heterogeneous graphs, through the command line's own entry point."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from dgl_mgpu.cli import main
from dgl_mgpu.config.schema import Config
from dgl_mgpu.data import HeteroDataset, load_hetero
from dgl_mgpu.data.hetero import relation
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.machine import preset
from dgl_mgpu.placement import load_accesses
from dgl_mgpu.report import EpochReport, read_metrics
from dgl_mgpu.train import setup
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.minibatch.planned import plan_for
from dgl_mgpu.train.minibatch.run import make_trainer
from dgl_mgpu.train.report import RunReport
from dgl_mgpu.train.run import _run_rank

#: What is beside the rows that tags learn, and placed with them.
OPTIMIZERS = [f"state/tag/learned/{name}" for name in ("exp_avg", "exp_avg_sq")]

pytestmark = pytest.mark.usefixtures("without_pictures")

SMALL = [
    "data=generated-relations",
    "data.options.num_users=400",
    "data.options.num_tags=40",
    "sampler.fanouts=[6,6]",
    "sampler.eval_fanouts=[6,6]",
    "trainer.batch_size=128",
    "trainer.lr=0.01",
    "model.hidden=32",
    "store.device=cpu",
]


def train(folder: Path, *overrides: str) -> Path:
    size = "data.options.num_items=1500"
    assert main(["train", *SMALL, size, f"hydra.run.dir={folder}", *overrides]) == 0
    return folder


def reports_of(folder: Path) -> list[EpochReport]:
    return read_metrics(folder / "metrics.jsonl")[0]


def accuracy_of(folder: Path) -> float:
    return read_metrics(folder / "metrics.jsonl")[1]["test_accuracy"]


def rows_read(reports: list[EpochReport], table: str) -> int:
    return sum(sum(report.tier_rows(table).values()) for report in reports)


def without_relations(data: HeteroDataset) -> HeteroDataset:
    """The same edges, those between the same types as one relation."""
    merged: dict[tuple[str, str], list] = {}
    for (src, _, dst), csc in data.edges.items():
        targets = np.repeat(np.arange(data.num_nodes[dst]), np.diff(csc.indptr))
        merged.setdefault((src, dst), []).append((csc.indices, targets))
    edges = {
        (src, f"{src}_{dst}", dst): relation(
            *map(np.concatenate, zip(*parts, strict=True)), data.num_nodes[src], data.num_nodes[dst]
        )
        for (src, dst), parts in merged.items()
    }
    return dataclasses.replace(data, edges=edges)


@pytest.mark.parametrize("model", ["rgcn", "rgat"])
def test_models_learn_what_relations_tell(tmp_path, model):
    folder = train(tmp_path / "run", f"model={model}", "trainer.epochs=5")
    for each in reports_of(folder):
        assert each.seeds == rows_read([each], "item.label")
        for stage in ("sample", "gather", "forward", "backward", "update"):
            assert 0 < getattr(each.seconds, stage) < each.seconds.total
    assert accuracy_of(folder) > 0.75


def test_without_relations_a_model_does_worse(tmp_path, monkeypatch):
    monkeypatch.setattr(
        setup, "load_hetero", lambda *args, **how: without_relations(load_hetero(*args, **how))
    )
    folder = train(tmp_path / "run", "model=rgcn", "trainer.epochs=5")
    # Chance is 12.5 %, and one of two classes is what neighbours alone tell.
    assert 0.2 < accuracy_of(folder) < 0.7


def learned_rows(state: dict) -> np.ndarray:
    """Rows that tags have learned, in a model's state."""
    (file,) = (each for name, each in state.items() if name.endswith("_extra_state"))
    with np.load(file.path) as archive:
        return archive["rows"]


def config_of(num_ranks: int) -> Config:
    return compose(
        [
            *SMALL, "model=rgcn", "model.dropout=0", "sampler.fanouts=[-1,-1]",
            "data.options.num_items=300", f"trainer.batch_size={128 // num_ranks}",
            f"trainer.ranks={num_ranks}",
        ]
    )  # fmt: skip


def runs(folder: Path, num_ranks: int, names: list[str]) -> None:
    """Several runs by the same ranks, since to start ranks takes longer than all of them."""
    config = config_of(num_ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunReport, "finish", lambda *of_run: None)  # draws, also where this is forked
        for name in names:
            config.trainer.epochs = 1 if name == "half" else 2
            config.trainer.resume = str(folder / "half") if name == "resumed" else None
            _run_rank(make_trainer, config, folder / name)


def test_ranks_train_as_one_does_and_go_on_as_if_they_had_not_ended(tmp_path):
    launch(runs, 2, tmp_path, 2, ["whole", "half", "resumed"])
    runs(tmp_path, 1, ["one"])
    whole, one, resumed = (reports_of(tmp_path / name) for name in ("whole", "one", "resumed"))
    # Of three batches in an epoch one rank has two.
    assert all(128 < report.seeds <= 192 for report in (*whole, *one))
    assert [each.loss for each in whole] == pytest.approx([each.loss for each in one], rel=1e-3)
    assert whole[-1].loss < whole[0].loss

    assert [each.loss for each in resumed] == [each.loss for each in whole]
    ours, theirs, before = (
        Checkpoint.load(tmp_path / name) for name in ("resumed", "whole", "half")
    )
    for mine, other in ((ours.model, theirs.model), (ours.best_model, theirs.best_model)):
        assert np.array_equal(learned_rows(mine), learned_rows(other))
        names = [name for name in other if not name.endswith("_extra_state")]
        assert all(torch.equal(mine[name], other[name]) for name in names)
    assert not np.array_equal(learned_rows(before.model), learned_rows(theirs.model))

    # And what two ranks have saved, one can load.
    trainer = make_trainer(config_of(1))
    trainer.resume(before)
    rows = trainer.store.embedding("learned", "tag")(torch.arange(40)).detach().numpy()
    trainer.store.close()
    assert np.array_equal(rows, learned_rows(before.model))


def test_a_later_run_is_ordered_by_what_was_counted(tmp_path):
    nodes = {"item": 1500, "user": 400, "tag": 40}
    options = ["model=rgcn", "trainer.epochs=1", "store.feature_ratio=0.3"]
    counted = train(tmp_path / "counted", *options, "trainer.count_accesses=true")
    counts = load_accesses(counted / "accesses.npz", nodes)
    for ntype, table in (("item", "item.feat"), ("user", "user.feat"), ("tag", "tag.learned")):
        assert counts[ntype].sum() == rows_read(reports_of(counted), table) > 0
    for name, hotness in (("file", counted / "accesses.npz"), ("presampled", "presample")):
        later = train(tmp_path / name, *options, f"store.hotness={hotness}")
        share = reports_of(later)[0].tier_shares("item.feat")["device"]
        assert share > reports_of(counted)[0].tier_shares("item.feat")["device"]


def test_each_relation_may_have_its_fanout(tmp_path, capsys):
    rest = "rev_likes:3,rev_dislikes:0,rev_marks:0"
    options = ["model=rgcn", "trainer.epochs=1"]
    layer = "{likes:4,dislikes:-1,marks:0," + rest + "}"
    folder = train(tmp_path / "run", *options, f"sampler.fanouts=[{layer},{layer}]")
    reports = reports_of(folder)
    assert rows_read(reports, "tag.learned") == 0 < rows_read(reports, "user.feat")
    for name in ("fanouts", "eval_fanouts"):
        bad = [f"sampler.{name}=[{{likes:4}},{layer}]", f"hydra.run.dir={tmp_path / name}"]
        assert main(["train", *SMALL, *options, *bad]) == 1
        told = capsys.readouterr().err
        assert f"sampler.{name}" in told and "rev_dislikes, rev_likes" in told
        assert not (tmp_path / name / "metrics.jsonl").exists()  # before anything is trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["data=generated-relations", "model=graphsage"], "choose model=rgcn or model=rgat"),
        (["data=ogbn-mag", "model=gcn"], "choose model=rgcn or model=rgat"),
        (["data=cora", "model=rgat"], "choose model=gat, or data=ogbn-mag"),
        (["data=cora", "sampler.fanouts=[{_E:3},2]"], "give each layer a number"),
        (["data=cora", "sampler.fanouts=[x,2]"], "not a number"),
        (["data=ogbn-mag", "model=rgcn", "sampler.fanouts=[{cites:-2},2]"], "below -1"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(options, message):
    with pytest.raises(ConfigError, match=message):
        compose(options)


@pytest.mark.parametrize("model", ["rgcn", "rgat"])
def test_a_plan_without_a_run_is_that_of_the_run(monkeypatch, model):
    # What is kept in shared memory is planned alike where there are GPUs.
    monkeypatch.setattr("dgl_mgpu.train.minibatch.planned.probe", lambda _: preset("single"))
    config = compose([*SMALL, f"model={model}", "data.options.num_items=300"])
    planned, trainer = plan_for(config).plan, make_trainer(config)
    trainer.store.close()
    assert {*planned.tables, *OPTIMIZERS} == {*trainer.plan.tables}
    assert planned.rows == trainer.plan.rows and planned.gpu_bytes == trainer.plan.gpu_bytes


def test_learned_rows_on_disk_are_refused_alike_in_a_plan_and_in_a_run(tmp_path):
    config = compose(
        [
            *SMALL, "model=rgcn", "data.options.num_items=300", "store.gpu_memory=4KiB",
            "store.host_memory=4KiB", f"store.disk_path={tmp_path}",
        ]
    )  # fmt: skip
    errors = []
    for begin in (plan_for, make_trainer):
        with pytest.raises(ConfigError, match="part of it goes to disk") as error:
            begin(config)
        errors.append(str(error.value))
    assert errors[0] == errors[1] and "'learned' of 'tag'" in errors[0]


def test_placement_is_planned_for_the_largest_fanout():
    layers = "[{cites:5,writes:9},3,{cites:-1,writes:9}]"
    config = compose(
        [
            "data=ogbn-mag",
            "model=rgcn",
            f"sampler.fanouts={layers}",
            f"sampler.eval_fanouts={layers}",
        ]
    )
    assert config.sampler.planned_fanouts() == [9, 3, -1]

"""Runs that go on: with the configuration of the run before, which may be someone else's."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import yaml

from dgl_mgpu.cli import main
from dgl_mgpu.errors import CheckpointError
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint, checkpoints, saved_config
from dgl_mgpu.train.trained_run import load_run
from tests.train.checkpoint.test_checkpoint import make


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The configurations of the runs that were started in this folder, which train nothing."""
    monkeypatch.chdir(tmp_path)
    runs = []

    def train(config, folder):
        runs.append(config)
        dataclasses.replace(make(), config=asdict(config)).save(folder / "checkpoints")

    monkeypatch.setattr("dgl_mgpu.train.run.train", train)
    return runs


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_a_run_goes_on_with_flags_on_either_side_of_what_is_said(started, capsys, order):
    assert main(["train", "model=gcn", "trainer.lr=0.25", "hydra.run.dir=first"]) == 0
    several = ["--multirun", "trainer.resume=first", "trainer.epochs=3,4"]
    assert main(["train", *several[order]]) == 0
    assert [config.trainer.epochs for config in started[1:]] == [3, 4]
    assert all((c.model.name, c.trainer.lr) == ("gcn", 0.25) for c in started[1:])
    shown = ["--cfg=job", "trainer.resume=first"]
    assert main(["train", *shown[order]]) == 0
    assert "lr: 0.25" in capsys.readouterr().out and len(started) == 3


OWN_CONFIGURATION = """
defaults: [config, _self_]
data: {options: {num_nodes: 600}}
store: {policy: host}
trainer: {lr: 0.25}
"""


def test_a_run_of_ones_own_yaml_goes_on_with_all_it_had(started, tmp_path):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "mine.yaml").write_text(OWN_CONFIGURATION)
    (tmp_path / "conf" / "model" / "tiny.yaml").write_text("{name: gcn, hidden: 4}")
    own = ["--config-dir=conf", "--config-name=mine", "model=tiny", "data.options.num_edges=5000"]
    assert main(["train", *own, "hydra.run.dir=first"]) == 0
    (tmp_path / "conf" / "mine.yaml").write_text("defaults: [config]")  # the next experiment's
    assert main(["train", "trainer.resume=first", "hydra.run.dir=second"]) == 0
    said = ["trainer.epochs=30", "data.options.num_nodes=700"]
    assert main(["train", "trainer.resume=second", *said]) == 0
    first, second, third = started
    assert (second.trainer.resume, third.trainer.resume) == ("first", "second")
    second.trainer.resume = None
    assert second == first
    assert third.data.options == {"num_nodes": 700, "num_edges": 5000}
    assert (third.trainer.epochs, third.trainer.lr, third.model.hidden) == (30, 0.25, 4)


def test_a_group_chosen_anew_comes_in_place_of_the_runs(started):
    assert main(["train", "data=cora", "model=gcn", "trainer.lr=0.25", "hydra.run.dir=first"]) == 0
    assert main(["train", "trainer.resume=first", "model=gat"]) == 0
    assert main(["train", "trainer.resume=first", "data=cora", "model=gcn"]) == 0
    first, other, same = started
    assert (first.model.name, other.model.name) == ("gcn", "gat")
    assert other.trainer.lr == 0.25
    same.trainer.resume = None
    assert same == first


def test_options_of_the_data_are_the_runs_alone(started, tmp_path):
    """Also where others stand in the file that is below."""
    assert main(["train", "data=cora", "hydra.run.dir=first"]) == 0
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(OWN_CONFIGURATION)
    own = ["--config-dir=conf", "--config-name=mine"]
    assert main(["train", *own, "trainer.resume=first"]) == 0
    assert main(["train", *own, "trainer.resume=first", "data.options.num_nodes=5"]) == 0
    assert [run.data.options for run in started] == [{}, {}, {"num_nodes": 5}]


# -- runs of others ------------------------------------------------------------------------------

CALL = {"_target_": "os.mkdir", "_args_": ["called"]}
HYDRAS = {
    "callbacks": {"hydra": {"callbacks": {"one": CALL}}},
    "launcher": {"hydra": {"launcher": CALL}},
    "defaults": {"defaults": ["config", {"override hydra/launcher": "theirs"}, "_self_"]},
    "search path": {"hydra": {"searchpath": ["file:///tmp"]}},
    "deep within": {"data": {"options": {"deep": [{"inside": CALL}]}}},
    "ours": {"model": {"_target_": "dgl_mgpu.__main__.main", "_args_": [["script.py"]]}},
}


@pytest.mark.parametrize("theirs", HYDRAS.values(), ids=HYDRAS)
def test_nothing_that_a_runs_folder_names_is_called(started, tmp_path, theirs):
    assert main(["train", "trainer.lr=0.25", "hydra.run.dir=first"]) == 0
    path = tmp_path / "first" / ".hydra" / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **theirs}))
    said = ["++hydra.callbacks.one={_target_: os.mkdir, _args_: [called]}"]
    (path.parent / "overrides.yaml").write_text(yaml.safe_dump(said))
    assert main(["train", "trainer.resume=first"]) == 0
    assert started[1].trainer.lr == 0.25 and not (tmp_path / "called").exists()

    shutil.rmtree(path.parent)
    (file,) = checkpoints(tmp_path / "first" / "checkpoints")
    config = {**saved_config(file), **theirs}
    dataclasses.replace(make(), config=config).save(file.parent)
    status = main(["train", "trainer.resume=first"])
    assert not (tmp_path / "called").exists()
    # What the schema leaves open is handed to the data set, as the plain values that it is.
    assert status == (0 if "data" in theirs else 1)


def test_nothing_is_looked_up_for_a_runs_configuration(started, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SECRET", "told")
    config = {"data": {"name": "generated", "root": "${oc.env:SECRET}"}}
    dataclasses.replace(make(), config=config).save(tmp_path / "first")
    assert main(["train", "trainer.resume=first"]) == 1
    shown = capsys.readouterr().err
    assert "set data.root: a run has kept '${oc.env:SECRET}'" in shown and "told" not in shown
    for load in (Checkpoint.load, load_run):
        with pytest.raises(CheckpointError, match=r"field config does not do: set data\.root"):
            load(tmp_path / "first")
    assert not started


def test_no_damaged_file_of_hydras_is_noticed(started, tmp_path):
    assert main(["train", "trainer.lr=0.25", "hydra.run.dir=first"]) == 0
    rng = np.random.default_rng(0)
    for name in ("config.yaml", "overrides.yaml", "hydra.yaml"):
        path = tmp_path / "first" / ".hydra" / name
        path.write_bytes(rng.bytes(path.stat().st_size))
    assert main(["train", "trainer.resume=first"]) == 0
    assert started[1].trainer.lr == 0.25

"""Loggers: what they are given, which are chosen, and what happens where they fail."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from dgl_mgpu.errors import ConfigError, OutputError, UnavailableError
from dgl_mgpu.report import MetricsLog
from dgl_mgpu.report.loggers import (
    LOGGERS,
    MlflowLogger,
    WandbLogger,
    chosen_loggers,
    open_loggers,
)
from dgl_mgpu.report.metrics import scalars

CONFIGURATION = {"trainer.lr": 0.003, "sampler.fanouts": [10, 10], "trainer.resume": None}
VALUES = ({"loss/train": 2.0, "accuracy/valid": 0.25}, {"loss/train": 1.0, "accuracy/valid": 0.5})


class Recorder:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list = []
        self.closed = 0

    def log(self, values, epoch) -> None:
        self.logged.append((epoch, dict(values)))

    def close(self) -> None:
        self.closed += 1


def test_a_run_that_goes_on_logs_its_earlier_epochs_again(tmp_path, make_report):
    first, second = Recorder(), Recorder()
    reports = [make_report(epoch) for epoch in (1, 2, 3)]
    with MetricsLog(tmp_path, [first]) as log:
        for report in reports:
            log.append(report)
    with MetricsLog(tmp_path, [second], resume_epoch=2) as log:
        log.append(reports[2])
    assert first.logged == second.logged == [(r.epoch, scalars(r)) for r in reports]
    assert (first.closed, second.closed) == (1, 1)


class FakeWandb(ModuleType):
    """The functions of W&B that are called; the real one refuses other names of arguments."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = SimpleNamespace()
        self.started: list[dict] = []
        self.run = SimpleNamespace(rows=[], finished=0)
        self.run.log = lambda data, step: self.run.rows.append((step, data))
        self.run.finish = lambda: setattr(self.run, "finished", self.run.finished + 1)

    def init(self, *, project, name, dir, config, reinit):
        self.started.append({"project": project, "name": name, "dir": dir, "config": config})
        return self.run


def test_wandb_gets_the_configuration_and_each_epoch(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "graphs")
    (logger,) = open_loggers(["wandb"], tmp_path / "12-30-00", CONFIGURATION)
    for epoch, values in enumerate(VALUES, 1):
        logger.log(values, epoch)
    logger.close()
    expected = {"project": "graphs", "name": "12-30-00", "dir": tmp_path / "12-30-00"}
    assert wandb.started == [expected | {"config": CONFIGURATION}]
    assert wandb.run.rows == list(enumerate(VALUES, 1)) and wandb.run.finished == 1


class MlflowException(Exception):
    pass


class FakeMlflow(ModuleType):
    """One experiment and one run, and a server that can be made to fail."""

    MlflowException = MlflowException

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.__spec__ = SimpleNamespace()
        self.entities = SimpleNamespace(
            Param=lambda key, value: (key, value),
            Metric=lambda key, value, timestamp, step: (key, value, step),
        )
        self.calls: list = []
        self.fails = False

    def MlflowClient(self):
        return self

    def get_experiment_by_name(self, name):
        self.calls.append(("experiment", name))
        return None

    def create_experiment(self, name):
        if self.fails:
            raise MlflowException("no server")
        return "7"

    def create_run(self, experiment_id, run_name):
        self.calls.append(("run", experiment_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_batch(self, run_id, metrics=(), params=()):
        if self.fails:
            raise MlflowException("no server")
        assert len(params) <= 100, "MLflow takes no more in one request"
        self.calls.append((run_id, *params, *metrics))

    def set_terminated(self, run_id):
        self.calls.append(("ended", run_id))


@pytest.fixture
def mlflow(monkeypatch) -> FakeMlflow:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return fake


def test_mlflow_gets_the_configuration_and_each_epoch(mlflow):
    (logger,) = open_loggers(["mlflow"], Path("outputs/12-30-00"), CONFIGURATION)
    for epoch, values in enumerate(VALUES, 1):
        logger.log(values, epoch)
    logger.close()
    logger.close()
    params = [("trainer.lr", "0.003"), ("sampler.fanouts", "[10, 10]"), ("trainer.resume", "None")]
    epochs = [
        ("r", *((key, value, epoch) for key, value in values.items()))
        for epoch, values in enumerate(VALUES, 1)
    ]
    start = [("experiment", "dgl-mgpu"), ("run", "7", "12-30-00"), ("r", *params)]
    assert mlflow.calls == [*start, *epochs, ("ended", "r")]


def test_mlflow_gets_many_parameters_in_parts(mlflow):
    MlflowLogger(Path("run"), {f"key{number}": number for number in range(250)})
    assert [len(call) - 1 for call in mlflow.calls if call[0] == "r"] == [100, 100, 50]


def test_a_server_that_fails_in_a_run_is_warned_of_once(mlflow, recwarn):
    logger = MlflowLogger(Path("run"), {})
    mlflow.fails = True
    for epoch in (1, 2):
        logger.log(VALUES[0], epoch)
    logger.close()
    assert ["no server" in str(warning.message) for warning in recwarn] == [True]
    assert ("ended", "r") not in mlflow.calls


def test_a_server_that_fails_at_the_start_is_an_error(mlflow):
    mlflow.fails = True
    with pytest.raises(OutputError, match=r"no server; set MLFLOW_TRACKING_URI"):
        MlflowLogger(Path("run"), CONFIGURATION)


def test_auto_is_tensorboard_where_it_is_installed(monkeypatch):
    assert chosen_loggers("auto") == ["tensorboard"]
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert chosen_loggers("auto") == [] == chosen_loggers([])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wandb", r"trainer.loggers='wandb'.*not a list.*choose auto, or \["),
        (3, "not a list"),
        (None, "not a list"),
        (["weights"], "no logger 'weights'.*choose from mlflow, tensorboard, wandb"),
        (["tensorbord"], "did you mean 'tensorboard'"),
    ],
)
def test_other_names_are_errors(value, message):
    with pytest.raises(ConfigError, match=message):
        chosen_loggers(value)


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_that_is_not_installed_names_its_extra(name, tmp_path, monkeypatch):
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"{name} is not installed; pip install 'dgl-mgpu\[{name}\]'"
    with pytest.raises(UnavailableError, match=rf"loggers=\['{name}'\].*{message}"):
        chosen_loggers([name])
    if name != "tensorboard":  # torch wraps its error
        with pytest.raises(UnavailableError, match=message):
            LOGGERS[name](tmp_path, {})


def test_wandb_itself_keeps_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger(tmp_path, CONFIGURATION)
    logger.log(VALUES[0], 1)
    logger.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_mlflow_itself_keeps_a_run_in_a_database(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    logger = MlflowLogger(tmp_path, CONFIGURATION)
    for epoch, values in enumerate(VALUES, 1):
        logger.log(values, epoch)
    logger.close()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("dgl-mgpu").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["trainer.lr"] == "0.003"
    history = client.get_metric_history(run.info.run_id, "accuracy/valid")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]

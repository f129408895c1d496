"""Loggers: where the metrics of a run go beside its own folder's ``metrics.jsonl``.

One interface, `Logger`, over TensorBoard, Weights & Biases and MLflow.  Each of these is configured
by its own environment variables (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``, …).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dgl_mgpu.errors import ConfigError, OutputError, nearest
from dgl_mgpu.utils.extras import is_installed, require, required

#: The project of a run in W&B, and its experiment in MLflow, unless the environment names another.
PROJECT = "dgl-mgpu"
_MAX_PARAMS = 100  # of one request to MLflow


class Logger(Protocol):
    """Takes the metrics of a run, epoch by epoch, on one rank."""

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        """Take one epoch's values, by names such as ``"loss/train"``.

        A run that goes on logs its earlier epochs again.
        """

    def close(self) -> None:
        """Send or write what is left; may be called again."""


class TensorBoardLogger:
    """Writes TensorBoard's events into the folder of a run; later ones hide those before."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any]) -> None:
        with required("log to TensorBoard"):
            # Imported here: it takes a second.
            from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=1)

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        """See `Logger`."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, epoch)
        self._writer.flush()

    def close(self) -> None:
        """See `Logger`."""
        self._writer.close()


class WandbLogger:
    """Logs to Weights & Biases: a run of this folder's name, with the configuration."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any]) -> None:
        with required("log to Weights & Biases"):
            import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", folder.name),
            dir=folder,
            config=dict(configuration),
            reinit="create_new",
        )

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        """See `Logger`."""
        self._run.log(dict(values), step=epoch)

    def close(self) -> None:
        """See `Logger`."""
        self._run.finish()


class MlflowLogger:
    """Logs to MLflow: a run of this folder's name, with the configuration as its parameters.

    A server that fails while the run trains is warned of, and gets nothing more.
    """

    def __init__(self, folder: Path, configuration: Mapping[str, Any]) -> None:
        with required("log to MLflow"):
            import mlflow

        self._mlflow = mlflow
        try:
            self._client = mlflow.MlflowClient()
            self._run: str | None = self._start(folder.name, configuration)
        except mlflow.MlflowException as error:
            raise OutputError(
                "log to MLflow", str(error), "set MLFLOW_TRACKING_URI to a server or a database"
            ) from error

    def _start(self, run_name: str, configuration: Mapping[str, Any]) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run: str = self._client.create_run(number, run_name=run_name).info.run_id
        param = self._mlflow.entities.Param
        params = [param(key, str(value)) for key, value in configuration.items()]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(run, params=params[start : start + _MAX_PARAMS])
        return run

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        """See `Logger`."""
        if self._run is None:
            return
        now = round(1e3 * time.time())
        metrics = [
            self._mlflow.entities.Metric(key, value, now, epoch) for key, value in values.items()
        ]
        try:
            self._client.log_batch(self._run, metrics=metrics)
        except self._mlflow.MlflowException as error:
            self._run = None
            warnings.warn(
                f"MLflow gets no more of this run, whose metrics are in its folder: {error}",
                stacklevel=2,
            )

    def close(self) -> None:
        """See `Logger`."""
        if self._run is not None:
            self._client.set_terminated(self._run)
            self._run = None


#: What ``trainer.loggers`` names.
LOGGERS: dict[str, Callable[[Path, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def chosen_loggers(value: Any) -> list[str]:
    """The names that ``trainer.loggers`` chooses; "auto" is TensorBoard where it is installed.

    Raises
    ------
    ConfigError
        If it is neither "auto" nor a list of names in `LOGGERS`.
    UnavailableError
        If a package that it names is not installed.
    """
    if value == "auto":
        return ["tensorboard"] if is_installed("tensorboard") else []
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(
            f"trainer.loggers={value!r}",
            "it is not a list",
            f"choose auto, or [{', '.join(LOGGERS)}]",
        )
    for name in value:
        if name not in LOGGERS:
            raise ConfigError(
                f"trainer.loggers={list(value)}",
                f"there is no logger {name!r}",
                nearest(str(name), LOGGERS),
            )
        require(name, f"trainer.loggers={list(value)}")
    return list(value)


def open_loggers(value: Any, folder: Path, configuration: Mapping[str, Any]) -> list[Logger]:
    """Start the loggers that ``trainer.loggers`` chooses.

    Parameters
    ----------
    value : "auto" or list of str
        See `chosen_loggers`, and the errors there.
    folder : Path
        The run's own, whose name the run has elsewhere, too.
    configuration : mapping from str to value
        The run's, by keys such as ``"trainer.lr"``.
    """
    return [LOGGERS[name](folder, configuration) for name in chosen_loggers(value)]

"""What a run has trained, to be used."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dgl_mgpu.configuration import to_config
from dgl_mgpu.errors import (
    CheckpointError,
    ConfigError,
    DGLMGPUError,
    InvalidInputError,
    OutputError,
    UnavailableError,
)
from dgl_mgpu.training.checkpoint import Checkpoint
from dgl_mgpu.training.config import Config
from dgl_mgpu.wholefile import written_whole


@dataclass(frozen=True)
class TrainedRun:
    """A run's best model, with the data it was trained on.

    Attributes
    ----------
    config : Config
        What the run was configured with, but for what says how it was carried out: it is one rank,
        on ``device``.
    model : nn.Module
        Of the epoch that validated best; in eval mode, on ``device``.
    """

    config: Config
    model: nn.Module
    _predict: Callable[[], torch.Tensor] = field(repr=False)

    def predict(self) -> torch.Tensor:
        """The model's logits for all nodes of its data set.

        They are of all neighbours, by :func:`dgl_mgpu.inference`; those of PinSAGE and of models of
        several types, which mini-batches give, of the neighbours that the run was tested with.

        Returns
        -------
        Tensor, float32, shape (nodes, classes)
            In the host's memory.  Of the type that is classified, if there are several.

        Raises
        ------
        ConfigError
            If the run was no classification of nodes.
        DGLMGPUError
            As :func:`dgl_mgpu.inference`.
        """
        if self.config.task != "node_classification":
            raise ConfigError(
                "predict classes of nodes",
                f"a run of task={self.config.task}",
                "pass the model to dgl_mgpu.inference, for the rows that it has of nodes",
            )
        return self._predict()


def load_run(
    folder: str | os.PathLike[str],
    device: str = "cpu",
    *,
    root: str | os.PathLike[str] | None = None,
) -> TrainedRun:
    """The best model of a run of ``dgl-mgpu train``, with its data.

    The data set says how many features and classes there are, and is read.

    Parameters
    ----------
    folder : path
        The run's folder, or one of its checkpoints.
    device : {'cpu', 'cuda'}
    root : path, optional
        Where the data lies, if not where the run had it (``data.root``).

    Raises
    ------
    CheckpointError
        If there is no checkpoint, or a damaged one, or one of other data.
    InvalidInputError
        If the device is none of these, or the process is one of a job's ranks.
    UnavailableError
        If there is no GPU, or no CuPy.
    DGLMGPUError
        If the data cannot be read, or does not fit.
    """
    asked = f"load the run {folder}"
    if device not in ("cpu", "cuda"):
        raise InvalidInputError(asked, f"device={device!r}", "pass 'cpu' or 'cuda'")
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise InvalidInputError(
            asked, f"a job of {dist.get_world_size()} ranks", "load it in a process of its own"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(f"{asked} to a GPU", "torch sees none", "use device 'cpu'")
    try:
        checkpoint = Checkpoint.load(Path(folder))
    except CheckpointError as error:
        raise CheckpointError(
            asked, error.found, "name the folder of a run, or another of its checkpoints"
        ) from error
    if not isinstance(checkpoint.config, Mapping):
        raise CheckpointError(
            asked, f"a configuration of {checkpoint.config!r}", "name a run of dgl-mgpu train"
        )
    config = _carried_out_here(checkpoint.config, device)
    if root is not None:
        config.data.root = os.fspath(root)
    gpus = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(gpus):  # the caller's random numbers are not the run's to draw
        model, predict = _restored(config, torch.device(device))
    try:
        model.load_state_dict(checkpoint.best_model)
    except RuntimeError as error:
        raise CheckpointError(
            asked,
            f"its model is not one of this data ({str(error).splitlines()[-1].strip()})",
            "name the data that the run was trained on",
        ) from error
    return TrainedRun(config, model.eval(), predict)


def write_predictions(folder: str | os.PathLike[str], out: Path, device: str = "cpu") -> int:
    """Write a run's predictions; return for how many nodes.

    Parameters
    ----------
    folder, device
        As for :func:`load_run`.
    out : path
        A NumPy archive: ``classes``, int64, and ``logits``, float32, with a row for each node.  It
        takes the place of a file of that name.

    Raises
    ------
    OutputError
        If it cannot be written.
    DGLMGPUError
        As :func:`load_run` and :meth:`TrainedRun.predict`.
    """
    asked = f"write predictions to {out}"
    if out.is_dir():
        raise OutputError(asked, "it is a folder", "name a file")
    run = load_run(folder, device)
    try:
        # What cannot be written is told before it is computed.
        with written_whole(out) as file:
            logits = run.predict()
            np.savez(file, classes=logits.argmax(1).numpy(), logits=logits.numpy())
    except OSError as error:
        if isinstance(error, DGLMGPUError):
            raise
        raise OutputError(asked, str(error), "name a file that can be written") from error
    return len(logits)


def _carried_out_here(saved: Mapping[str, Any], device: str) -> Config:
    """A run's configuration for one rank that trains nothing."""
    config: Config = to_config(saved)
    config.topology = "auto"
    config.trainer.ranks, config.trainer.resume = 1, None
    config.trainer.count_accesses = config.trainer.cuda_graphs = False
    config.sampler.num_workers = 0
    config.store.device, config.store.hotness = device, "degree"
    return config


def _restored(config: Config, device: torch.device) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A run's model, not yet as it was trained, and what gives its logits for all nodes."""
    if config.mode == "fullgraph":
        from dgl_mgpu.fullgraph.run import untrained

        return untrained(config, device)
    from dgl_mgpu.minibatch.run import untrained as of_minibatches

    return of_minibatches(config)

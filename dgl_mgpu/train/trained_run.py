"""The trained model of a run, for predictions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.config.schema import Config, FullGraphConfig, config_of_run
from dgl_mgpu.errors import (
    CheckpointError,
    InvalidInputError,
    OutputError,
    PlanDoesNotFitError,
    RankFailedError,
    UnavailableError,
)
from dgl_mgpu.machine.shared_memory import SharedMemory
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.checkpoint.validation import STATE_ERRORS, require_dtypes
from dgl_mgpu.train.trainer import Trainer
from dgl_mgpu.utils.atomic_write import atomic_write, typed_output
from dgl_mgpu.utils.stages import stage


@dataclass(frozen=True)
class TrainedRun:
    """A run's best model, with the data it was trained on.

    Attributes
    ----------
    config : Config
        The run's configuration, for ``device`` and the present ranks: options of how the run was
        carried out are replaced.
    model : nn.Module
        Of the epoch that validated best; in eval mode, on ``device``.
    """

    config: Config
    model: nn.Module
    _trainer: Trainer = field(repr=False)

    def predict(self) -> torch.Tensor:
        """What the model gives for all nodes of its data set: logits, or of a run of link
        prediction embeddings, of which the product of two is the score of a pair.

        They are of all neighbours, by :func:`dgl_mgpu.inference`; those of PinSAGE and of models of
        several types, which mini-batches give, of the neighbours that the run was tested with.
        Edges that link prediction held out are not among them, as in the run's own test.

        In a job of several ranks, all of them call it and share the work.

        Returns
        -------
        Tensor, float32, shape (nodes, classes) or (nodes, ``model.hidden``)
            In the host's memory, on every rank.  Of the type that is classified, if there are
            several.

        Raises
        ------
        DGLMGPUError
            As :func:`dgl_mgpu.inference`.
        """
        return self._trainer.predict()


def load_run(
    folder: str | os.PathLike[str],
    device: str = "cpu",
    *,
    root: str | os.PathLike[str] | None = None,
) -> TrainedRun:
    """The best model of a run of ``dgl-mgpu train``, with its data.

    The data set says how many features and classes there are, and is read.  In a job of several
    ranks, all of them call it with the same arguments; the first one reads the run and its data.

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
        If the device is none of these.
    UnavailableError
        If there is no GPU, or no CuPy.
    DGLMGPUError
        If the data cannot be read, or does not fit.
    RankFailedError
        On the other ranks, if the first one raised any of these.
    """
    action = f"load the run {folder}"
    if device not in ("cpu", "cuda"):
        raise InvalidInputError(action, f"there is no device {device!r}", "pass 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(f"{action} to a GPU", "torch sees no GPU", "use device 'cpu'")
    everyone = Communicator.of_all_machines()
    checkpoint = everyone.broadcast_from_rank0(action, partial(_checkpoint, action, Path(folder)))
    config = _prediction_config(checkpoint.config, device, everyone.size)
    if root is not None:
        config.data.root = os.fspath(root)
    gpus = [torch.cuda.current_device()] if device == "cuda" else []
    try:
        # The caller's random numbers are not the run's to draw.
        with stage("build"), torch.random.fork_rng(gpus):
            trainer = _make_trainer(config, torch.device(device))
    except PlanDoesNotFitError as error:
        # The error's advice is for training; here memory is configured by the run.
        had = checkpoint.config["trainer"]["ranks"]
        fix = (
            f"use more ranks than {everyone.size} (the run had {had}), whose memory counts together"
        )
        memory = SharedMemory.of_this_machine()
        if error.needed > memory.room:
            fix += f", or {memory.advice(error.needed)}"
        raise PlanDoesNotFitError(
            action, error.found, fix, error.needed, error.available
        ) from error
    try:
        require_dtypes(trainer.model, checkpoint.best_model)
        trainer.model.load_state_dict(checkpoint.best_model)
    except STATE_ERRORS as error:  # ours, torch's, or of learned rows
        if isinstance(error, RankFailedError):
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        why = error.found if isinstance(error, CheckpointError) else lines[-1]
        raise CheckpointError(
            action,
            f"its model does not fit this data ({why.strip()})",
            "name the data that the run was trained on",
        ) from error
    return TrainedRun(config, trainer.model.eval(), trainer)


def write_predictions(folder: str | os.PathLike[str], out: Path, device: str = "cpu") -> str:
    """Write what a run's model gives for all nodes; return a description of it.

    In a job of several ranks, all of them call it, and the first one writes.  ``out``, which may
    take the place of a file, is a NumPy archive: ``classes``, int64, and ``logits``, float32, with
    a row for each node; ``labels``, int8 of 1 and 0, in place of classes where nodes may have
    several; or ``embeddings``, float32, of a run of link prediction.  Raises OutputError if it
    cannot be written, and as `load_run` and `TrainedRun.predict`.
    """
    action = f"write predictions to {out}"
    if out.is_dir():
        raise OutputError(action, "it is a folder", "name a file")
    run = load_run(folder, device)
    is_first = Communicator.of_all_machines().rank == 0
    with (
        typed_output(action, "name a file that can be written"),
        # Raises before predictions are computed that cannot be written.
        atomic_write(out) if is_first else contextlib.nullcontext() as file,
    ):
        rows = run.predict()
        predictions = run._trainer.criterion.predictions(rows)
        if file is not None:
            arrays: dict[str, Any] = {name: values.numpy() for name, values in predictions.items()}
            with stage("report"):  # of any length
                np.savez(file, **arrays)
    return f"{' and '.join(predictions)} of {len(rows):,} nodes"


def _checkpoint(action: str, folder: Path) -> Checkpoint:
    try:
        return Checkpoint.load(folder)
    except CheckpointError as error:
        raise CheckpointError(
            action, error.found, "name the folder of a run, or another of its checkpoints"
        ) from error


def _prediction_config(saved: Mapping[str, Any], device: str, num_ranks: int) -> Config:
    """A run's configuration for ranks that train nothing."""
    config = config_of_run(saved)
    config.topology = "auto"  # this and the links were of the run's machine and its ranks
    config.store = replace(config.store, links="auto", device=device, hotness="degree")
    config.trainer.ranks, config.trainer.resume = num_ranks, None
    config.trainer.count_accesses = config.trainer.cuda_graphs = False
    config.sampler.num_workers = 0
    config.fullgraph.exchange = FullGraphConfig.exchange  # others may be for GPUs alone
    return config


def _make_trainer(config: Config, device: torch.device) -> Trainer:
    """The trainer of a run, with an untrained model."""
    if config.mode == "fullgraph":
        from dgl_mgpu.train.fullgraph import run as fullgraph

        return fullgraph.make_trainer(config, device)
    from dgl_mgpu.train.minibatch import run as minibatch

    return minibatch.make_trainer(config)

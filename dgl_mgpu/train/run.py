"""The training loop of a run on all ranks: epochs, checkpoints and the report."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.config.schema import Config, TrainerConfig, flat
from dgl_mgpu.data import check_options
from dgl_mgpu.errors import ConfigError, NonFiniteLossError, RankFailedError, WorkerFailedError
from dgl_mgpu.report import best_epoch
from dgl_mgpu.report.loggers import chosen_loggers
from dgl_mgpu.report.metrics import METRICS_FILE, read_metrics
from dgl_mgpu.report.profile import Profile
from dgl_mgpu.train.checkpoint.checkpoint import (
    Checkpoint,
    LastCheckpoint,
    require_resumable,
    run_folder,
)
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.launch.preemption import PreemptionHandler
from dgl_mgpu.train.launch.torchrun_store import keep_folder
from dgl_mgpu.train.launch.typed_errors import typed_memory, warn_of_time
from dgl_mgpu.train.report import RunReport
from dgl_mgpu.train.trainer import Progress, Trainer
from dgl_mgpu.utils.stages import stage
from dgl_mgpu.utils.torchrun import torchruns_restarts, under_torchrun

log = logging.getLogger(__name__)

# Ranks that are allowed on any machine, and for each core.
_RANKS_ANYWHERE, _RANKS_PER_CORE = 16, 4
# Options that may differ between the machines of a run.
_OF_A_MACHINE = {
    "data.root", "sampler.num_workers", "store.disk_path", "topology", "trainer.resume",
}  # fmt: skip


def check_start(config: Config) -> None:
    """Check the configuration before ranks start; under torchrun, set ``trainer.ranks``."""
    if under_torchrun():
        config.trainer.ranks = int(os.environ["WORLD_SIZE"])
    config.check()
    action = f"trainer.max_restarts={config.trainer.max_restarts}"
    if config.trainer.max_restarts and under_torchrun():
        raise ConfigError(
            action, "torchrun starts the ranks", "leave it out, and give torchrun --max-restarts"
        )
    if config.trainer.max_restarts and config.trainer.ranks == 1:
        raise ConfigError(
            action,
            "the only rank is this process, and nothing is left to start it again",
            "use two ranks or more, or run the command again with trainer.resume",
        )
    chosen_loggers(config.trainer.loggers)
    check_options(config.data.name, config.data.options)
    if config.mode == "minibatch":
        config.store_options()  # which checks them
    if under_torchrun():
        return  # ranks exist, and the checkpoint may be on the first rank's machine only
    if config.topology == "auto":
        require_room(config.trainer.ranks)
    if config.trainer.resume is not None:
        require_resumable(Path(config.trainer.resume), asdict(config))


def require_room(num_ranks: int, command: str = "train") -> None:
    """Raise ConfigError for far more ranks than this machine has cores or GPUs for."""
    cores, gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    most = max(_RANKS_ANYWHERE, _RANKS_PER_CORE * cores, gpus)
    if num_ranks > most:
        raise ConfigError(
            f"start {num_ranks} ranks",
            f"each is a process, and this machine has {cores} cores and {gpus} GPUs",
            f"use {most} or fewer, or start them yourself: torchrun --nproc-per-node={num_ranks} "
            f"-m dgl_mgpu.cli {command} …",
        )


def train(config: Config, folder: Path) -> None:
    """Train as configured; metrics, curves and checkpoints go to ``folder``.

    Raises typed errors, before work starts where that can be known, and Stopped after SIGTERM,
    SIGHUP or Ctrl-C, once the last checkpoint is written.
    """
    check_start(config)
    if config.mode == "fullgraph":
        from dgl_mgpu.train.fullgraph.run import check_machine, make_trainer
    else:
        from dgl_mgpu.train.minibatch.run import (  # type: ignore[assignment]
            check_machine,
            make_trainer,
        )
    check_machine(config)
    run(make_trainer, config, folder)


def run(make_trainer: Callable[[Config], Trainer], config: Config, folder: Path) -> None:
    """Train on ``trainer.ranks`` ranks, each with a trainer of ``make_trainer``.

    ``make_trainer`` is a function of a module, which other processes import.  When a rank is lost,
    or one of its workers, all are started again ``trainer.max_restarts`` times at most, and
    continue from the run's last checkpoint.
    """
    warn_of_time()
    last = LastCheckpoint(folder, config.trainer.resume)
    most = config.trainer.max_restarts
    for restarts in range(most + 1):
        try:
            with typed_memory("start ranks", "use fewer ranks"):
                launch(
                    _run_rank, config.trainer.ranks, make_trainer, config, folder,
                    restarts + torchruns_restarts(),
                    hang_after=config.trainer.hang_after,
                )  # fmt: skip
            return
        except (RankFailedError, WorkerFailedError) as error:
            if restarts == most:
                raise
            resume = config.trainer.resume if last.path is None else str(last.path)
            log.warning(
                "cannot %s: %s; restart %d of %d continues from %s",
                error.asked, error.found, restarts + 1, most, resume or "the beginning",
            )  # fmt: skip
            config = replace(config, trainer=replace(config.trainer, resume=resume))


def _run_rank(
    make_trainer: Callable[[Config], Trainer], config: Config, folder: Path, restarts: int = 0
) -> None:
    negatives = "links.negatives, " if config.task == "link_prediction" else ""
    fix = (
        "use more ranks, a smaller model.hidden, or fullgraph.features=host"
        if config.mode == "fullgraph"
        else f"lower trainer.batch_size, {negatives}sampler.fanouts, model.hidden or "
        "store.gpu_memory, or use trainer.cuda_graphs=false"
    )
    with typed_memory("train as configured", fix):
        _train(make_trainer, config, folder, restarts)


def _train(
    make_trainer: Callable[[Config], Trainer], config: Config, folder: Path, restarts: int
) -> None:
    everyone = Communicator.of_all_machines()
    _require_one_configuration(everyone, config)
    first = everyone.rank == 0
    # Under torchrun each rank has a folder of its own: the first rank's is the run's.
    folder = everyone.broadcast_from_rank0("choose the run's folder", lambda: folder)
    # Its folder may be on the first rank's machine alone.
    checkpoint = everyone.broadcast_from_rank0("read the checkpoint", partial(_checkpoint, config))
    with stage("build"):
        trainer = make_trainer(config)
    if checkpoint is not None:
        trainer.resume(checkpoint)
        del checkpoint  # its states may take as much memory, or space, as the model itself
    with (
        PreemptionHandler(everyone).listening() as stop,
        RunReport(config, folder, trainer, restarts)
        if first
        else contextlib.nullcontext() as report,
        Profile(config.trainer.profile if first else 0, folder) as profile,
    ):
        if trainer.epoch == config.trainer.epochs:
            # Nothing is left to train, but the folder may be a new one.
            _save(trainer, config, folder)
        for epoch in range(trainer.epoch + 1, config.trainer.epochs + 1):
            last = epoch == config.trainer.epochs
            watch = LossWatch(epoch, config.trainer.terminate_on_nan)
            for progress in trainer.run_epoch(last):
                if report:
                    report.step(progress)
                profile.step()
                watch.step(progress)
                if stop.after_step():
                    trainer.stop()
            is_whole = trainer.epoch == epoch
            if is_whole:
                watch.epoch(trainer.reports[-1].loss)
            stops = not is_whole or (stop.after_epoch() and not last)
            if stops or last:
                profile.close()
            if stops or last or epoch % config.trainer.checkpoint_every == 0:
                _save(trainer, config, folder)
            with stage("report"):
                if report and is_whole:
                    report.epoch(trainer.reports[-1])
                if report and stops:
                    report.stopped()
            if stops:
                raise stop.stopped()
        with stage("evaluate"):
            test_accuracy = trainer.test()
        with stage("report"):
            trainer.finish(folder)
            if report:
                report.finish(trainer.reports, test_accuracy)


def _save(trainer: Trainer, config: Config, folder: Path) -> None:
    """Write a checkpoint on the first rank; collective."""
    with stage("checkpoint"):
        if under_torchrun():  # its number of ranks is not configured
            config = replace(config, trainer=replace(config.trainer, ranks=TrainerConfig.ranks))
        checkpoint, best = trainer.checkpoint(asdict(config)), best_epoch(trainer.reports)
        write = partial(
            checkpoint.save,
            folder / "checkpoints",
            config.trainer.keep_checkpoints,
            None if best is None else best.epoch,
        )
        everyone = Communicator.of_all_machines()
        everyone.broadcast_from_rank0("write a checkpoint", write)
        if everyone.rank == 0:
            keep_folder(folder)


def _require_one_configuration(ranks: Communicator, config: Config) -> None:
    """Check that all ranks have one configuration: those of torchrun read a command line each."""
    first, *others = ranks.all_gather(flat(asdict(config)))
    for rank, other in enumerate(others, 1):
        for key in sorted((first.keys() | other.keys()) - _OF_A_MACHINE):
            if first.get(key) != other.get(key):
                raise ConfigError(
                    f"train with {key}={first.get(key)} on every rank",
                    f"rank {rank} has {key}={other.get(key)}",
                    "give all ranks the same options; where a machine lacks the folder of the run"
                    " that is resumed, give it that run's options too",
                )


def _checkpoint(config: Config) -> Checkpoint | None:
    """The checkpoint to resume from, if any."""
    if config.trainer.resume is None:
        return None
    checkpoint = Checkpoint.load(Path(config.trainer.resume))
    checkpoint.require_same_run(asdict(config))
    epochs = config.trainer.epochs
    # A run that failed after its last epoch still needs its test and its report.
    ended = checkpoint.epoch == epochs == checkpoint.config["trainer"]["epochs"]
    if checkpoint.epoch >= epochs and not (ended and not _is_complete(config.trainer.resume)):
        raise ConfigError(
            f"resume up to epoch {epochs}",
            f"the checkpoint is of epoch {checkpoint.epoch}",
            "raise trainer.epochs",
        )
    return checkpoint


def _is_complete(resumed: str) -> bool:
    """Whether the resumed run wrote its summary."""
    file = run_folder(resumed) / METRICS_FILE
    return file.exists() and read_metrics(file)[1] is not None


class LossWatch:
    """Warns of the first loss in an epoch that is not finite, or raises NonFiniteLossError."""

    def __init__(self, epoch: int, raises: bool) -> None:
        self._epoch = epoch
        self._raises = raises
        self._has_warned = False

    def step(self, progress: Progress) -> None:
        """Check a step.  A mean over the epoch's steps stays NaN once one was."""
        # On a GPU neither is known of the first steps.
        if not math.isnan(progress.accuracy):
            self._check(progress.loss, f"by step {progress.step}")

    def epoch(self, loss: float) -> None:
        """Check the mean loss of all ranks."""
        self._check(loss, "by its end")

    def _check(self, loss: float, when: str) -> None:
        if math.isfinite(loss) or self._has_warned:
            return
        self._has_warned = True
        action, problem = f"train epoch {self._epoch}", f"the loss is {loss} {when}"
        fix = "lower trainer.lr, use trainer.precision=float32, and look for NaN in the features"
        if self._raises:
            raise NonFiniteLossError(action, problem, fix)
        warnings.warn(
            f"{action}: {problem}; {fix}. Such an epoch is not taken for the best one; "
            "trainer.terminate_on_nan=true ends the run.",
            stacklevel=2,
        )

"""The base class of trainers: epochs, the best model so far, checkpoints."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import CheckpointError
from dgl_mgpu.placement import Plan
from dgl_mgpu.report import EpochReport, best_epoch, merge
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.checkpoint.validation import STATE_ERRORS, require_dtypes
from dgl_mgpu.train.objectives import Criterion
from dgl_mgpu.train.optimizer import full_state_dict, load_full_state


class Progress(NamedTuple):
    """Progress of an epoch after a step."""

    step: int
    #: Means so far; on a GPU as they were some steps ago, and at first NaN.
    loss: float
    accuracy: float
    seeds: int  # so far, of all ranks


class Trainer(ABC):
    """Trains a model on one rank, together with the others, epoch by epoch.

    The model computes on ``device``.  Every ``eval_every`` epochs, and after the last, it is
    validated, by the metric of ``criterion``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        eval_every: int,
        criterion: Criterion,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.criterion = criterion
        #: Of the epochs done, all ranks together.
        self.reports: list[EpochReport] = []
        #: State dict of the epoch of best validation accuracy.
        self.best_model: dict[str, Any] = copy.deepcopy(model.state_dict())
        self._batches = 0  # of all ranks, done in the epoch begun
        self._is_stopping = False
        self._ranks = Communicator.of_all_machines()
        self._device = device
        self._eval_every = eval_every

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return len(self.reports)

    @property
    def plan(self) -> Plan | None:
        """The placement of the store's data, if there is a store."""
        return None

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""

    @abstractmethod
    def _run_epoch(
        self, number: int, validate: bool
    ) -> Generator[Progress, None, EpochReport | None]:
        """Train an epoch; return this rank's report of it, or None if it was stopped before."""

    @abstractmethod
    def predict(self) -> torch.Tensor:
        """Outputs of the model for all nodes of the target's type, float32, in the host's memory.

        Collective.
        """

    @abstractmethod
    def _test(self) -> float:
        """Test accuracy of the model as it is."""

    def run_epoch(self, last: bool) -> Iterator[Progress]:
        """Train one epoch step by step, validate, and append the report of all ranks to `reports`.

        ``last`` says that this is the run's last epoch.  After `stop` there is no report, and the
        next call continues.
        """
        number = self.epoch + 1
        self._is_stopping = False
        own = yield from self._run_epoch(number, last or number % self._eval_every == 0)
        if own is None:
            return
        self._batches = 0
        report = merge(self._ranks.all_gather(own))
        self.reports.append(report)
        if report.valid_accuracy is not None and best_epoch(self.reports) is report:
            self.best_model = copy.deepcopy(self.model.state_dict())

    def stop(self) -> None:
        """Stop after this step, the same on all ranks; an epoch of a single step is completed."""
        self._is_stopping = True

    def test(self) -> float:
        """Test accuracy of the model of the epoch that validated best."""
        current = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.best_model)
        try:
            return self._test()
        finally:
            self.model.load_state_dict(current)

    def checkpoint(self, config: dict) -> Checkpoint:
        """The state after the epochs and batches done so far; collective."""
        return Checkpoint(
            epoch=self.epoch,
            model=self.model.state_dict(),
            optimizer=full_state_dict(self.optimizer),
            best_model=self.best_model,
            random=self._ranks.all_gather(self._random_state()),
            reports=[report.to_dict() for report in self.reports],
            config=config,
            plan={} if self.plan is None else self.plan.to_dict(),
            batches=self._batches,
            parts=self._ranks.all_gather(self._part()) if self._batches else [],
            captured=self._ranks.all_gather(self._captured_state()),
        )

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, which any number of ranks may have written.

        Raises CheckpointError if its states are not those of this model and optimizer.
        """
        try:
            for state in (checkpoint.best_model, checkpoint.model):
                require_dtypes(self.model, state)
                self.model.load_state_dict(state)
            load_full_state(self.optimizer, checkpoint.optimizer)
            self.reports = [EpochReport.from_dict(report) for report in checkpoint.reports]
            # A rank that the saved run did not have starts without this state.
            for captured in checkpoint.captured[self._ranks.rank :][:1]:
                self._load_captured_state(captured)
            self._batches = self._batches_done(checkpoint)
            self._load_parts(checkpoint.parts[self._ranks.rank :: self._ranks.size])
            # A rank that the saved run lacked, or had on another kind of device, keeps its seed.
            if self._ranks.rank < len(checkpoint.random):
                generators = checkpoint.random[self._ranks.rank]
                if len(generators) == len(self._random_state()):
                    self._set_random_state(generators)
        except STATE_ERRORS as error:
            raise CheckpointError(
                "resume from a checkpoint",
                f"its states are not this run's ({(str(error).splitlines() or ['none'])[0]})",
                "resume with the configuration of the run, or start a new run",
            ) from error
        self.best_model = checkpoint.best_model

    def _batches_done(self, checkpoint: Checkpoint) -> int:
        """Batches of the epoch begun that a checkpoint has, checked against what there are."""
        # The last round may have had fewer batches than ranks.
        most = self._batches_per_epoch + len(checkpoint.parts) - 1
        if checkpoint.batches and (checkpoint.batches > most or not self._batches_per_epoch):
            raise ValueError(
                f"{checkpoint.batches} batches are done of an epoch that has "
                f"{self._batches_per_epoch}"
            )
        if checkpoint.batches and not any(part.get("seeds") for part in checkpoint.parts):
            raise ValueError(f"{checkpoint.batches} batches are done, of no seeds")
        return checkpoint.batches

    @property
    def _batches_per_epoch(self) -> int:
        """Batches of all ranks in an epoch that may end within; else 0."""
        return 0

    def finish(self, folder: Path) -> None:  # noqa: B027 (there may be nothing)
        """Write remaining files after the last epoch, and release resources."""

    def _part(self) -> dict[str, Any]:
        """This rank's sums over the batches done in the epoch begun."""
        return {}

    def _load_parts(self, parts: list[dict[str, Any]]) -> None:  # noqa: B027 (as above)
        """Continue an epoch from the sums of none or several ranks."""

    def _captured_state(self) -> dict[str, Any]:
        """The state of this rank's CUDA graph capture; empty where steps are not captured."""
        return {}

    def _load_captured_state(self, state: dict[str, Any]) -> None:  # noqa: B027 (as above)
        """Restore the state of CUDA graph capture."""

    def _random_state(self) -> torch.Tensor:
        """States of the generators that a model may draw from, its device's and the CPU's."""
        state = torch.get_rng_state()
        if self._device.type == "cuda":
            return torch.cat([torch.cuda.get_rng_state(self._device), state])
        return state

    def _set_random_state(self, state: torch.Tensor) -> None:
        own = len(state) - len(torch.get_rng_state())
        # Copies, since torch reads a state from the beginning of a tensor's storage.
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state[:own].clone(), self._device)
        torch.set_rng_state(state[own:].clone())

"""What all trainers have in common: the epochs done, the best model so far, checkpoints."""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import CheckpointError, NonFiniteLossError
from dgl_mgpu.placement import Plan
from dgl_mgpu.report import EpochReport, best_epoch, merge
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.checkpoint.validation import OF_OTHER_STATES, require_dtypes
from dgl_mgpu.train.metrics import Criterion
from dgl_mgpu.train.optimizer import take_state, whole_state

#: Called after each step with step, loss, accuracy and seeds so far in the epoch.
StepCallback = Callable[[int, float, float, int], None]


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
        #: Asked after each step within an epoch, after the same ones on all ranks.
        self.should_stop: Callable[[], bool] = lambda: False
        #: Whether a loss that is NaN or infinite ends the run; if not, it is warned of.
        self.terminate_on_nan = False
        self._batches = 0  # of all ranks, done in the epoch begun
        self._ranks = Communicator.of_all_machines()
        self._device = device
        self._eval_every = eval_every

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return len(self.reports)

    @property
    def plan(self) -> Plan | None:
        """Where data is kept, if a store keeps it."""
        return None

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""

    @abstractmethod
    def _run_epoch(self, number: int, validate: bool, on_step: StepCallback) -> EpochReport | None:
        """Train an epoch; what this rank has to report of it, or None if it should stop in it."""

    @abstractmethod
    def predict(self) -> torch.Tensor:
        """What the model gives for all nodes of the target's type, float32, in the host's memory.

        Collective.
        """

    @abstractmethod
    def _test(self) -> float:
        """Test accuracy of the model as it is."""

    def run_epoch(self, last: bool, on_step: StepCallback) -> EpochReport | None:
        """Train one epoch, validate, and return the report of all ranks together.

        None if training stopped before; the next call continues.  ``last`` says that this is the
        run's last epoch.  Raises NonFiniteLossError with ``terminate_on_nan``, as soon as a loss is
        seen that is NaN or infinite.
        """
        number = self.epoch + 1
        validate = last or number % self._eval_every == 0
        watch = _LossWatch(number, self.terminate_on_nan)
        own = self._run_epoch(number, validate, partial(watch.step, on_step))
        if own is None:
            return None
        self._batches = 0
        report = merge(self._ranks.all_gather(own))
        watch.epoch(report.loss)
        self.reports.append(report)
        if report.valid_accuracy is not None and best_epoch(self.reports) is report:
            self.best_model = copy.deepcopy(self.model.state_dict())
        return report

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
            optimizer=whole_state(self.optimizer),
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
            take_state(self.optimizer, checkpoint.optimizer)
            self.reports = [EpochReport.from_dict(report) for report in checkpoint.reports]
            # A rank that the saved run did not have finds out for itself.
            for captured in checkpoint.captured[self._ranks.rank :][:1]:
                self._take_captured(captured)
            self._batches = self._batches_done(checkpoint)
            self._take_parts(checkpoint.parts[self._ranks.rank :: self._ranks.size])
            # A rank that the saved run did not have, or had on another kind of device, keeps the
            # generator it was seeded with.
            if self._ranks.rank < len(checkpoint.random):
                generators = checkpoint.random[self._ranks.rank]
                if len(generators) == len(self._random_state()):
                    self._set_random_state(generators)
        except OF_OTHER_STATES as error:
            raise CheckpointError(
                "resume from a checkpoint",
                f"its states are not this run's ({(str(error).splitlines() or ['none'])[0]})",
                "resume with the configuration of the run, or start a new run",
            ) from error
        self.best_model = checkpoint.best_model

    def _batches_done(self, checkpoint: Checkpoint) -> int:
        """Batches of the epoch begun that a checkpoint has, checked against what there are."""
        # The last round of its ranks may have had fewer batches than ranks.
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
        """Write what is left to write after the last epoch, and close what is open."""

    def _part(self) -> dict[str, Any]:
        """What this rank has to report of the batches done in the epoch begun."""
        return {}

    def _take_parts(self, parts: list[dict[str, Any]]) -> None:  # noqa: B027 (as above)
        """Begin the next epoch's report with what ranks reported, none or several."""

    def _captured_state(self) -> dict[str, Any]:
        """What decides which of this rank's steps are CUDA graphs; empty where none are."""
        return {}

    def _take_captured(self, state: dict[str, Any]) -> None:  # noqa: B027 (as above)
        """Capture steps as the rank did whose state it is."""

    def _random_state(self) -> torch.Tensor:
        """States of the generators that a model may draw from, its device's and the CPU's."""
        state = torch.get_rng_state()
        if self._device.type == "cuda":
            return torch.cat([torch.cuda.get_rng_state(self._device), state])
        return state

    def _set_random_state(self, state: torch.Tensor) -> None:
        own = len(state) - len(torch.get_rng_state())
        # Copies: torch takes a state from the beginning of its memory, wherever the tensor's is.
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state[:own].clone(), self._device)
        torch.set_rng_state(state[own:].clone())


class _LossWatch:
    """Warns of the first loss in an epoch that is not finite, or raises NonFiniteLossError."""

    def __init__(self, epoch: int, raises: bool) -> None:
        self._epoch = epoch
        self._raises = raises
        self._has_warned = False

    def step(
        self, on_step: StepCallback, step: int, loss: float, accuracy: float, seeds: int
    ) -> None:
        """Show a step.  A mean over the epoch's steps stays NaN once one was."""
        on_step(step, loss, accuracy, seeds)
        # On a GPU neither is known of the first steps, and later ones are known some steps later.
        if not math.isnan(accuracy):
            self._look(loss, f"by step {step}")

    def epoch(self, loss: float) -> None:
        """The same of all ranks' mean."""
        self._look(loss, "by its end")

    def _look(self, loss: float, when: str) -> None:
        if math.isfinite(loss) or self._has_warned:
            return
        self._has_warned = True
        asked, found = f"train epoch {self._epoch}", f"the loss is {loss} {when}"
        fix = "lower trainer.lr, use trainer.precision=float32, and look for NaN in the features"
        if self._raises:
            raise NonFiniteLossError(asked, found, fix)
        warnings.warn(
            f"{asked}: {found}; {fix}. Such an epoch is not taken for the best one; "
            "trainer.terminate_on_nan=true ends the run.",
            stacklevel=2,
        )

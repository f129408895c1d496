"""A loss that is not finite: who hears of it, and which epoch is the best one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dgl_mgpu.errors import NonFiniteLossError
from dgl_mgpu.report import EpochReport, StageSeconds, best_epoch
from dgl_mgpu.train.objectives import SingleLabel
from dgl_mgpu.train.run import LossWatch
from dgl_mgpu.train.trainer import Progress, Trainer
from tests.train.epochs import train_epoch
from tests.train.jobs import train

REPORT = EpochReport(
    epoch=1, steps=2, seeds=4, loss=1.0, train_accuracy=0.5, valid_accuracy=None,
    test_accuracy=None, seconds=StageSeconds(evaluate=0.0, total=1.0), tiers=(), ranks=1,
)  # fmt: skip
#: Loss and validation accuracy of each epoch.
EPOCHS = ((math.nan, 0.9), (2.0, math.nan), (1.0, 0.5), (math.inf, 0.8), (0.5, 0.4))


class _Scripted(Trainer):
    """Its epochs have the losses and accuracies given; its parameter is the epoch's number."""

    def __init__(self, epochs: Any) -> None:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        super().__init__(model, optimizer, torch.device("cpu"), 1, SingleLabel())
        self._epochs = epochs

    steps_per_epoch = 2
    predict = _test = None

    def _run_epoch(
        self, number: int, validate: bool
    ) -> Generator[Progress, None, EpochReport | None]:
        loss, valid = self._epochs[number - 1]
        with torch.no_grad():
            self.model.weight.fill_(number)
        yield Progress(1, math.nan, math.nan, 2)  # as on a GPU, where nothing is known yet
        yield Progress(2, loss, 0.5, 4)
        return replace(REPORT, epoch=number, loss=loss, valid_accuracy=valid)


_Scripted.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2.0])
def test_a_loss_that_is_not_finite_is_warned_of_once_an_epoch(loss):
    watch = LossWatch(7, raises=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.step(Progress(1, math.nan, math.nan, 2))
        watch.step(Progress(2, loss, 0.5, 4))
        watch.epoch(loss)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (not math.isfinite(loss))
    assert all(f"train epoch 7: the loss is {loss} by step 2" in text for text in messages)


def test_the_best_epoch_is_finite():
    trainer = _Scripted(EPOCHS)
    for _ in EPOCHS:
        train_epoch(trainer)
    best = best_epoch(trainer.reports)
    assert best is not None and best.epoch == 3
    assert trainer.best_model["weight"].item() == 3


def test_a_run_of_nan_has_no_best_epoch():
    trainer = _Scripted([(math.nan, 0.9)])
    before = trainer.best_model["weight"].item()
    train_epoch(trainer, last=True)
    assert best_epoch(trainer.reports) is None
    assert trainer.best_model["weight"].item() == before


def test_a_run_can_end_with_it():
    watch = LossWatch(2, raises=True)
    watch.step(Progress(1, 1.0, 0.5, 2))
    with pytest.raises(NonFiniteLossError, match="train epoch 2: the loss is nan by step 2"):
        watch.step(Progress(2, math.nan, 0.5, 4))
    with pytest.raises(NonFiniteLossError, match="train epoch 3: the loss is inf by its end"):
        LossWatch(3, raises=True).epoch(math.inf)


def _diverged(trainer: Trainer) -> None:
    """Hook of a run: its weights are what a step that was too long makes of them."""
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(math.nan)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_whole_run_ends_with_it_on_every_rank(
    num_ranks, tmp_path, forked_ranks, without_pictures
):
    options = ("trainer.terminate_on_nan=true", f"data.root={tmp_path}")
    with pytest.raises(NonFiniteLossError, match="train epoch 1: the loss is nan by step 1"):
        train(tmp_path / "run", num_ranks, *options, hook=_diverged)

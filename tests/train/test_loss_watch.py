"""A loss that is not finite: who hears of it, and which epoch is the best one."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dgl_mgpu.errors import NonFiniteLossError
from dgl_mgpu.report import EpochReport, StageSeconds, best_epoch
from dgl_mgpu.train.metrics import SingleLabel
from dgl_mgpu.train.trainer import StepCallback, Trainer
from tests.train.jobs import train

REPORT = EpochReport(
    epoch=1, steps=2, seeds=4, loss=1.0, train_accuracy=0.5, valid_accuracy=None,
    test_accuracy=None, seconds=StageSeconds(evaluate=0.0, total=1.0), tiers=(), ranks=1,
)  # fmt: skip
#: Loss and validation accuracy of each epoch.
EPOCHS = ((math.nan, 0.9), (2.0, math.nan), (1.0, 0.5), (math.inf, 0.8), (0.5, 0.4))


class _Told(Trainer):
    """Its epochs come to what it is told; its parameter is the epoch's number."""

    def __init__(self, epochs: Any) -> None:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        super().__init__(model, optimizer, torch.device("cpu"), 1, SingleLabel())
        self._epochs = epochs

    steps_per_epoch = 2
    predict = _test = None

    def _run_epoch(self, number: int, validate: bool, on_step: StepCallback) -> EpochReport:
        loss, valid = self._epochs[number - 1]
        with torch.no_grad():
            self.model.weight.fill_(number)
        on_step(1, math.nan, math.nan, 2)  # as on a GPU, where nothing is known yet
        on_step(2, loss, 0.5, 4)
        return replace(REPORT, epoch=number, loss=loss, valid_accuracy=valid)


_Told.__abstractmethods__ = frozenset()


def _show(*figures: object) -> None:
    pass


def test_the_best_epoch_is_finite():
    trainer = _Told(EPOCHS)
    for number, (loss, _) in enumerate(EPOCHS, 1):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            trainer.run_epoch(False, _show)
        told = [str(each.message) for each in heard]
        assert len(told) == (not math.isfinite(loss))  # once an epoch
        assert all(f"train epoch {number}: the loss is {loss} by step 2" in each for each in told)
    best = best_epoch(trainer.reports)
    assert best is not None and best.epoch == 3
    assert trainer.best_model["weight"].item() == 3


def test_a_run_of_nan_has_no_best_epoch():
    trainer = _Told([(math.nan, 0.9)])
    before = trainer.best_model["weight"].item()
    with pytest.warns(UserWarning, match="train epoch 1"):
        trainer.run_epoch(True, _show)
    assert best_epoch(trainer.reports) is None
    assert trainer.best_model["weight"].item() == before


def test_a_run_can_end_with_it():
    trainer = _Told([(1.0, 0.1), (math.nan, 0.9)])
    trainer.terminate_on_nan = True
    trainer.run_epoch(False, _show)
    with pytest.raises(NonFiniteLossError, match="train epoch 2: the loss is nan by step 2"):
        trainer.run_epoch(False, _show)
    assert trainer.epoch == 1


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

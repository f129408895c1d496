"""Epochs of a trainer, without the loop of a run."""

from __future__ import annotations

from dgl_mgpu.report import EpochReport
from dgl_mgpu.train.trainer import Trainer


def train_epoch(trainer: Trainer, last: bool = False) -> EpochReport:
    """Train one epoch to its end; the report of all ranks."""
    for _ in trainer.run_epoch(last):
        pass
    return trainer.reports[-1]

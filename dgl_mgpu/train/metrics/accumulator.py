"""Sums over an epoch's steps, kept on the model's device so that the host does not wait."""

from __future__ import annotations

import torch


class MetricAccumulator:
    """Loss and number of correct predictions of the steps so far.

    ``steps``, ``seeds``: that were added.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.steps = self.seeds = 0
        self._known = 0.0, 0.0, 0
        # What is on its way to the host: sums, of so many seeds, there when the event has come.
        on_gpu = device.type == "cuda"
        self._room = torch.empty(2, dtype=torch.float64, pin_memory=True) if on_gpu else None
        self._coming: tuple[int, torch.cuda.Event] | None = None

    def add(self, mean: torch.Tensor, num_correct: torch.Tensor, seeds: int) -> None:
        """Add a step.

        ``mean`` (Tensor, shape ()): of the seeds' losses. ``num_correct`` (Tensor, shape ()):
        number of seeds predicted correctly.
        """
        self._sums += torch.stack([mean.detach().double() * seeds, num_correct.double()])
        self.seeds += seeds
        self.steps += 1

    def sums(self) -> tuple[float, float, int]:
        """Loss, correct predictions and seeds so far; waits for the GPU."""
        loss, num_correct = self._sums.tolist()
        return loss, num_correct, self.seeds

    def latest(self) -> tuple[float, float]:
        """Mean loss and accuracy; on a GPU as they were some steps ago, and at first NaN."""
        if self._room is None:
            self._known = self.sums()
        elif self._coming is None:
            self._room.copy_(self._sums, non_blocking=True)
            stream = torch.cuda.current_stream(self._sums.device)
            self._coming = self.seeds, stream.record_event()
        elif self._coming[1].query():
            loss, num_correct = self._room.tolist()
            self._known = loss, num_correct, self._coming[0]
            self._coming = None
        loss, num_correct, seeds = self._known
        return (loss / seeds, num_correct / seeds) if seeds else (float("nan"), float("nan"))

"""How long the stages of a step take, without waiting for the GPU between them."""

from __future__ import annotations

import itertools
import time

import torch


class StageClock:
    """Marks where stages end; on a GPU, by events in its current stream.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stages: list[str] = []
        self._marks = [self._mark()]

    def ends(self, stage: str) -> None:
        """Say that a stage, which began where the last one ended, ends here."""
        self._stages.append(stage)
        self._marks.append(self._mark())

    def seconds(self) -> dict[str, float]:
        """Of each stage; waits until the GPU is done with the last."""
        if self._on_gpu:
            self._marks[-1].synchronize()
        return {
            stage: begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin
            for stage, (begin, end) in zip(
                self._stages, itertools.pairwise(self._marks), strict=True
            )
        }

    def _mark(self):  # type: ignore[no-untyped-def]
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

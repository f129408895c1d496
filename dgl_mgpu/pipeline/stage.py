"""The stages of a step, named for whoever watches: Nsight Systems, or torch's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

#: What the names of stages begin with in a trace, where other ranges are as well.
PREFIX = "stage "


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """What is done within is stage ``name`` of a step; stages may stand within others.

    An NVTX range where a GPU is in use, which costs next to nothing while no tool listens, and a
    range of torch's profiler while that runs.

    Parameters
    ----------
    name : str
        ``"sample"``, ``"gather"``, ``"forward"``, ``"backward"``, ``"update"``, ``"evaluate"``, ….
    """
    label = PREFIX + name
    with contextlib.ExitStack() as ranges:
        # Not `is_available`, which takes its time and keeps processes from being forked.
        if torch.cuda.is_initialized():
            torch.cuda.nvtx.range_push(label)
            ranges.callback(torch.cuda.nvtx.range_pop)
        # A range of the profiler takes microseconds, also while there is no profiler.
        if torch.autograd.profiler._is_profiler_enabled:
            ranges.enter_context(torch.profiler.record_function(label))
        yield

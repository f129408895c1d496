"""Messages between ranks, which travel while something else is done."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from dgl_mgpu.utils.stages import somebody_listens, stage


class Message:
    """A collective call that is under way.

    While it is waited for, this is the stage "waiting".  As long as it takes a GPU, that is the
    stage "exchange": a stream of its own waits for it as well, and does nothing else, where
    somebody listens.  When gloo is done nobody sees but who waits.

    Parameters
    ----------
    work : torch.distributed.Work
        Called with ``async_op=True`` just now.
    *used : Tensor
        What it sends and writes to, on one device.  Held until it is waited for: torch holds them
        until somebody does, on whatever stream.
    """

    def __init__(self, work: dist.Work, *used: torch.Tensor) -> None:
        self._work = work
        self._used = used
        device = used[0].device
        # Else it would only cost each message some calls, and fork the capture of a CUDA graph,
        # which nothing joins again.
        if device.type == "cuda" and somebody_listens():
            beside = _stream_beside(device)
            beside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(beside), stage("exchange"):
                work.wait()

    def wait(self) -> None:
        """Wait until it has come: the host, or of a GPU torch's current stream."""
        with stage("waiting"):
            self._work.wait()
        self._used = ()


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """One for all messages, which take turns as those of a process group do."""
    return torch.cuda.Stream(device)

"""Where batches are made beside the script's own work: a stream of their own."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from dgl_mgpu.errors import UnavailableError
from dgl_mgpu.sampling.sm_partition import partition_stream

#: Of a GPU's multiprocessors, those that make batches, while the model has the others for itself.
#: Fewer were too slow, more took too much from the model (docs/decisions.md).
_SHARE = 1 / 4
#: The driver gives them out by so many.
_GRANULE = 8
#: Comes first: its kernels are short, and the next step waits for them.
_PRIORITY = -1


class Event(Protocol):
    """A point in the work that is queued on a stream."""

    def query(self) -> bool:
        """Whether the work is done up to here."""

    def synchronize(self) -> None:
        """Have the host wait until the work is done up to here."""


class SideStream(Protocol):
    """A queue of work beside the one that the script fills.

    Attributes
    ----------
    is_full : bool
        Whether a batch that was made here has been too much for the GPU's memory.
    """

    is_full: bool

    def work(self) -> AbstractContextManager[object]:
        """Within, what is queued goes on the lane."""

    def mark(self) -> Event:
        """The end of what is queued: on the script's stream, or within :meth:`work` on the lane."""

    def follow(self) -> None:
        """Have the lane wait for what is queued on the script's stream."""

    def wait(self, mark: Event) -> None:
        """Have the script's stream wait for a mark on the lane."""


class _StreamLane:
    def __init__(self, device: torch.device, sms: int | None) -> None:
        if sms is None:
            every = torch.cuda.get_device_properties(device).multi_processor_count
            sms = max(1, int(_SHARE * every / _GRANULE)) * _GRANULE
        try:
            self._stream = partition_stream(device, sms, _PRIORITY)
        except UnavailableError:
            self._stream = torch.cuda.Stream(device, priority=_PRIORITY)
        self._device = device
        self.is_full = False

    def work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event()

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


@functools.cache
def _stream_lane(device: torch.device, sms: int | None) -> SideStream:
    return _StreamLane(device, sms)


def side_stream_of(device: torch.device, sms: int | None = None) -> SideStream | None:
    """The lane of a GPU; None for another device.

    There is one a GPU: torch's allocator and operators keep memory for a stream, so whoever makes
    batches reuses what others have used.

    Parameters
    ----------
    device : torch.device
    sms : int, optional
        The multiprocessors it is kept to, where another lane is wanted than the one that is used.
    """
    return _stream_lane(device, sms) if device.type == "cuda" else None

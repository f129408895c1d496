"""The side stream: where mini-batches are made beside the script's own work."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from dgl_mgpu.errors import UnavailableError
from dgl_mgpu.sampling.sm_partition import partition_stream

#: Share of a GPU's multiprocessors that make batches; the model has the others to itself.  Fewer
#: were too slow, more took too much from the model (docs/decisions.md).
_SHARE = 1 / 4
#: The driver partitions them in multiples of this.
_GRANULE = 8
#: High: its kernels are short, and the next step waits for them.
_PRIORITY = -1


class Event(Protocol):
    """A point in the work queued on a stream."""

    def query(self) -> bool:
        """Whether the work up to here is done."""

    def synchronize(self) -> None:
        """Block the host until the work up to here is done."""


class SideStream(Protocol):
    """A stream beside the one that the script uses.

    ``is_full``: whether a batch made here has exceeded the GPU's memory.
    """

    is_full: bool

    def use(self) -> AbstractContextManager[object]:
        """Within, work is queued on this stream."""

    def record_event(self) -> Event:
        """Record an event on the script's stream, or within :meth:`use` on this one."""

    def wait_for_script(self) -> None:
        """Make this stream wait for what is queued on the script's stream."""

    def make_script_wait(self, event: Event) -> None:
        """Make the script's stream wait for an event on this one."""


class _CudaSideStream:
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

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record_event(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event()

    def wait_for_script(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def make_script_wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


@functools.cache
def _cuda_side_stream(device: torch.device, sms: int | None) -> SideStream:
    return _CudaSideStream(device, sms)


def side_stream_of(device: torch.device, sms: int | None = None) -> SideStream | None:
    """The side stream of a GPU; None for another device.

    Each GPU has one: torch's allocator and operators keep memory per stream, so all loaders reuse
    the same memory.

    ``sms``: number of multiprocessors to restrict it to; by default a quarter of them.
    """
    return _cuda_side_stream(device, sms) if device.type == "cuda" else None

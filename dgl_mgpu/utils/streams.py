"""The current stream of a GPU and events on it, in less of the host's time than torch takes."""

from __future__ import annotations

import torch

#: Streams by device and address: torch makes an object whenever it is asked for the current one.
_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream(device)``."""
    key = device, torch._C._cuda_getCurrentRawStream(device.index)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


def record_event(device: torch.device) -> torch.cuda.Event:
    """A new event, recorded on the current stream."""
    event = torch.cuda.Event()
    event.record(current_stream(device))
    return event


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on a device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

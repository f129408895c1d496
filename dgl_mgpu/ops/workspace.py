"""Working memory on a GPU that operators keep between calls, a set for each stream.

Allocating and clearing it anew would take the host longer than the kernel takes. Work on one
stream is done in order, so the next call may overwrite what the last one left.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dgl_mgpu.ops import device as gpu

#: Words of a control block before the sums of blocks; see ``kernels/grid.cuh``.
_CONTROL_WORDS = 4
_REPORT_WORDS = 32
#: Calls that operators keep preparations for.
_MOST_KEPT = 32
#: Bytes of a room for results from which it is not kept for the sake of a small part of it, and
#: which part of it is small.
_LARGE_ROOM, _SMALL_PART = 128 << 20, 4


class Report:
    """Numbers that a kernel leaves in host memory, to be read when it is done.

    Attributes
    ----------
    words : Tensor, int64, shape (32,)
    """

    def __init__(self) -> None:
        self.words = gpu.driver.host_buffer(_REPORT_WORDS)
        self._numbers = self.words.numpy()
        self._written: gpu.Event | None = None

    def expect(self, device: torch.device) -> None:
        """Note that what is queued on the device's current stream by now writes it."""
        self._written = gpu.driver.mark(device)

    def read(self, count: int) -> list[int]:
        """Wait until it is written, and return its first ``count`` numbers."""
        assert self._written is not None
        self._written.synchronize()
        return self._numbers[:count].tolist()


class Workspace:
    """Buffers by name, for one stream of one device.

    Attributes
    ----------
    lock : threading.Lock
        Held from the launch that uses the buffers to the reading of its report.
    report : Tensor, int64, shape (32,)
        In host memory; kernels whose results are waited for write their sizes there.
    reports : list of Report
        Of kernels that are not waited for at once, those that are free.  One may be used again
        before it was read: what is queued later on the stream writes it later.
    kept : OrderedDict
        What operators prepared for calls like the latest ones, by :meth:`keep`.
    generation : int
        Changes when a buffer is made anew, and with it its address.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self.lock = threading.Lock()
        self.report = gpu.driver.host_buffer(_REPORT_WORDS)
        self._report = self.report.numpy()
        self.kept: OrderedDict[Hashable, Any] = OrderedDict()
        self.reports: list[Report] = []
        self.generation = 0

    def prepared(self, call: Hashable) -> Any:
        """What is kept for a call, or None."""
        prepared = self.kept.get(call)
        if prepared is not None:
            self.kept.move_to_end(call)
        return prepared

    def keep(self, call: Hashable, prepared: Any) -> None:
        """Keep what was prepared for a call, in place of what has not been used for longest."""
        self.kept[call] = prepared
        if len(self.kept) > _MOST_KEPT:
            self.kept.popitem(last=False)

    def buffer(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """At least ``count`` elements, uninitialised."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = torch.empty(count + count // 4 + 1, dtype=dtype, device=self._device)
            self._buffers[name] = buffer
            self.generation += 1
        return buffer

    def control(self, blocks: int) -> torch.Tensor:
        """What the blocks of a cooperative launch share; kernels leave it as they found it."""
        words = _CONTROL_WORDS + 2 * blocks
        buffer = self._buffers.get("control")
        if buffer is None or buffer.numel() < words:
            buffer = torch.full((2 * words,), -1, dtype=torch.int64, device=self._device)
            self._buffers["control"] = buffer
            self.generation += 1
        return buffer

    def release(self) -> None:
        """Give the buffers back to torch."""
        self._buffers.clear()
        self.generation += 1

    def read_report(self, count: int) -> list[int]:
        """Wait for the stream, and return the first ``count`` numbers of the report."""
        gpu.driver.synchronize(self._device)
        return self._report[:count].tolist()


_workspaces: dict[tuple[torch.device, int], Workspace] = {}


def workspace(device: torch.device) -> Workspace:
    """The working memory of a device's current stream."""
    key = device, gpu.current_stream(device)
    found = _workspaces.get(key)
    if found is None:
        found = _workspaces.setdefault(key, Workspace(device))
    return found


@contextmanager
def captured_with(device: torch.device, stream: int) -> Iterator[Workspace]:
    """Within, calls on a stream have working memory of their own, which is no one's afterwards.

    So that what a CUDA graph captures there is not given to others: who keeps the graph keeps it.
    """
    key = device, stream
    before = _workspaces.pop(key, None)
    own = _workspaces[key] = Workspace(device)
    try:
        yield own
    finally:
        if _workspaces.get(key) is own:
            del _workspaces[key]
        if before is not None:
            _workspaces[key] = before


def release() -> None:
    """Give all working memory back to torch; for tests, and when memory is short."""
    _workspaces.clear()


def cut_to_size(room: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Results out of the room that an operator made for the largest possible ones.

    They are the pieces of it, as views; but where these are a small part of a large room, copies:
    whoever kept them would keep all of it.
    """
    most = room.nbytes
    if most < _LARGE_ROOM or _SMALL_PART * sum(piece.nbytes for piece in pieces) >= most:
        return pieces
    return torch.cat(list(pieces)).split_with_sizes([len(piece) for piece in pieces])


def beginning(room: torch.Tensor, count: int) -> torch.Tensor:
    """The first elements of a vector, as an operator returns them: see :func:`cut_to_size`."""
    return cut_to_size(room, [room[:count]])[0]

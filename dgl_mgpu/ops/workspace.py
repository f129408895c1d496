"""Working memory on a GPU that operators reuse between calls, one set per stream.

Allocating and clearing it at each call would take the host longer than the kernel takes. Work on
one stream runs in order, so the next call may overwrite the buffers of the last one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu

#: Words of a control block before the sums of blocks; see ``kernels/grid.cuh``.
_CONTROL_WORDS = 4
_REPORT_WORDS = 32
#: Calls whose preparations are cached.
_MAX_KEPT = 32
#: Bytes from which a result buffer is not kept alive for a small part of it, and the divisor that
#: says which part is small.
_LARGE_BUFFER, _SMALL_PART = 128 << 20, 4


class Report:
    """Numbers that a kernel writes to host memory: ``words``, int64, shape (32,)."""

    def __init__(self) -> None:
        self.words = gpu.driver.host_buffer(_REPORT_WORDS)
        self._numbers = self.words.numpy()
        self._written: gpu.Event | None = None

    def expect(self, device: torch.device) -> None:
        """Note that the work queued so far on the device's current stream writes the report."""
        self._written = gpu.driver.mark(device)

    def read(self, count: int) -> list[int]:
        """Wait until the report is written, and return its first ``count`` numbers."""
        assert self._written is not None
        self._written.synchronize()
        return self._numbers[:count].tolist()


class Workspace:
    """Buffers by name, for one stream of one device.

    Hold ``lock`` from a launch that uses the buffers until its report is read.  Kernels that the
    host waits for write the sizes of their results to ``report``: int64, shape (32,), in host
    memory.  ``reports`` are free ones for kernels that the host waits for later.  One may be reused
    before it is read: work that is queued later on the stream writes it later.  ``generation``
    changes when a buffer is reallocated, and with it its address.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self.lock = threading.Lock()
        self.report = gpu.driver.host_buffer(_REPORT_WORDS)
        self._report = self.report.numpy()
        self.kept: OrderedDict[Hashable, Any] = OrderedDict()
        self.reports: list[Report] = []
        self.generation = 0

    def prepared(self, call: Hashable) -> Any:
        """The preparation cached for a call, or None."""
        prepared = self.kept.get(call)
        if prepared is not None:
            self.kept.move_to_end(call)
        return prepared

    def keep(self, call: Hashable, prepared: Any) -> None:
        """Cache the preparation of a call in place of the least recently used one."""
        self.kept[call] = prepared
        if len(self.kept) > _MAX_KEPT:
            self.kept.popitem(last=False)

    def buffer(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised buffer of at least ``count`` elements."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = torch.empty(count + count // 4 + 1, dtype=dtype, device=self._device)
            self._buffers[name] = buffer
            self.generation += 1
        return buffer

    def control(self, blocks: int) -> Tensor:
        """The control words that the blocks of a cooperative launch share; kernels restore them."""
        return self._restored("control", _CONTROL_WORDS + 2 * blocks, -1)

    def counters(self, count: int) -> Tensor:
        """Zeros, int64, that the blocks of a launch add to; kernels restore them."""
        return self._restored("counters", count, 0)

    def _restored(self, name: str, words: int, value: int) -> Tensor:
        """A buffer of words that are all the same between kernels."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < words:
            buffer = torch.full((2 * words,), value, dtype=torch.int64, device=self._device)
            self._buffers[name] = buffer
            self.generation += 1
        return buffer

    def release(self) -> None:
        """Return the buffers to torch's allocator."""
        self._buffers.clear()
        self.generation += 1

    def read_report(self, count: int) -> list[int]:
        """Wait for the stream, and return the first ``count`` numbers of the report."""
        gpu.driver.synchronize(self._device)
        return self._report[:count].tolist()


class NodePrefix(NamedTuple):
    """The first nodes of a vector: at most ``most``, and ``exact`` where that is given.

    Kernels take its fields in this order.
    """

    nodes: Tensor
    most: int
    exact: Tensor | None = None  # how many, on the device: int64, shape (1,) or more


_workspaces: dict[tuple[torch.device, int], Workspace] = {}


def workspace(device: torch.device) -> Workspace:
    """The working memory of a device's current stream."""
    key = device, gpu.current_stream(device)
    space = _workspaces.get(key)
    if space is None:
        space = _workspaces.setdefault(key, Workspace(device))
    return space


@contextmanager
def captured_with(device: torch.device, stream: int) -> Iterator[Workspace]:
    """Give calls on a stream a workspace of their own within the context.

    No later call gets it, so that a CUDA graph captured with it owns it: keep both together.
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
    """Return all working memory to torch's allocator; for tests, and when memory is short."""
    _workspaces.clear()


def cut_to_size(buffer: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """Cut results out of the buffer that an operator allocated for the largest possible ones.

    Returns the pieces, which are views, or copies where they are a small part of a large buffer:
    views would keep all of it alive.
    """
    if buffer.nbytes < _LARGE_BUFFER:
        return pieces
    if _SMALL_PART * sum(piece.nbytes for piece in pieces) >= buffer.nbytes:
        return pieces
    return torch.cat(list(pieces)).split_with_sizes([len(piece) for piece in pieces])


def beginning(buffer: Tensor, count: int) -> Tensor:
    """The first elements of a vector, as a view or a copy; see :func:`cut_to_size`."""
    return cut_to_size(buffer, [buffer[:count]])[0]

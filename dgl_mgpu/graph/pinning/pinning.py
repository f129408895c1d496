"""Tensors of the host that a GPU reads and writes in place: DGL's UVA.

Memory is registered by storage, not by tensor, and what is registered already is only counted: so
views, tensors that overlap and tensors pinned twice are pinned like any other.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import Any

import torch
from dgl.base import DGLError

from dgl_mgpu.comm.cuda_runtime import Runtime, find_runtime
from dgl_mgpu.errors import InvalidInputError, UnavailableError
from dgl_mgpu.graph.dispatch import as_tensor
from dgl_mgpu.ops import gather_rows, scatter_rows
from dgl_mgpu.ops.device import current_stream
from dgl_mgpu.ops.view import RowView

#: The widest load of a kernel, to which the first row of a segment is aligned.
_ALIGNMENT = 16


class PinningError(InvalidInputError, DGLError):
    """A tensor cannot be pinned or unpinned, or a GPU is to use one that is not pinned."""


@dataclass(order=True)
class _Piece:
    """Memory that is registered as one."""

    start: int
    stop: int
    runtime: Runtime = field(compare=False)
    users: int = field(compare=False, default=0)


class _Registry:
    """The host memory that this process has registered, in pieces without overlap."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._released: list[tuple[list[_Piece], torch.Tensor]] = []
        self._lock = threading.RLock()
        self._is_changing = False

    def add(self, start: int, stop: int, runtime: Runtime) -> list[_Piece]:
        """Register what of ``[start, stop)`` is not yet; returns its pieces, for `remove`."""
        with self._lock:
            self._is_changing = True
            try:
                return self._add(start, stop, runtime)
            finally:
                self._is_changing = False
                self._remove_released()

    def remove(self, pieces: list[_Piece], tensor: torch.Tensor) -> None:
        """Give up one use of each piece; those that nobody uses are no longer registered.

        The garbage collector may call it at any time, also while this thread is in :meth:`add`,
        which then does it at its end; until then the tensor has to live.
        """
        with self._lock:
            self._released.append((pieces, tensor))
            self._remove_released()

    def holds(self, start: int, stop: int) -> bool:
        """Whether any of ``[start, stop)`` is registered here."""
        with self._lock:
            return bool(self._overlapping(start, stop))

    def _add(self, start: int, stop: int, runtime: Runtime) -> list[_Piece]:
        held = self._overlapping(start, stop)
        bounds = [start, *(edge for piece in held for edge in (piece.start, piece.stop)), stop]
        added: list[_Piece] = []
        try:
            for first, last in zip(bounds[::2], bounds[1::2], strict=True):
                if first < last:
                    runtime.register(first, last - first)
                    added.append(_Piece(first, last, runtime))
                    insort(self._pieces, added[-1])
        except BaseException:
            for piece in added:
                self._drop(piece)
            raise
        for piece in (*held, *added):
            piece.users += 1
        return [*held, *added]

    def _remove_released(self) -> None:
        while self._released and not self._is_changing:
            self._is_changing = True
            try:
                pieces, _ = self._released.pop()
                for piece in pieces:
                    piece.users -= 1
                    if piece.users == 0:
                        self._drop(piece)
            finally:
                self._is_changing = False

    def _overlapping(self, start: int, stop: int) -> list[_Piece]:
        first = bisect_right(self._pieces, start, key=lambda piece: piece.stop)
        last = bisect_left(self._pieces, stop, key=lambda piece: piece.start)
        return self._pieces[first:last]

    def _drop(self, piece: _Piece) -> None:
        self._pieces.remove(piece)
        piece.runtime.unregister(piece.start)


_registry = _Registry()


class PinnedMemory:
    """Holds a tensor pinned, as DGL's NDArray does, until it is unpinned or nobody holds this."""

    def __init__(self, tensor: torch.Tensor, pieces: list[_Piece]) -> None:
        self.tensor = tensor
        self._release = weakref.finalize(self, _registry.remove, pieces, tensor)
        self._release.atexit = False  # the driver does it, and may have gone first
        self._is_ours = bool(pieces) or tensor.numel() == 0

    @property
    def is_pinned(self) -> bool:
        """Whether it has not been unpinned."""
        return self._release.alive

    def unpin_memory_(self) -> None:
        """Give the memory up, unless something else has pinned it too.

        Raises `PinningError` if torch or another library pinned it before.
        """
        if not self._is_ours:
            raise PinningError(
                "unpin a tensor", "DGL has not pinned it", "leave it to what pinned it"
            )
        self._release()


def can_pin() -> bool:
    """Whether there is a GPU for which memory can be pinned."""
    return find_runtime() is not None


def pin_memory_inplace(tensor: torch.Tensor) -> PinnedMemory:
    """Pin the memory of a CPU tensor where it is: ``dgl.utils.pin_memory_inplace``.

    Every GPU can then read and write it, and ``tensor.is_pinned()`` is true.  The memory is
    unpinned when nobody holds the result any more; it may be pinned already.  Raises `PinningError`
    if the tensor is not on the CPU or not contiguous, `UnavailableError` without a GPU, and
    `DeviceMemoryError` if the driver refuses.
    """
    action = f"pin a tensor of shape {tuple(tensor.shape)}"
    if tensor.device.type != "cpu":
        raise PinningError(action, f"it is on {tensor.device}", "pin a tensor of the CPU")
    if not tensor.is_contiguous():
        raise PinningError(action, "it is not contiguous", "pin tensor.contiguous()")
    runtime = find_runtime()
    if runtime is None:
        raise UnavailableError(
            action, "torch sees no GPU", "leave the tensor as it is, or use a machine with a GPU"
        )
    if tensor.numel() == 0:
        return PinnedMemory(tensor, [])
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    stop = start + storage.nbytes()
    if tensor.is_pinned() and not _registry.holds(start, stop):
        return PinnedMemory(tensor, [])
    return PinnedMemory(tensor, _registry.add(start, stop, runtime))


def gather_pinned_tensor_rows(tensor: Any, rows: torch.Tensor) -> torch.Tensor:
    """Copy rows of a pinned tensor or NDArray to a GPU: ``dgl.utils.gather_pinned_tensor_rows``.

    The result is on the device of ``rows``.  Rows are read in the order of their addresses, by few
    multiprocessors (`dgl_mgpu.ops.gather_rows`).  A row out of range is zero, and the next operator
    call on that GPU raises `IdOutOfRangeError`: nobody waits for it here.
    """
    return gather_rows(host_view(as_tensor(tensor), rows.device), rows)


def scatter_pinned_tensor_rows(dest: Any, rows: torch.Tensor, source: torch.Tensor) -> None:
    """Write rows of a pinned one from a GPU: ``dgl.utils.scatter_pinned_tensor_rows``.

    Where a row is repeated, its last value is kept.  Raises as `gather_pinned_tensor_rows`.
    """
    scatter_rows(host_view(as_tensor(dest), rows.device), rows, source)


def host_view(tensor: torch.Tensor, device: torch.device) -> RowView:
    """A view of a pinned tensor's rows for operators of ``device``; the caller keeps the tensor."""
    action = f"let {device} reach rows of a tensor of shape {tuple(tensor.shape)}"
    if tensor.device.type != "cpu" or tensor.dim() == 0:
        found = f"it is on {tensor.device}" if tensor.dim() else "it is a single element"
        raise PinningError(action, found, "pass a tensor of the CPU with rows")
    if not tensor.is_contiguous():
        raise PinningError(action, "it is not contiguous", "pass tensor.contiguous(), pinned")
    stream = 0
    if device.type == "cuda":
        if tensor.numel() and not tensor.is_pinned():
            raise PinningError(
                action,
                "it is not pinned",
                "pin it: dgl.utils.pin_memory_inplace(tensor), DGLGraph.pin_memory_()",
            )
        stream = current_stream(device)
    # A view consists of numbers alone: for whatever tensor has these, it is the right one.
    return _view(tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, device, stream)


# By stream: torch's allocator gives the memory of a view that was dropped to the stream it is of.
@functools.lru_cache(maxsize=1024)
def _view(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, stream: int
) -> RowView:
    num_rows, row_shape = shape[0], shape[1:]
    row_bytes = math.prod(row_shape) * dtype.itemsize
    # Kernels need the first row of a segment aligned. So the tier begins as many rows before the
    # tensor as that takes: nobody can ask for them.
    before = next((n for n in range(_ALIGNMENT) if (address - n * row_bytes) % _ALIGNMENT == 0), -1)
    if before < 0:
        raise PinningError(
            f"let {device} reach rows of {row_bytes} bytes from address {address:#x} on",
            f"none begins at a multiple of {_ALIGNMENT} bytes",
            "pin a copy: tensor.clone()",
        )
    return RowView(
        tiers=torch.tensor([[-before, num_rows, 1, 0]]).to(device),
        pointers=torch.tensor([address - before * row_bytes]).to(device),
        num_rows=num_rows,
        row_shape=row_shape,
        dtype=dtype,
        position=torch.empty(0, dtype=torch.int64, device=device),
        host_start=0,
        address=address,
    )

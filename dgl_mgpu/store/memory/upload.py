"""Uploads data that the first rank reads into every rank's GPU memory.

The first rank copies a run of bytes into a window in shared memory, which is registered with every
GPU, and announces the rank that they are for.  That rank uploads them while the first rank fills
the other half of the window.  So every rank writes to its own GPU only, each byte crosses the bus
once, and the window is all the memory that this takes, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dgl_mgpu.comm.communicator import Communicator, error_text, rank_failed
from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.store.memory.segment import Segment

# Two parts for other ranks' data, used in turn, and one for the first rank's own.
_PART_BYTES = 16 << 20
_OWN = 2

#: Rank, offset in its block, number of bytes and part of the window; None at the end.
_Order = tuple[int, int, int, int] | None


class UploadChannel:
    """Fills all ranks' blocks of GPU memory.

    ``window``: of :attr:`window_bytes`, registered.  ``block``: address of this rank's own block.
    """

    window_bytes = 3 * _PART_BYTES

    def __init__(self, ranks: Communicator, runtime: Runtime, window: Segment, block: int) -> None:
        self._ranks = ranks
        self._runtime = runtime
        self._block = block
        self._parts = window.array(np.uint8, (3, _PART_BYTES))
        self._turn = 0
        self._failed = False

    def run(self, fill: Callable[[], None] | None) -> None:
        """Call ``fill``, which writes to targets, on the first rank; upload for it on the others.

        Collective; raises on every rank when an upload fails on one.
        """
        if fill is None:
            return self._serve()
        try:
            fill()
        finally:
            if not self._failed:
                self._exchange(None)

    def target(self, rank: int, offset: int) -> UploadTarget:
        """Memory at ``offset`` of a rank's block, for the first rank to write to."""
        return UploadTarget(self, rank, offset)

    def write(self, rank: int, offset: int, data: np.ndarray) -> None:
        """Copy an array's bytes to ``offset`` of a rank's block."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        for begin in range(0, len(flat), _PART_BYTES):
            run = flat[begin : begin + _PART_BYTES]
            part = _OWN if rank == 0 else self._turn
            self._parts[part, : len(run)] = run
            if rank == 0:
                self._upload(offset + begin, len(run), part)
            else:
                # A rank comes to this exchange once it has uploaded the previous run, so the other
                # part of the window is free then.
                self._exchange((rank, offset + begin, len(run), part))
                self._turn = 1 - self._turn

    def _serve(self) -> None:
        failure: Exception | None = None
        while order := self._exchange(None, failure):
            rank, offset, nbytes, part = order
            if rank == self._ranks.rank:
                try:
                    self._upload(offset, nbytes, part)
                except Exception as error:
                    failure = error

    def _exchange(self, order: _Order, failure: Exception | None = None) -> _Order:
        """Send the first rank's order and every rank's failure; raise if there is one."""
        reason = "" if failure is None else error_text(failure)
        exchanged = self._ranks.all_gather((order, reason))
        for rank, (_, rank_reason) in enumerate(exchanged):
            if rank_reason:
                self._failed = True
                raise failure or rank_failed("fill GPU memory", rank, rank_reason)
        return exchanged[0][0]

    def _upload(self, offset: int, nbytes: int, part: int) -> None:
        self._runtime.upload(self._block + offset, self._parts[part, :nbytes])


class UploadTarget:
    """A run of bytes in a rank's block."""

    def __init__(self, channel: UploadChannel, rank: int, offset: int) -> None:
        self._channel = channel
        self._rank = rank
        self._offset = offset

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy an array's bytes to ``offset``."""
        self._channel.write(self._rank, self._offset + offset, data)

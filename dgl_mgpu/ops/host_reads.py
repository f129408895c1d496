"""The share of a table's gathered rows that lie in host memory, as kernels count it."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.library import Written

#: Tables that counters are allocated for at a time.
_AT_ONCE = 256
_ROWS_SHIFT, _FEWER_ROWS = 32, 1 << 31
_WORD = (1 << 64) - 1


class HostCounters(NamedTuple):
    """Counters of a gather kernel: 2^32 times the rows gathered, plus those in host memory.

    Both are int64, of shape (1,).
    """

    device_counter: Written  # in the GPU's memory: thread blocks add to it
    host_counter: Written  # in host memory: they store the sum so far


#: Unused counters. They are never freed: a running kernel may still add to those of a table that
#: is gone, which makes the next table's first estimate a little wrong.
_free: dict[torch.device, list[HostCounters]] = {}
_making = threading.Lock()


class HostReads:
    """Measures the share of a table's gathered rows that were read from host memory.

    It changes with the program's phase: training reads what a plan expects, inference over all
    nodes does not.  The host never waits for the GPU, so the share is some gathers old.
    """

    def __init__(self) -> None:
        self._counters: HostCounters | None = None
        self._seen = 0
        self._share: float | None = None

    def counters(self, device: torch.device) -> HostCounters:
        """The counters of gathers on a GPU."""
        if self._counters is None:
            with _making:
                free = _free.setdefault(device, [])
                if not free:
                    on_device = torch.zeros(_AT_ONCE, dtype=torch.int64, device=device)
                    on_host = gpu.driver.host_buffer(_AT_ONCE).zero_()
                    free += map(HostCounters, on_device.split(1), on_host.split(1))
                self._counters = free.pop()
            self._seen = self._count()
            weakref.finalize(self, free.append, self._counters)
        return self._counters

    def share(self, expected: float) -> float:
        """The share counted so far, or ``expected`` where nothing has been counted yet."""
        now = self._count()
        more = now - self._seen & _WORD
        rows, in_host_memory = more >> _ROWS_SHIFT, more & (1 << _ROWS_SHIFT) - 1
        # Blocks store in any order. What is missing of a gather comes with the next one; where the
        # last store was overtaken, the difference looks like that of very many rows.
        if rows:
            self._seen = now
        if 0 < rows < _FEWER_ROWS:
            self._share = min(1.0, in_host_memory / rows)
        return expected if self._share is None else self._share

    def _count(self) -> int:
        return 0 if self._counters is None else int(self._counters.host_counter.numpy()[0])

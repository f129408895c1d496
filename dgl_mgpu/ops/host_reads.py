"""How many rows of its gathers a table has in host memory, as a GPU tells while nobody waits."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch

from dgl_mgpu.ops import device

#: Tables that memory is made for at a time.
_AT_ONCE = 256
_ROWS_SHIFT, _FEWER_ROWS = 32, 1 << 31
_WORD = (1 << 64) - 1


class HostReadWords(NamedTuple):
    """What a kernel counts in: rows of all gathers, times 2^32, and those in host memory.

    Attributes
    ----------
    counted : Tensor, int64, shape (1,)
        In the GPU's memory, where blocks add.
    told : Tensor, int64, shape (1,)
        In host memory, where they leave what they have come to.
    """

    counted: torch.Tensor
    told: torch.Tensor


#: What no table uses. It is never freed: what runs still may add to it when its table is gone,
#: which makes the next one's first guess a little wrong.
_free: dict[torch.device, list[HostReadWords]] = {}
_making = threading.Lock()


class HostReads:
    """What part of a table's latest gathers was read from host memory.

    What is read changes with what a program does: training reads what a plan expects, inference
    over all nodes does not.  The GPU is not waited for, so what it tells is some gathers old.
    """

    def __init__(self) -> None:
        self._words: HostReadWords | None = None
        self._seen = 0
        self._share: float | None = None

    def words(self, where: torch.device) -> HostReadWords:
        """Where a GPU's gathers count."""
        if self._words is None:
            with _making:
                free = _free.setdefault(where, [])
                if not free:
                    counted = torch.zeros(_AT_ONCE, dtype=torch.int64, device=where)
                    told = device.driver.host_buffer(_AT_ONCE).zero_()
                    free += map(HostReadWords, counted.split(1), told.split(1))
                self._words = free.pop()
            self._seen = self._told()
            weakref.finalize(self, free.append, self._words)
        return self._words

    def share(self, expected: float) -> float:
        """The part as the GPU has told by now; ``expected`` where it has told nothing yet."""
        now = self._told()
        more = now - self._seen & _WORD
        rows, in_host_memory = more >> _ROWS_SHIFT, more & (1 << _ROWS_SHIFT) - 1
        # Blocks tell in any order. What is lacking of a gather comes with the next one; where the
        # last to tell was overtaken, the difference is as if of very many rows.
        if rows:
            self._seen = now
        if 0 < rows < _FEWER_ROWS:
            self._share = min(1.0, in_host_memory / rows)
        return expected if self._share is None else self._share

    def _told(self) -> int:
        return 0 if self._words is None else int(self._words.told.numpy()[0])

"""How many bytes of tensors one process has at most, counted without asking an allocator."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MOMENT = 0.01


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that are made within it, until nobody holds it any more.

    What an operator takes for itself, and frees before it returns, is not counted.  ``largest`` is
    of one tensor's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {id(leaf.untyped_storage()) for leaf in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if id(storage) in given or storage in self._known:
                continue
            self._known.add(storage)
            self.now += storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
            if self.now > self.peak:
                # Gloo's threads let go of tensors a moment after their message was waited for.
                time.sleep(_MOMENT)
                self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, storage.nbytes())
        return made

    def _free(self, nbytes: int) -> None:
        self.now -= nbytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that tensors take while ``run`` runs, beside those that are there before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as counted:
        run()
    return counted.peak

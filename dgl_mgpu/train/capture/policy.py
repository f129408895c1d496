"""The choice of mini-batches for which a CUDA graph is captured, and of its capacity.

The policy depends on the mini-batches alone and never on timing, so every run decides the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dgl_mgpu.capture.static_buffers import Sizes
from dgl_mgpu.train.capture.graph_slots import ShapeKey

#: Batches of a shape before one is captured: one-time preparation happens in these, and their sizes
#: determine the capacity.
WARM_UP = 3


class CapturePolicy:
    """Chooses the shape of mini-batches to capture, from those so far."""

    def __init__(self) -> None:
        #: Of the mini-batches that a graph computes, and of their static buffers.
        self.shape_key: ShapeKey | None = None
        self.capacity: Sizes | None = None
        #: By key: mini-batches so far, and the largest sizes of those that did not fit.
        self._counts: Counter[ShapeKey] = Counter()
        self._largest: dict[ShapeKey, Sizes] = {}

    def count(self, key: ShapeKey) -> None:
        """Count a mini-batch."""
        self._counts[key] += 1

    def holds(self, key: ShapeKey, sizes: Sizes) -> bool:
        """Whether a mini-batch fits the chosen shape and capacity."""
        return key == self.shape_key and self.capacity is not None and self.capacity.hold(sizes)

    def choose(self, key: ShapeKey, sizes: Sizes) -> bool:
        """Choose a counted mini-batch that does not fit, if it is time; whether it was chosen."""
        largest = self._largest[key] = self._largest.get(key, sizes).joined(sizes)
        # So that alternating shapes are not captured alternately.
        others = 0 if self.shape_key in (None, key) else self._counts[self.shape_key]
        if self._counts[key] <= max(WARM_UP, 2 * others):
            return False
        self.shape_key, self.capacity = key, largest.with_spare()
        return True

    def state(self) -> dict[str, Any]:
        """The state for :meth:`load_state`: numbers in lists."""
        return {
            "chosen": None
            if self.capacity is None
            else [self.shape_key, *_size_lists(self.capacity)],
            "counts": [[key, count] for key, count in self._counts.items()],
            "largest": [[key, *_size_lists(sizes)] for key, sizes in self._largest.items()],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state, which may have been through JSON."""
        chosen = state["chosen"]
        key, capacity = (None, None) if chosen is None else _shape_key_and_sizes(*chosen)
        counts = Counter({_shape_key(*key): int(count) for key, count in state["counts"]})
        self._largest = dict(_shape_key_and_sizes(*entry) for entry in state["largest"])
        self.shape_key, self.capacity, self._counts = key, capacity, counts


def _size_lists(sizes: Sizes) -> tuple[Any, Any]:
    return sizes.nodes, sizes.edges


def _shape_key_and_sizes(key: Any, nodes: Any, edges: Any) -> tuple[ShapeKey, Sizes]:
    return _shape_key(*key), Sizes(tuple(map(_ints, nodes)), tuple(map(_ints, edges)))


def _shape_key(sizes: Any, modes: Any) -> ShapeKey:
    seeds, types = sizes
    return ShapeKey((_ints(seeds), _ints(types)), tuple(map(bool, modes)))


def _ints(numbers: Any) -> tuple[int, ...]:
    return tuple(map(int, numbers))

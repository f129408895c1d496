"""Which mini-batches a graph is captured for, and with how much room: decided by what they are and
never by how long something takes, so that a run makes the same choice each time."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dgl_mgpu.train.capture.graph_slots import ShapeKey
from dgl_mgpu.train.capture.static_buffers import Sizes

#: Batches of a kind before one is captured: what is prepared once is then, and their sizes say how
#: much room there is to be.
WARM_UP = 3


class CapturePolicy:
    """What is chosen of the mini-batches so far.

    Attributes
    ----------
    kind : Kind or None
        Of those that are computed by a graph.
    room : Sizes or None
        For these.
    """

    def __init__(self) -> None:
        self.kind: ShapeKey | None = None
        self.room: Sizes | None = None
        #: By kind: mini-batches so far, and the largest sizes of those that were not in place.
        self._counts: Counter[ShapeKey] = Counter()
        self._largest: dict[ShapeKey, Sizes] = {}

    def count(self, kind: ShapeKey) -> None:
        """Note a mini-batch."""
        self._counts[kind] += 1

    def holds(self, kind: ShapeKey, sizes: Sizes) -> bool:
        """Whether a mini-batch is of those that are chosen."""
        return kind == self.kind and self.room is not None and self.room.hold(sizes)

    def choose(self, kind: ShapeKey, sizes: Sizes) -> bool:
        """Choose a mini-batch that is counted and not of the chosen, if it is time for that."""
        largest = self._largest[kind] = self._largest.get(kind, sizes).joined(sizes)
        # So that kinds which take turns are not captured in turns.
        others = 0 if self.kind in (None, kind) else self._counts[self.kind]
        if self._counts[kind] <= max(WARM_UP, 2 * others):
            return False
        self.kind, self.room = kind, largest.with_spare()
        return True

    def state(self) -> dict[str, Any]:
        """What :meth:`take` takes: numbers in lists."""
        return {
            "chosen": None if self.room is None else [self.kind, *_of_sizes(self.room)],
            "counts": [[kind, count] for kind, count in self._counts.items()],
            "largest": [[kind, *_of_sizes(sizes)] for kind, sizes in self._largest.items()],
        }

    def take(self, state: dict[str, Any]) -> None:
        """Go on as the one whose state it is; it may have been written as JSON."""
        chosen = state["chosen"]
        kind, room = (None, None) if chosen is None else _kind_and_sizes(*chosen)
        counts = Counter({_kind(*kind): int(count) for kind, count in state["counts"]})
        self._largest = dict(_kind_and_sizes(*each) for each in state["largest"])
        self.kind, self.room, self._counts = kind, room, counts


def _of_sizes(sizes: Sizes) -> tuple[Any, Any]:
    return sizes.nodes, sizes.edges


def _kind_and_sizes(kind: Any, nodes: Any, edges: Any) -> tuple[ShapeKey, Sizes]:
    return _kind(*kind), Sizes(tuple(map(_ints, nodes)), tuple(map(_ints, edges)))


def _kind(sizes: Any, modes: Any) -> ShapeKey:
    seeds, types = sizes
    return ShapeKey((_ints(seeds), _ints(types)), tuple(map(bool, modes)))


def _ints(numbers: Any) -> tuple[int, ...]:
    return tuple(map(int, numbers))

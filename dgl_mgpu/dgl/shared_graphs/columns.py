"""Columns of a script's graph, and which of them its store still has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dgl.frame import Column
from dgl.heterograph import DGLGraph

from dgl_mgpu.graph.random import seeding
from dgl_mgpu.graph.stored_tensors import Snapshot
from dgl_mgpu.store.global_store import GlobalStore
from dgl_mgpu.store.lazy_rows import NodeOrEdgeType


class Passes:
    """Counts passes over a graph's DataLoaders, to give each random numbers of its own.

    ``dgl.seed`` sets the seed and restarts the count, as in DGL, where all passes draw from one
    sequence.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._seeding, self._count = seed, seeding()[0], 0

    def next(self) -> tuple[int, int]:
        """The seed and the number of a new pass."""
        times, seed = seeding()
        if times != self._seeding and seed is not None:
            self._seed, self._seeding, self._count = seed, times, 0
        self._count += 1
        return self._seed, self._count - 1


@dataclass(frozen=True)
class Stored:
    """The store of a graph, an attribute of the graph's index, which tells whose memory it is."""

    store: GlobalStore
    columns: Mapping[NodeOrEdgeType, Mapping[str, Snapshot]]  # as they were stored, by name
    passes: Passes  # over all of the graph's loaders

    def name_of(self, of: NodeOrEdgeType, column: Column) -> str | None:
        """The name under which the store has a column; None if it lacks it, or has old values.

        A tensor may have another name by now: ``g.ndata["h"] = g.ndata["feat"]``.
        """
        if column.index is not None or column.device is not None or column.deferred_dtype:
            return None
        for name, snapshot in self.columns[of].items():
            if snapshot.is_of(column.storage):
                return name
        return None


def stored_of(graph: DGLGraph) -> Stored | None:
    """The store that a script's graph has; None if it has none yet."""
    return vars(graph._graph).get("_stored")

"""Columns of a script's graph, and which of them its store still has."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from dgl.frame import Column
from dgl.heterograph import DGLGraph

from dgl_mgpu.graph.random import seeding
from dgl_mgpu.store.global_store import GlobalStore
from dgl_mgpu.store.lazy_rows import NodeOrEdgeType


class Snapshot:
    """A tensor as it is now; it does not keep it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), tensor._version

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is this tensor, and not written to since."""
        return self._tensor() is tensor and is_watched(tensor) and tensor._version == self._version


def is_watched(tensor: torch.Tensor) -> bool:
    """Whether torch counts writes to a tensor: not if it is learned, or made in inference mode."""
    return not (tensor.is_inference() or tensor.requires_grad)


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

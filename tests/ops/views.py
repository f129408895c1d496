"""Views over NumPy arrays with any layout of tiers, for tests of operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from dgl_mgpu.ops.view import EIDS, PAIRED, GraphView, RowView

View = TypeVar("View", GraphView, RowView)

#: A layout: the tiers' (rows, parts).  The last tier takes whatever rows remain.
Layout = Sequence[tuple[int, int]]
SINGLE: Layout = [(0, 1)]
LAYOUTS: dict[str, Layout] = {
    "single": SINGLE,
    "four parts": [(0, 4)],
    "three tiers": [(5, 1), (11, 3), (0, 1)],
    "empty parts": [(2, 5), (0, 7)],
}


def _tiers(num_rows: int, layout: Layout) -> np.ndarray:
    rows, start, first = [], 0, 0
    for index, (size, parts) in enumerate(layout):
        last = index == len(layout) - 1
        stop = num_rows if last else min(num_rows, start + size)
        rows.append((start, stop, parts, first))
        start, first = stop, first + parts
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _segments(tiers: np.ndarray) -> list[np.ndarray]:
    """Positions held by each segment, in local order."""
    return [
        np.arange(start + part, stop, parts)
        for start, stop, parts, _ in tiers
        for part in range(parts)
    ]


def _order(num_rows: int, shuffle: np.random.Generator | None) -> np.ndarray:
    return np.arange(num_rows) if shuffle is None else shuffle.permutation(num_rows)


def _position(order: np.ndarray, shuffle: np.random.Generator | None) -> torch.Tensor:
    if shuffle is None:
        return torch.empty(0, dtype=torch.int64)
    position = np.empty(len(order), dtype=np.int32)
    position[order] = np.arange(len(order))
    return torch.from_numpy(position)


def row_view(
    rows: torch.Tensor,
    layout: Layout = SINGLE,
    shuffle: np.random.Generator | None = None,
) -> RowView:
    """View of a tensor's rows; ``shuffle`` gives them a random order and a ``position``."""
    order = _order(len(rows), shuffle)
    tiers = _tiers(len(rows), layout)
    # Torch 2.4 looks no float8 up by ids.
    numbers = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    parts = [numbers[torch.from_numpy(order[held])].clone() for held in _segments(tiers)]
    segments = [part.view(rows.dtype) for part in parts]
    return RowView(
        tiers=torch.from_numpy(tiers),
        pointers=torch.tensor([segment.data_ptr() for segment in segments], dtype=torch.int64),
        num_rows=len(rows),
        row_shape=tuple(rows.shape[1:]),
        dtype=rows.dtype,
        position=_position(order, shuffle),
        owner=segments,
    )


def elsewhere(view: View) -> View:
    """A view that says it is on another device than the CPU."""
    return replace(view, tiers=view.tiers.to("meta"))


class Graph:
    """A graph in CSC as NumPy arrays: in-edges of each of ``num_rows`` nodes."""

    def __init__(
        self,
        indptr: np.ndarray,
        indices: np.ndarray,
        num_cols: int | None = None,
        eids: np.ndarray | None = None,
    ) -> None:
        self.indptr = np.asarray(indptr, dtype=np.int64)
        self.indices = np.asarray(indices, dtype=np.int64)
        self.num_rows = len(self.indptr) - 1
        self.num_cols = self.num_rows if num_cols is None else num_cols
        self.eids = eids

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int]], num_cols: int | None = None) -> Graph:
        indptr = np.concatenate([[0], np.cumsum([len(each) for each in lists])])
        return cls(indptr, np.array([n for each in lists for n in each]), num_cols)

    def degree(self, node: int) -> int:
        return int(self.indptr[node + 1] - self.indptr[node])

    def neighbors(self, node: int) -> np.ndarray:
        return self.indices[self.indptr[node] : self.indptr[node + 1]]

    def edge_ids(self, node: int) -> np.ndarray:
        places = np.arange(self.indptr[node], self.indptr[node + 1])
        return places if self.eids is None else self.eids[places]

    def view(
        self,
        layout: Layout = SINGLE,
        idtype: torch.dtype = torch.int64,
        shuffle: np.random.Generator | None = None,
    ) -> GraphView:
        """View of this graph; edge ids that follow from places or rows are left out."""
        order = _order(self.num_rows, shuffle)
        tiers = _tiers(self.num_rows, layout)
        places = self.eids is None and shuffle is None and tiers[:, 2].sum() == 1
        paired = self.eids is None and not places
        owner, pointers = [], []
        for held in _segments(tiers):
            nodes = order[held]
            indptr = np.concatenate([[0], np.cumsum([self.degree(n) for n in nodes])])
            if paired:
                indptr = np.stack([indptr, np.append(self.indptr[nodes], 0)], axis=1)
            parts = [
                torch.from_numpy(indptr.astype(np.int64)),
                _concatenate([self.neighbors(n) for n in nodes]).to(idtype),
                _concatenate([self.edge_ids(n) for n in nodes]).to(idtype),
            ]
            owner.append(parts)
            addresses = [part.data_ptr() for part in parts]
            if places or paired:
                addresses[EIDS] = PAIRED if paired else 0
            pointers.append(addresses)
        return GraphView(
            tiers=torch.from_numpy(tiers),
            pointers=torch.tensor(pointers, dtype=torch.int64).reshape(-1, 3),
            num_rows=self.num_rows,
            num_cols=self.num_cols,
            num_edges=len(self.indices),
            idtype=idtype,
            position=_position(order, shuffle),
            owner=owner,
        )


def _concatenate(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *arrays]).astype(np.int64))


def power_law_graph(num_nodes: int, num_edges: int, seed: int) -> Graph:
    """Both degrees skewed, with self-loops, duplicate edges and nodes without any edge."""
    random = np.random.default_rng(seed)
    ends = (num_nodes * random.random((2, num_edges)) ** 3).astype(np.int64)
    order = np.argsort(ends[0], kind="stable")
    degrees = np.bincount(ends[0], minlength=num_nodes)
    return Graph(np.concatenate([[0], np.cumsum(degrees)]), ends[1][order])

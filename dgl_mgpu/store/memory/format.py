"""The format of a table's rows in a segment, and the view that operators get of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import torch

from dgl_mgpu.ops.view import PAIRED, GraphView, RowView
from dgl_mgpu.placement import Tier
from dgl_mgpu.store.sources import FeatureSource, TopologySource

# Bytes copied at a time; building a store needs a few times this much memory beside the data.
_CHUNK_BYTES = 32 << 20
# Start of each array in a segment: a GPU's memory transactions are 128 bytes.
_ALIGNMENT = 128


def local_rows(tier: Tier, part: int) -> range:
    """Positions that fall to ``part`` of a tier, dealt out modulo."""
    return range(tier.start + part, tier.stop, tier.parts)


def _row_ids(order: np.ndarray | None, positions: range) -> np.ndarray:
    """Ids of the rows at ``positions``, int64."""
    if order is None:
        return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
    return order[positions.start : positions.stop : positions.step].astype(np.int64)


def _chunks(positions: range, size: int) -> Iterator[tuple[int, range]]:
    """Runs of at most ``size`` positions, each with the local row it begins at."""
    for begin in range(0, len(positions), size):
        yield begin, positions[begin : begin + size]


class Target(Protocol):
    """Memory to be filled: a segment, or one on another rank's GPU."""

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy an array's bytes to ``offset``."""


class Mapped(Protocol):
    """A segment in any memory, as this process has it mapped."""

    @property
    def address(self) -> int:
        """Address of the first byte, for operators."""

    def read(self, offset: int, dtype: np.dtype | type, count: int) -> np.ndarray:
        """A copy of ``count`` elements at ``offset``."""


class TableFormat(Protocol):
    """What a table needs to know of its rows to be mapped, in any process."""

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""

    def pointers(self, segment: Mapped, rows: int) -> list[int]:
        """Addresses of the arrays in a segment of ``rows`` rows."""

    def view(
        self, tiers: torch.Tensor, pointers: torch.Tensor, position: torch.Tensor, owner: object
    ) -> RowView | GraphView:
        """The table as operators see it."""


class TableWriter(Protocol):
    """What a rank needs to make the shards it holds."""

    @property
    def format(self) -> TableFormat:
        """How the rows lie in a segment."""

    def nbytes(self, positions: range) -> int:
        """Size of a segment for the rows at ``positions``."""

    def fill(self, target: Target, positions: range) -> None:
        """Copy the rows at ``positions`` there."""


@dataclass(frozen=True)
class RowFormat:
    """Rows of one size, one after another.

    ``dtype``, ``source_dtype``: element type as stored, and of the rows that the table was built
    from.
    """

    num_rows: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    source_dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    def pointers(self, segment: Mapped, rows: int) -> list[int]:
        return [segment.address]

    def view(
        self, tiers: torch.Tensor, pointers: torch.Tensor, position: torch.Tensor, owner: object
    ) -> RowView:
        return RowView(
            tiers, pointers.reshape(-1), self.num_rows, self.row_shape, self.dtype,
            position, owner,
        )  # fmt: skip


class EdgeIds(Enum):
    """How the edge ids of a segment are known; see ``GraphView.pointers``."""

    POSITIONS = "an edge's id is its position"
    FIRST = "each row has the id of its first edge"
    STORED = "each edge has its id"


@dataclass(frozen=True)
class CSCFormat:
    """``indptr`` of the local rows, then their ``indices``, then, if stored, their edge ids."""

    num_rows: int
    num_cols: int
    num_edges: int
    idtype: torch.dtype
    edge_ids: EdgeIds

    @property
    def bound_bytes(self) -> int:
        """Size of an entry of ``indptr``."""
        return 16 if self.edge_ids is EdgeIds.FIRST else 8

    @property
    def id_dtype(self) -> np.dtype:
        return np.dtype(np.int32 if self.idtype == torch.int32 else np.int64)

    def offsets(self, rows: int, edges: int) -> tuple[int, int, int]:
        """Where indices and edge ids start and where the segment ends, in bytes."""
        indices = aligned((rows + 1) * self.bound_bytes)
        if self.edge_ids is not EdgeIds.STORED:
            return indices, 0, indices + edges * self.id_dtype.itemsize
        eids = aligned(indices + edges * self.id_dtype.itemsize)
        return indices, eids, eids + edges * self.id_dtype.itemsize

    def pointers(self, segment: Mapped, rows: int) -> list[int]:
        edges = int(segment.read(rows * self.bound_bytes, np.int64, 1)[0])
        indices, eids, _ = self.offsets(rows, edges)
        base = segment.address
        third = {EdgeIds.POSITIONS: 0, EdgeIds.FIRST: PAIRED, EdgeIds.STORED: base + eids}
        return [base, base + indices, third[self.edge_ids]]

    def view(
        self, tiers: torch.Tensor, pointers: torch.Tensor, position: torch.Tensor, owner: object
    ) -> GraphView:
        return GraphView(
            tiers,
            pointers.reshape(-1, 3),  # a tensor of no pointers has no second dimension
            self.num_rows,
            self.num_cols,
            self.num_edges,
            self.idtype,
            position,
            owner,
        )


class RowWriter:
    """Writes the rows of a :class:`FeatureSource`."""

    def __init__(self, source: FeatureSource, order: np.ndarray | None) -> None:
        self._source = source
        self._order = order
        self.format = RowFormat(
            source.num_rows, source.row_shape, source.dtype, source.source_dtype
        )

    def nbytes(self, positions: range) -> int:
        return len(positions) * self._source.row_bytes

    def fill(self, target: Target, positions: range) -> None:
        row_bytes = self._source.row_bytes
        for begin, run in _chunks(positions, max(1, _CHUNK_BYTES // max(row_bytes, 1))):
            rows = self._source.bytes_of(_row_ids(self._order, run))
            target.write(begin * row_bytes, rows)


class CSCWriter:
    """Writes the rows of a :class:`TopologySource`."""

    def __init__(self, source: TopologySource, order: np.ndarray | None, edge_ids: EdgeIds) -> None:
        self._source = source
        self._order = order
        self.format = CSCFormat(
            source.num_rows, source.num_cols, source.num_edges, source.idtype, edge_ids
        )

    def nbytes(self, positions: range) -> int:
        return self.format.offsets(len(positions), self._num_edges(positions))[2]

    def _num_edges(self, positions: range) -> int:
        return sum(
            int(self._source.degrees(_row_ids(self._order, run)).sum())
            for _, run in _chunks(positions, _CHUNK_BYTES // 8)
        )

    def fill(self, target: Target, positions: range) -> None:
        width = self.format.id_dtype.itemsize
        indices_at, eids_at, _ = self.format.offsets(len(positions), self._num_edges(positions))
        written = 0
        for begin, run in _chunks(positions, _CHUNK_BYTES // 8):
            ids = _row_ids(self._order, run)
            degrees = self._source.degrees(ids)
            ends = written + np.cumsum(degrees)
            target.write(begin * self.format.bound_bytes, self._bounds(ends - degrees, ids))
            for first, counts in _edge_chunks(self._source.indptr[ids], degrees):
                places = self._source.edge_positions(first, counts)
                target.write(indices_at + written * width, self._ids(self._source.indices[places]))
                if self.format.edge_ids is EdgeIds.STORED:
                    eids = places if self._source.eids is None else self._source.eids[places]
                    target.write(eids_at + written * width, self._ids(eids))
                written += len(places)
        target.write(len(positions) * self.format.bound_bytes, np.array([written], np.int64))

    def _bounds(self, places: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Entries of ``indptr`` for rows whose first edges are at ``places``."""
        if self.format.edge_ids is not EdgeIds.FIRST:
            return places
        return np.stack([places, self._source.indptr[ids]], axis=1)

    def _ids(self, values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values, self.format.id_dtype)


def _edge_chunks(first: np.ndarray, counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows of edges in chunks, as the first edge of each row and the number of its edges.

    A chunk has as many rows as fit; a row with more edges than fit is split.
    """
    chunk_edges = _CHUNK_BYTES // 8
    ends = np.cumsum(counts)
    row = 0
    while row < len(ends):
        before = int(ends[row] - counts[row])
        stop = int(np.searchsorted(ends, before + chunk_edges, side="right"))
        if stop > row:
            yield first[row:stop], counts[row:stop]
        else:
            stop = row + 1
            for part in range(0, int(counts[row]), chunk_edges):
                yield first[row:stop] + part, np.minimum(counts[row:stop] - part, chunk_edges)
        row = stop


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

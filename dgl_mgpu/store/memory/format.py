"""Data that a store is built from, the format of its rows in a segment, and operators' view of it.

Data are arrays in memory, in shared memory or mapped from files.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch

from dgl_mgpu.data.csc import edge_chunks, edge_places
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops.view import PAIRED, GraphView, RowView
from dgl_mgpu.placement import Tier
from dgl_mgpu.store.memory.device import DeviceSegment
from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.utils.unused_memory import trim_heap

# Bytes copied at a time; building a store needs a few times this much memory beside the data.
_CHUNK_BYTES = 8 << 20
# Edges copied at a time: each takes a few numbers of 8 bytes meanwhile.
_CHUNK_EDGES = 1 << 18
# Start of each array in a segment: a GPU's memory transactions are 128 bytes.
_ALIGNMENT = 128


@dataclass(frozen=True)
class FeatureSource:
    """Rows to be stored, one per node or edge.

    ``rows`` has shape (num_rows, ...) and is anything whose rows an integer array selects: a
    tensor, an array, a ``numpy.memmap``.
    """

    rows: Any
    position: str = ""  # the order in which rows are kept; '' for the order of their ids
    stored: torch.dtype | None = None  # floating-point type in which rows are kept, if another
    name: str = "features"  # in errors

    def __post_init__(self) -> None:
        if getattr(self.rows, "ndim", 0) < 1:
            raise InvalidInputError(
                "store a table of rows",
                f"the {type(self.rows).__name__} has no first dimension",
                "pass a tensor or array of shape (rows, ...)",
            )

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def dtype(self) -> torch.dtype:
        """Element type as stored."""
        return self.stored or self.source_dtype

    @property
    def source_dtype(self) -> torch.dtype:
        """Element type of the rows."""
        if isinstance(self.rows, torch.Tensor):
            return self.rows.dtype
        try:
            return torch.from_numpy(np.empty(0, self.rows.dtype)).dtype
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                "store a table of rows",
                f"the rows have dtype {self.rows.dtype}",
                "convert them to a dtype that torch has, in this machine's byte order",
            ) from error

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape[1:])

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    def bytes_of(self, ids: np.ndarray) -> np.ndarray:
        """The rows ``ids`` as stored, uint8, shape (len(ids) * row_bytes,).

        Raises InvalidInputError if a number is out of the range of the type in which they are kept.
        """
        is_narrowed = self.dtype != self.source_dtype
        if isinstance(self.rows, torch.Tensor):
            rows = self.rows[torch.from_numpy(ids)].contiguous()
        else:
            array = np.ascontiguousarray(self.rows[ids])
            if not is_narrowed:
                return array.reshape(-1).view(np.uint8)
            rows = torch.from_numpy(array)
        if is_narrowed:
            rows = narrow(rows, self.dtype, self.name)
        # NumPy lacks bfloat16 and float8; as bytes every type is the same.
        return rows.flatten().view(torch.uint8).numpy()


def narrow(rows: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Rows in another floating-point type, or InvalidInputError beyond its range."""
    narrowed, largest = rows.to(dtype), torch.finfo(dtype).max
    ends = torch.stack(rows.aminmax()) if rows.numel() else rows
    if bool((ends.abs() <= largest).all()):  # NaN is none of these
        return narrowed
    # Infinity stays where a type has it, which float8_e4m3fn has not.
    lost = (rows.abs() > largest) & (rows.isfinite() | ~narrowed.to(rows.dtype).isinf())
    if lost.any():
        raise InvalidInputError(
            f"keep {name} as {dtype}",
            f"it holds {float(rows[lost][0]):g}, and the largest {dtype} is {largest:g}",
            "scale them, or leave them as they are"
            if dtype == torch.bfloat16
            else "scale them, or keep them as bfloat16, whose range is that of float32",
        )
    return narrowed


def numpy_dtype(idtype: torch.dtype) -> np.dtype:
    """A dtype of ids as NumPy has it."""
    return np.dtype(np.int32 if idtype == torch.int32 else np.int64)


@dataclass(frozen=True)
class TopologySource:
    """One relation in CSC: the in-edges of every destination node.

    ``indptr`` is int64, shape (num_rows + 1,); ``indices`` has the source node of each edge, int32
    or int64, shape (num_edges,).
    """

    indptr: np.ndarray
    indices: np.ndarray
    eids: np.ndarray | None  # None: an edge's id is its place in ``indices``
    num_cols: int
    idtype: torch.dtype  # of the ids that are given and returned: int32 or int64
    position: str = ""  # the order in which rows are kept; '' for the order of their ids

    def __post_init__(self) -> None:
        action = "store a graph in CSC"
        if self.idtype not in (torch.int32, torch.int64):
            raise InvalidInputError(
                action, f"the ids have dtype {self.idtype}", "use int32 or int64 ids"
            )
        most = torch.iinfo(self.idtype).max + 1
        if len(self.indices) > most:
            raise InvalidInputError(
                action,
                f"it has {len(self.indices):,} edges, more than {self.idtype} can count",
                f"use int64 ids for more than {most:,} edges (with DGL: g.long())",
            )
        if self.indptr.ndim != 1 or len(self.indptr) < 1 or self.indptr[0] != 0:
            raise InvalidInputError(
                action, "indptr does not start with 0", "pass num_rows + 1 offsets"
            )
        if int(self.indptr[-1]) != len(self.indices):
            raise InvalidInputError(
                action,
                f"indptr ends at {int(self.indptr[-1])}, but there are {len(self.indices)} indices",
                "pass indptr and indices of the same graph",
            )
        if np.any(np.diff(self.indptr) < 0):
            raise InvalidInputError(action, "indptr decreases", "pass offsets in ascending order")
        if self.eids is not None and len(self.eids) != len(self.indices):
            raise InvalidInputError(
                action,
                f"there are {len(self.eids)} edge ids for {len(self.indices)} edges",
                "pass one id for each edge, or eids=None",
            )
        if len(self.indices):
            low, high = int(self.indices.min()), int(self.indices.max())
            if low < 0 or high >= self.num_cols:
                raise IdOutOfRangeError(
                    action,
                    f"there is no source node {low if low < 0 else high}, there are "
                    f"{self.num_cols}",
                    f"pass node ids in [0, {self.num_cols})",
                )

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    def in_order(self, position: str) -> TopologySource:
        """The same edges, whose rows are kept in another order; they are not checked again."""
        ordered = copy.copy(self)
        object.__setattr__(ordered, "position", position)
        return ordered

    def degrees(self, rows: np.ndarray) -> np.ndarray:
        """In-degrees of ``rows``, int64."""
        return self.indptr[rows + 1] - self.indptr[rows]


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


@dataclass(frozen=True)
class RowFormat:
    """Rows of one size, one after another."""

    num_rows: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype  # as stored
    source_dtype: torch.dtype  # of the rows that the table was built from

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    def pointers(self, segment: Segment | DeviceSegment, rows: int) -> list[int]:
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
        return numpy_dtype(self.idtype)

    def offsets(self, rows: int, edges: int) -> tuple[int, int, int]:
        """Where indices and edge ids start and where the segment ends, in bytes."""
        indices = aligned((rows + 1) * self.bound_bytes)
        if self.edge_ids is not EdgeIds.STORED:
            return indices, 0, indices + edges * self.id_dtype.itemsize
        eids = aligned(indices + edges * self.id_dtype.itemsize)
        return indices, eids, eids + edges * self.id_dtype.itemsize

    def pointers(self, segment: Segment | DeviceSegment, rows: int) -> list[int]:
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


@dataclass(frozen=True)
class RowWriter:
    """Writes the rows of a source, which are kept in an order, to segments."""

    source: FeatureSource
    order: np.ndarray | None

    @property
    def format(self) -> RowFormat:
        source = self.source
        return RowFormat(source.num_rows, source.row_shape, source.dtype, source.source_dtype)

    def nbytes(self, positions: range) -> int:
        """Size of a segment for the rows at ``positions``."""
        return len(positions) * self.source.row_bytes

    def fill(self, target: Target, positions: range) -> None:
        """Copy the rows at ``positions`` there."""
        row_bytes = self.source.row_bytes
        for begin, run in _chunks(positions, max(1, _CHUNK_BYTES // max(row_bytes, 1))):
            target.write(begin * row_bytes, self.source.bytes_of(_row_ids(self.order, run)))
            trim_heap()  # what is kept of each chunk adds up


@dataclass(frozen=True)
class CSCWriter:
    """The same for the in-edges of nodes."""

    source: TopologySource
    order: np.ndarray | None
    edge_ids: EdgeIds

    @property
    def format(self) -> CSCFormat:
        source = self.source
        return CSCFormat(
            source.num_rows, source.num_cols, source.num_edges, source.idtype, self.edge_ids
        )

    def nbytes(self, positions: range) -> int:
        return self.format.offsets(len(positions), self._num_edges(positions))[2]

    def _num_edges(self, positions: range) -> int:
        return sum(
            int(self.source.degrees(_row_ids(self.order, run)).sum())
            for _, run in _chunks(positions, _CHUNK_BYTES // 8)
        )

    def fill(self, target: Target, positions: range) -> None:
        format, source = self.format, self.source
        width = format.id_dtype.itemsize
        indices_at, eids_at, _ = format.offsets(len(positions), self._num_edges(positions))
        written = 0
        for begin, run in _chunks(positions, _CHUNK_BYTES // 8):
            ids = _row_ids(self.order, run)
            degrees = source.degrees(ids)
            bounds = written + np.cumsum(degrees) - degrees
            if self.edge_ids is EdgeIds.FIRST:
                bounds = np.stack([bounds, source.indptr[ids]], axis=1)
            target.write(begin * format.bound_bytes, bounds)
            for _, first, counts in edge_chunks(source.indptr[ids], degrees, _CHUNK_EDGES):
                places = edge_places(first, counts)
                indices = np.ascontiguousarray(source.indices[places], format.id_dtype)
                target.write(indices_at + written * width, indices)
                if self.edge_ids is EdgeIds.STORED:
                    eids = places if source.eids is None else source.eids[places]
                    eids = np.ascontiguousarray(eids, format.id_dtype)
                    target.write(eids_at + written * width, eids)
                written += len(places)
                trim_heap()
        target.write(len(positions) * format.bound_bytes, np.array([written], np.int64))


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


Source = FeatureSource | TopologySource
TableFormat = RowFormat | CSCFormat

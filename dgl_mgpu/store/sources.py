"""Data that a store is built from: arrays in memory, in shared memory or mapped from files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError


@dataclass(frozen=True)
class FeatureSource:
    """Rows to be stored, one per node or edge.

    ``rows`` (or ndarray, shape (num_rows, ...)): anything whose rows an integer array selects: a
    tensor, an array, a ``numpy.memmap``.  ``position``: name of the order its rows are kept in; ''
    keeps them in the order of their ids.  ``stored``: floating-point type in which they are kept;
    their own by default.  ``name``: what errors call them.
    """

    rows: Any
    position: str = ""
    stored: torch.dtype | None = None
    name: str = "features"

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
            rows = narrowed(rows, self.dtype, self.name)
        # NumPy lacks bfloat16 and float8; as bytes every type is the same.
        return rows.flatten().view(torch.uint8).numpy()


def narrowed(rows: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
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


@dataclass(frozen=True)
class TopologySource:
    """One relation in CSC: the in-edges of every destination node.

    ``indptr``: int64, shape (num_rows + 1,).  ``indices`` (int32 or int64, shape (num_edges,)):
    source node of each edge.  ``eids`` (or None): edge ids; ``None`` when an edge's id is its place
    in ``indices``.  ``num_cols``: source nodes.  ``idtype``: int32 or int64: the type of ids that
    will be given and returned.  ``position``: name of the order its rows are kept in; '' keeps them
    in the order of their ids.
    """

    indptr: np.ndarray
    indices: np.ndarray
    eids: np.ndarray | None
    num_cols: int
    idtype: torch.dtype
    position: str = ""

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

    def degrees(self, rows: np.ndarray) -> np.ndarray:
        """In-degrees of ``rows``, int64."""
        return self.indptr[rows + 1] - self.indptr[rows]

    def edge_positions(self, first: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Places in ``indices`` of rows of edges, one after another, int64.

        ``first``, ``counts`` (int64, shape (n,)): the place of each row's first edge, and how many
        there are.
        """
        ends = np.cumsum(counts)
        within = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
        return np.repeat(first, counts) + within

"""How an operator sees the store: tiers as arithmetic, memory as base pointers.

A table's rows are ordered by hotness; a row's place in that order is its *position*.  A tier
is a run of positions ``[start, stop)`` kept in one kind of memory and dealt out modulo over
``parts`` segments::

    part  = (position - start) %  parts
    local = (position - start) // parts

so that finding a row takes a comparison per tier, one modulo and one division, and no table
with an entry per row (XGNN, section 4.3).  A replicated, host or disk tier has one part.
Each rank holds its own pointers: where a partition is replicated, they name the copy that
the placement chose for this rank.

``kernels/ggms.cuh`` declares the same structures for device code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

#: Columns of ``tiers``.
START, STOP, PARTS, FIRST = range(4)
#: Columns of ``GraphView.pointers``.
INDPTR, INDICES, EIDS = range(3)


def _identity() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class RowView:
    """One rank's view of a table of fixed-size rows.

    Attributes
    ----------
    tiers : Tensor, int64, shape (T, 4)
        ``start``, ``stop``, ``parts`` of each tier and the index of its first pointer, by
        ascending ``start``; together they cover ``[0, num_rows)``.
    pointers : Tensor, int64, shape (sum of parts,)
        Address of each segment's first row, in this process.
    num_rows : int
    row_shape : tuple of int
        Shape of one row; ``()`` for scalars.
    dtype : torch.dtype
        Element type as stored.
    position : Tensor, int32 or int64, shape (num_rows,) or (0,)
        Row id → position; empty when ids are positions already.
    owner : object
        Whatever keeps the addressed memory mapped.
    host_start : int
        First position that lies in host memory while those before lie in a GPU's; -1 where there
        is none.  A GPU reads host rows in the order of their addresses.
    """

    tiers: torch.Tensor
    pointers: torch.Tensor
    num_rows: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    position: torch.Tensor = field(default_factory=_identity)
    owner: object = None
    host_start: int = -1

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        count = 1
        for extent in self.row_shape:
            count *= extent
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class GraphView:
    """One rank's view of the topology of one edge type, in CSC (in-edges of each node).

    Attributes
    ----------
    tiers : Tensor, int64, shape (T, 4)
        As in :class:`RowView`; rows are destination nodes.
    pointers : Tensor, int64, shape (sum of parts, 3)
        Addresses of each segment's ``indptr`` (int64, local rows + 1, counted from this
        segment's own first edge), ``indices`` (``idtype``, source node ids) and edge ids
        (``idtype``).  Where every edge-id address is 0, an edge's id is its place in the
        segment's ``indices``; this is allowed only when a single segment holds all rows.
    num_rows, num_cols : int
        Destination and source nodes.
    num_edges : int
    idtype : torch.dtype
        int32 or int64: the type of ids, given and returned.
    position : Tensor, int32 or int64, shape (num_rows,) or (0,)
        Destination node id → position; empty when ids are positions already.
    owner : object
        Whatever keeps the addressed memory mapped.
    """

    tiers: torch.Tensor
    pointers: torch.Tensor
    num_rows: int
    num_cols: int
    num_edges: int
    idtype: torch.dtype
    position: torch.Tensor = field(default_factory=_identity)
    owner: object = None

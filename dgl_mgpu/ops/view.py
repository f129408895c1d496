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

import math
import threading
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dgl_mgpu.ops.host_reads import HostReads
from dgl_mgpu.ops.library import Size

#: Columns of ``tiers``.
START, STOP, PARTS, FIRST = range(4)
#: Columns of ``GraphView.pointers``.
INDPTR, INDICES, EIDS = range(3)
#: In column EIDS in place of an address: the edges of a row have consecutive ids, and ``indptr``
#: has the first of them beside the place of the row's first edge.
PAIRED = 1

#: Multiprocessors that keep the host's link busy. With more, rows that are read at the same time
#: lie further apart, and more addresses have to be translated for them.
HOST_SMS = 4
#: From this number of rows in host memory on, listing them first, to read them in order, pays.
LISTED_ROWS = 1 << 14
#: More nodes than are ever sampled in one hop.
_MAX_NODES = 1 << 31


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def as_words(rows: Tensor) -> Tensor:
    """Rows of any element type as the widest integers they are made of, without a copy.

    Torch's indexing operators do not know all element types, and take long over small ones.  The
    result is int64, int32, int16 or uint8, of shape (n, words of a row).
    """
    flat = rows.view(len(rows), math.prod(rows.shape[1:]))
    size = flat.element_size()
    return flat.view(_WORDS[math.gcd(8, flat.shape[1] * size, flat.storage_offset() * size)])


def _identity() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def _keep_mapped(pointers: Tensor, owner: object) -> None:
    """Tie the owner of mapped memory to the addresses, which operators get without the view."""
    if owner is not None:
        pointers.owner = owner  # type: ignore[attr-defined]


class TieredRows(NamedTuple):
    """What operators take of a view: attributes of :class:`RowView` and :class:`GraphView`."""

    tiers: Tensor
    pointers: Tensor
    position: Tensor
    num_rows: Size


class TieredGraph(NamedTuple):
    """What operators that need both ends of edges take of a :class:`GraphView`."""

    tiers: Tensor
    pointers: Tensor
    position: Tensor
    num_rows: Size
    num_cols: Size
    idtype: torch.dtype


class DiskRows(Protocol):
    """Rows of a table that are on disk, where a GPU cannot read them, and a cache of some.

    A row's slot in the cache is its position modulo the number of slots.
    """

    lock: threading.Lock  # held from a gather's launch until all that it needs of the cache is done
    tags: Tensor  # int64, (slots,): position of the row in each slot, or -1
    cache: Tensor  # uint8, (at least slots, row_bytes): the rows, in this GPU's memory

    def fetch(self, out: Tensor, miss_positions: Tensor) -> None:
        """Read rows from disk into their places of a gather's output, and into the cache.

        ``out``, shape (n, *row_shape), is contiguous, of the table's element type or another to
        cast to.  ``miss_positions``, int64, shape (n,), has for each place in ``out`` the position
        of the row it still lacks, or -1.
        """


@dataclass(frozen=True)
class RowView:
    """One rank's view of a table of fixed-size rows.

    Attributes
    ----------
    tiers : Tensor, int64, shape (T, 4)
        ``start``, ``stop``, ``parts`` of each tier and the index of its first pointer, by
        ascending ``start``; together they cover ``[0, num_rows)``.
    pointers : Tensor, int64, shape (sum of parts,)
        Address of each segment's first row, in this process; 0 where ``disk`` has its rows.  It
        is a multiple of 16, the widest load of a kernel.
    num_rows : int
    row_shape : tuple of int
        Shape of one row; ``()`` for scalars.
    dtype : torch.dtype
        Element type as stored.
    position : Tensor, int32 or int64, shape (num_rows,) or (0,)
        Row id → position; empty when ids are positions already.
    owner : object
        Object that keeps the addressed memory mapped.
    host_start : int
        First position from which on no row lies in a GPU's memory, and some lie in the host's; -1
        where there is none.  A GPU reads host rows in the order of their addresses.
    sms, host_sms : int
        Multiprocessors of a GPU that were measured to saturate its links to rows in GPUs, and to
        rows in host memory: the default limits of a gather.  0 for all.
    host_share : float
        Expected fraction of reads that go to host memory.  A gather with fewer than
        ``LISTED_ROWS`` of them reads them unordered.
    host_reads : HostReads, optional
        Counts these reads on a GPU, and so replaces ``host_share`` by the fraction measured.
    disk : DiskRows, optional
        What reads the rows that kernels cannot.
    address : int
        Of the first row, if all rows follow each other from there in the order of their positions;
        0 otherwise.
    num_positions : int
        Positions are in ``[0, num_positions)``, where tiers have more rows than are read there; 0
        where they are in ``[0, num_rows)``.
    """

    tiers: Tensor
    pointers: Tensor
    num_rows: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    position: Tensor = field(default_factory=_identity)
    owner: object = None
    host_start: int = -1
    sms: int = 0
    host_sms: int = HOST_SMS
    host_share: float = 1.0
    host_reads: HostReads | None = None
    disk: DiskRows | None = None
    address: int = 0
    num_positions: int = 0

    def __post_init__(self) -> None:
        _keep_mapped(self.pointers, self.owner)

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        return math.prod(self.row_shape) * self.dtype.itemsize


@dataclass(frozen=True)
class GraphView:
    """One rank's view of the topology of one edge type, in CSC (in-edges of each node).

    Attributes
    ----------
    tiers : Tensor, int64, shape (T, 4)
        As in :class:`RowView`; rows are destination nodes.
    pointers : Tensor, int64, shape (sum of parts, 3)
        Addresses, multiples of 16, of each segment's ``indptr`` (int64, local rows + 1, counted
        from this segment's own first edge), ``indices`` (``idtype``, source node ids) and edge ids
        (``idtype``).  Edge ids are left out where they follow from those of rows: with ``PAIRED``
        in place of their address, ``indptr`` has the shape (local rows + 1, 2), and its second
        column is the id of a row's first edge, from which the others count on.  With 0, an edge's
        id is its place in ``indices``, which only a segment of all rows can say.
    num_rows, num_cols : int
        Destination and source nodes.
    num_edges : int
    idtype : torch.dtype
        int32 or int64: the type of ids, given and returned.
    position : Tensor, int32 or int64, shape (num_rows,) or (0,)
        Destination node id → position; empty when ids are positions already.
    owner : object
        Object that keeps the addressed memory mapped.
    sms : int
        Multiprocessors of a GPU that were found to sample as fast as all of them; 0 for all.
    host_share : float
        Part of the reads that is expected to go to host memory. Where so many nodes of a mini-batch
        are sampled uniformly that ``LISTED_ROWS`` of them are read there, a GPU takes them in the
        order of their addresses.
    """

    tiers: Tensor
    pointers: Tensor
    num_rows: int
    num_cols: int
    num_edges: int
    idtype: torch.dtype
    position: Tensor = field(default_factory=_identity)
    owner: object = None
    sms: int = 0
    host_share: float = 0.0

    def __post_init__(self) -> None:
        _keep_mapped(self.pointers, self.owner)

    @property
    def ordered_from(self) -> int:
        """Number of nodes from which a hop takes them in the order of addresses; 0 for never."""
        if self.host_share * _MAX_NODES >= LISTED_ROWS:
            return math.ceil(LISTED_ROWS / self.host_share)
        return 0


def tiered_rows(view: RowView | GraphView) -> TieredRows:
    """A view's arguments for operators."""
    return TieredRows(view.tiers, view.pointers, view.position, view.num_rows)


def tiered_graph(view: GraphView) -> TieredGraph:
    """A view's arguments for operators that need both ends of edges."""
    return TieredGraph(*tiered_rows(view), view.num_cols, view.idtype)

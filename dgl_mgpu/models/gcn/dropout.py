"""Dropout by counter: an element's fate follows from where it is, so that no mask is kept."""

from __future__ import annotations

import torch
from dgl import DGLGraph

from dgl_mgpu.distributed.host_features import HostRows
from dgl_mgpu.distributed.index import PartitionedIndex

# Constants of MurmurHash3's 32-bit finaliser (Appleby, 2011), as signed numbers.
_FIRST, _SECOND = -2048144789, -1028477387
# Elements that are decided on at a time, so that their numbers are no buffer.
_AT_ONCE = 1 << 24


def drop_(
    rows: torch.Tensor, nodes: torch.Tensor, key: int, rate: float, first_column: int = 0
) -> None:
    """Set elements to 0 with a chance of ``rate``, and raise the others so that means stay.

    ``rows`` (Tensor, shape (num_nodes, width)): changed in place. ``nodes`` (Tensor, int64, shape
    (num_nodes,)): which elements are taken depends on these, on the column and on ``key`` alone.
    ``key``: signed, 64 bits. ``rate``: in [0, 1). ``first_column``: number of the first of the
    columns, where rows have more of them than these.
    """
    width = rows.shape[1]
    low, high = _signed(key), _signed(key >> 32)
    columns = torch.arange(
        first_column, first_column + width, dtype=torch.int32, device=rows.device
    )
    columns = _mix_(columns.bitwise_xor_(high))
    highest = min(int(rate * (1 << 32)), (1 << 32) - 1) - (1 << 31)
    at_once = max(1, _AT_ONCE // width)
    for some, ids in zip(rows.split(at_once), nodes.split(at_once), strict=True):
        words = _mix_(ids.to(torch.int32).bitwise_xor_(low)).unsqueeze(1) + columns
        some.masked_fill_(_mix_(words) < highest, 0)
    rows *= 1 / (1 - rate)


def dropped(g: DGLGraph, rows: HostRows, rate: float) -> HostRows:
    """A graph's nodes' rows with elements dropped out: the same ones whenever they are read."""
    nodes, key = global_ids(g), int(torch.randint(1 << 62, ()))

    def change(slab: torch.Tensor, columns: slice) -> torch.Tensor:
        drop_(slab, nodes, key, rate, columns.start)
        return slab

    return rows.changed(change)


def global_ids(g: DGLGraph) -> torch.Tensor:
    """The nodes' ids in the whole graph."""
    if isinstance(g._graph, PartitionedIndex):
        part = g._graph.parts[0].part
        return part.src.nodes(part.rank, g.device)
    return torch.arange(g.num_nodes(), device=g.device)


def _signed(word: int) -> int:
    """The low 32 bits as a signed number."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def _mix_(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of every int32, in place (MurmurHash3's finaliser)."""
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    words *= _FIRST
    words ^= (words >> 13).bitwise_and_(0x7FFFF)
    words *= _SECOND
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words

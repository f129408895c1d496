"""Where the edges of nodes are: the look-up that every sampling operator starts with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.ops import cpu
from dgl_mgpu.ops.check import check_ids, raise_at_bad_id
from dgl_mgpu.ops.cpu import (
    Rows,
    inline,
    kernel,
    load_id,
    load_int64,
    position_of,
    prefetch,
    segment_of,
)
from dgl_mgpu.ops.view import EIDS, INDPTR, PAIRED, GraphView

#: Seeds that are worth waking a thread for, to sample their edges and to find these.
GRAIN, _FIND_GRAIN = 256, 1024
#: Columns of what :func:`find_edges` returns.
SEGMENT, FIRST_EDGE, DEGREE, SHIFT = range(4)

#: What raises the error of a seed that is no node.
LOOK_UP = "look up the edges of nodes"
#: Seeds looked up ahead, at each of the two steps of the look-up.
_AHEAD = 16
_INT32_MAX = torch.iinfo(torch.int32).max


def to_idtype(ids: Tensor, view: GraphView, num_nodes: int) -> Tensor:
    """Ids in the graph's type; one that is no node stays none, and itself if that type has it."""
    ids = check_ids(ids, "sample blocks", view.tiers.device)
    if ids.dtype == torch.int64 and view.idtype == torch.int32:
        # Without it, one in 2**32 would become a node.
        ids = ids.clamp(-_INT32_MAX, max(_INT32_MAX, num_nodes))
    return ids.to(view.idtype)


class HopOptions(NamedTuple):
    """How operators sample a hop."""

    fanout: int
    replace: bool
    key: int
    sms: int = 0  # most multiprocessors of a GPU to use; 0 for all


class HopsOptions(NamedTuple):
    """How operators sample the hops of a mini-batch."""

    fanouts: Sequence[int]
    replace: bool
    keys: Sequence[int]
    sms: int = 0

    def by_hop(self) -> list[HopOptions]:
        """The options of each hop."""
        draws = zip(self.fanouts, self.keys, strict=True)
        return [HopOptions(fanout, self.replace, key, self.sms) for fanout, key in draws]


def new_sample(seeds: Tensor, idtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What an operator returns that samples a hop, of a size that is not known."""
    total = torch.library.get_ctx().new_dynamic_size()
    return (
        seeds.new_empty(seeds.shape[0] + 1, dtype=torch.int64),
        seeds.new_empty(total, dtype=idtype),
        seeds.new_empty(total, dtype=idtype),
    )


@inline
def row_bounds(pointers: np.ndarray, segment: int, local: int) -> tuple[int, int]:
    """Address of a row's first bound in ``indptr``, and how far from it the next row's is."""
    step = 16 if pointers[segment, EIDS] == PAIRED else 8
    return pointers[segment, INDPTR] + step * local, step


@inline
def stored_ids(pointers: np.ndarray, segment: int) -> int:
    """Address of a segment's edge ids, or 0 if they follow from the places of edges."""
    address = pointers[segment, EIDS]
    return 0 if address == PAIRED else address


@inline
def edge_id(ids: int, edge: int, shift: int, width: int) -> int:
    """Id of the edge at a place; ``ids`` as :func:`stored_ids` has it."""
    return edge + shift if ids == 0 else load_id(ids, edge, width)


@kernel
def _find(
    begin: int,
    end: int,
    seeds: int,
    seed_width: int,
    graph: Rows,
    num_rows: int,
    ranges: np.ndarray,
) -> int:
    """Write where the edges of seeds ``[begin, end)`` are; the first bad place, or -1."""
    tiers, pointers, position, width = graph
    for ahead in range(begin, end + _AHEAD):
        place = ahead - _AHEAD
        if place >= begin:
            segment, local = ranges[place, SEGMENT], ranges[place, FIRST_EDGE]
            indptr, step = row_bounds(pointers, segment, local)
            first = load_int64(indptr)
            ranges[place, FIRST_EDGE] = first
            ranges[place, DEGREE] = load_int64(indptr + step) - first
            ranges[place, SHIFT] = load_int64(indptr + 8) - first if step == 16 else 0
        if ahead < end:
            seed = load_id(seeds, ahead, seed_width)
            if seed < 0 or seed >= num_rows:
                return ahead
            if width != 0 and ahead + _AHEAD < end:
                prefetch(position + width * load_id(seeds, ahead + _AHEAD, seed_width))
            segment, local = segment_of(position_of(seed, position, width), tiers)
            prefetch(row_bounds(pointers, segment, local)[0])
            ranges[ahead, SEGMENT] = segment
            ranges[ahead, FIRST_EDGE] = local
    return -1


def find_edges(seeds: Tensor, graph: Rows, num_rows: int) -> np.ndarray:
    """Look up the edges of each of n seeds; an int64 array of shape (n, 4).

    Columns: the segment, the place of the first edge in it, the degree, and the difference of an
    edge's id and its place where ids are not stored.  Raises IdOutOfRangeError for a seed that is
    not in [0, num_rows).
    """
    ranges = np.empty((seeds.numel(), 4), dtype=np.int64)
    places = cpu.run(
        _find, len(ranges), _FIND_GRAIN, seeds.data_ptr(), seeds.element_size(), graph, num_rows,
        ranges,
    )  # fmt: skip
    raise_at_bad_id(places, seeds, num_rows, LOOK_UP)
    return ranges

"""Where the edges of nodes are: the look-up that every sampling operator starts with."""

from __future__ import annotations

import numpy as np
import torch

from dgl_mgpu.ops import parallel
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.memory import (
    Rows,
    kernel,
    load_id,
    load_int64,
    position_of,
    prefetch,
    segment_of,
)
from dgl_mgpu.ops.view import INDPTR

#: Seeds that are worth waking a thread for.
GRAIN = 256
#: Columns of what :func:`find_edges` returns.
SEGMENT, FIRST_EDGE, DEGREE = range(3)

#: Seeds looked up ahead, at each of the two steps of the look-up.
_AHEAD = 16


@kernel
def _find(
    begin: int,
    end: int,
    seeds: int,
    seed_width: int,
    graph: Rows,
    num_rows: int,
    found: np.ndarray,
) -> int:
    """Write where the edges of seeds ``[begin, end)`` are; the first bad place, or -1."""
    tiers, pointers, position, width = graph
    for ahead in range(begin, end + _AHEAD):
        place = ahead - _AHEAD
        if place >= begin:
            segment, local = found[place, SEGMENT], found[place, FIRST_EDGE]
            indptr = pointers[segment, INDPTR] + 8 * local
            first = load_int64(indptr)
            found[place, FIRST_EDGE] = first
            found[place, DEGREE] = load_int64(indptr + 8) - first
        if ahead < end:
            seed = load_id(seeds, ahead, seed_width)
            if seed < 0 or seed >= num_rows:
                return ahead
            if width != 0 and ahead + _AHEAD < end:
                prefetch(position + width * load_id(seeds, ahead + _AHEAD, seed_width))
            segment, local = segment_of(position_of(seed, position, width), tiers)
            prefetch(pointers[segment, INDPTR] + 8 * local)
            found[ahead, SEGMENT] = segment
            found[ahead, FIRST_EDGE] = local
    return -1


def find_edges(seeds: torch.Tensor, graph: Rows, num_rows: int) -> np.ndarray:
    """Look up each seed's edges.

    Returns
    -------
    ndarray, int64, shape (n, 3)
        The segment, the number of the first edge in it and the degree.

    Raises
    ------
    IdOutOfRangeError
        If a seed is not in [0, num_rows).
    """
    found = np.empty((seeds.numel(), 3), dtype=np.int64)
    places = parallel.run(
        _find, len(found), GRAIN, seeds.data_ptr(), seeds.element_size(), graph, num_rows, found
    )
    raise_at_bad_id(places, seeds, num_rows, "look up the edges of nodes")
    return found

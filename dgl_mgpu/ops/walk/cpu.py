"""Random walks and PinSAGE's neighbour selection on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dgl_mgpu.ops import parallel
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.edges import edge_id, row_bounds, stored_ids
from dgl_mgpu.ops.memory import (
    Rows,
    kernel,
    load_id,
    load_int64,
    position_of,
    prefetch,
    rows_argument,
    segment_of,
)
from dgl_mgpu.ops.philox import WALK_STREAM, below, philox
from dgl_mgpu.ops.view import INDICES
from dgl_mgpu.ops.walk.op import TieredPath, pinsage_neighbors_op, random_walk_op

#: Walks, or seeds, that are worth waking a thread for.
_GRAIN = 256
#: Walks that take each step together, so that their misses overlap.
_TOGETHER = 32


@kernel
def _step(
    begin: int,
    end: int,
    step: int,
    walks: np.ndarray,
    graph: Rows,
    width: int,
    stop: int,
    key: int,
    traces: np.ndarray,
    taken: np.ndarray,
) -> None:
    """Extend traces ``[begin, end)`` from column ``step`` to the next.

    ``taken``, if it has rows, gets the ids of the edges.
    """
    tiers, pointers, position, position_width = graph
    segments = np.empty(_TOGETHER, np.int64)
    indptrs = np.empty(_TOGETHER, np.int64)
    steps = np.empty(_TOGETHER, np.int64)
    edges = np.empty(_TOGETHER, np.int64)
    places = np.empty(_TOGETHER, np.int64)
    shifts = np.empty(_TOGETHER, np.int64)
    for start in range(begin, end, _TOGETHER):
        count = min(_TOGETHER, end - start)

        if position_width != 0:
            for index in range(count):
                prefetch(position + position_width * traces[start + index, step])

        for index in range(count):
            node = traces[start + index, step]
            indptrs[index] = 0
            if node >= 0:
                segment, local = segment_of(position_of(node, position, position_width), tiers)
                segments[index] = segment
                indptrs[index], steps[index] = row_bounds(pointers, segment, local)
                prefetch(indptrs[index])

        for index in range(count):
            edges[index] = 0
            if indptrs[index] == 0:
                continue
            walk = start + index
            pick, end_draw = philox(traces[walk, 0], walks[walk], WALK_STREAM + step, key)
            first = load_int64(indptrs[index])
            degree = load_int64(indptrs[index] + steps[index]) - first
            if degree > 0 and np.int64(end_draw >> np.uint64(11)) >= stop:
                edge = first + below(pick, degree)
                places[index] = edge
                shifts[index] = load_int64(indptrs[index] + 8) - first if steps[index] == 16 else 0
                edges[index] = pointers[segments[index], INDICES] + edge * width
                prefetch(edges[index])

        for index in range(count):
            visited = -1
            if edges[index] != 0:
                visited = load_id(edges[index], 0, width)
            traces[start + index, step + 1] = visited

        if len(taken) > 0:
            for index in range(count):
                edge = -1
                if edges[index] != 0:
                    ids = stored_ids(pointers, segments[index])
                    edge = edge_id(ids, places[index], shifts[index], width)
                taken[start + index, step] = edge


@kernel
def _select(
    begin: int,
    end: int,
    traces: np.ndarray,
    num_walks: int,
    stride: int,
    neighbors: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Select the most visited nodes of seeds ``[begin, end)``."""
    columns = traces.shape[1]
    most = num_walks * (columns // stride)
    size = 1
    while size < 2 * most:
        size *= 2
    slots = np.empty(size, np.int64)
    nodes = np.empty(most, np.int64)
    visits = np.empty(most, np.int64)
    for seed in range(begin, end):
        slots[:] = -1
        distinct = 0
        for walk in range(seed * num_walks, (seed + 1) * num_walks):
            for column in range(stride, columns, stride):
                node = traces[walk, column]
                if node < 0:
                    break
                slot = (node ^ (node >> 16)) & (size - 1)
                while slots[slot] >= 0 and nodes[slots[slot]] != node:
                    slot = (slot + 1) & (size - 1)
                if slots[slot] < 0:
                    slots[slot] = distinct
                    nodes[distinct] = node
                    visits[distinct] = 0
                    distinct += 1
                visits[slots[slot]] += 1
        for rank in range(neighbors.shape[1]):
            best = -1
            for index in range(distinct):
                if visits[index] > 0 and (best < 0 or visits[index] > visits[best]):
                    best = index
            neighbors[seed, rank] = nodes[best] if best >= 0 else -1
            counts[seed, rank] = visits[best] if best >= 0 else 0
            if best >= 0:
                visits[best] = 0


@random_walk_op.cpu
def _random_walk(
    starts: torch.Tensor,
    walks: torch.Tensor,
    path: TieredPath,
    stops: Sequence[int],
    key: int,
    edges: torch.Tensor | None,
) -> torch.Tensor:
    tiers, pointers, positions, num_rows, idtype = path
    outside = (starts < 0) | (starts >= num_rows[0])
    raise_at_bad_id(outside.nonzero()[:1, 0].tolist(), starts, num_rows[0], "walk")
    traces = torch.empty((starts.numel(), len(stops) + 1), dtype=torch.int64)
    traces[:, 0] = starts
    taken = np.empty((0, 0), dtype=np.int64) if edges is None else edges.numpy()
    graphs = [rows_argument(*view) for view in zip(tiers, pointers, positions, strict=True)]
    for step, stop in enumerate(stops):
        parallel.run(
            _step,
            len(traces),
            _GRAIN,
            step,
            walks.numpy(),
            graphs[step % len(graphs)],
            idtype.itemsize,
            stop,
            key,
            traces.numpy(),
            taken,
        )
    return traces


@pinsage_neighbors_op.cpu
def _pinsage_neighbors(
    seeds: torch.Tensor,
    path: TieredPath,
    stops: Sequence[int],
    num_walks: int,
    num_neighbors: int,
    key: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_nodes = path.num_rows[0]
    outside = (seeds < 0) | (seeds >= num_nodes)
    raise_at_bad_id(outside.nonzero()[:1, 0].tolist(), seeds, num_nodes, "walk")
    traces = _random_walk(
        seeds.repeat_interleave(num_walks),
        torch.arange(num_walks).repeat(seeds.numel()),
        *path,
        stops,
        key,
    )
    neighbors = torch.empty((seeds.numel(), num_neighbors), dtype=torch.int64)
    counts = torch.empty_like(neighbors)
    parallel.run(
        _select,
        len(neighbors),
        _GRAIN,
        traces.numpy(),
        num_walks,
        len(path.tiers),
        neighbors.numpy(),
        counts.numpy(),
    )
    selected = counts > 0
    indptr = torch.zeros(seeds.numel() + 1, dtype=torch.int64)
    torch.cumsum(selected.sum(dim=1), dim=0, out=indptr[1:])
    return indptr, neighbors[selected].to(path.idtype), counts[selected]

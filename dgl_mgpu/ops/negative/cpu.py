"""Negative sampling on the CPU: one try of all pairs that have none yet, and again."""

from __future__ import annotations

import numpy as np
import torch

from dgl_mgpu.ops import parallel
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.edges import DEGREE, FIRST_EDGE, GRAIN, SEGMENT, find_edges
from dgl_mgpu.ops.memory import Rows, kernel, load_id, prefetch, rows_argument
from dgl_mgpu.ops.negative.op import negative_destinations_op, negative_edges_op
from dgl_mgpu.ops.philox import (
    NEGATIVE_DESTINATION_STREAM,
    NEGATIVE_EDGE_STREAM,
    below,
    philox,
)
from dgl_mgpu.ops.view import INDICES, TieredGraph

#: Candidates whose destination's in-edges are asked for ahead.
_AHEAD = 16


@kernel
def _draw_edges(
    begin: int,
    end: int,
    pending: np.ndarray,
    attempt: int,
    num_cols: int,
    num_rows: int,
    key: int,
    sources: np.ndarray,
    destinations: np.ndarray,
) -> None:
    """Draw both ends of the pairs ``pending[begin:end]``."""
    for index in range(begin, end):
        pair = pending[index]
        first, second = philox(pair, 0, NEGATIVE_EDGE_STREAM + attempt, key)
        sources[pair] = below(first, num_cols)
        destinations[pair] = below(second, num_rows)


@kernel
def _draw_destinations(
    begin: int,
    end: int,
    pending: np.ndarray,
    attempt: int,
    num_rows: int,
    key: int,
    sources: np.ndarray,
    blocks: np.ndarray,
    destinations: np.ndarray,
) -> None:
    """Draw the destinations of the pairs ``pending[begin:end]``."""
    for index in range(begin, end):
        pair = pending[index]
        stream = NEGATIVE_DESTINATION_STREAM + attempt
        first, _ = philox(sources[pair], blocks[pair], stream, key)
        destinations[pair] = below(first, num_rows)


@kernel
def _test(
    begin: int,
    end: int,
    pending: np.ndarray,
    sources: np.ndarray,
    destinations: np.ndarray,
    found: np.ndarray,
    pointers: np.ndarray,
    width: int,
    avoid_existing: bool,
    exclude_self_loops: bool,
    failed: np.ndarray,
) -> None:
    """Whether each of the candidates ``pending[begin:end]`` must not be taken.

    ``found`` says where the in-edges of each candidate's destination are.
    """
    for index in range(begin, end):
        if avoid_existing and index + _AHEAD < end:
            segment, edge = found[index + _AHEAD, SEGMENT], found[index + _AHEAD, FIRST_EDGE]
            prefetch(pointers[segment, INDICES] + edge * width)
        source = sources[pending[index]]
        fails = exclude_self_loops and source == destinations[pending[index]]
        if avoid_existing and not fails:
            segment, first = found[index, SEGMENT], found[index, FIRST_EDGE]
            for edge in range(first, first + found[index, DEGREE]):
                if load_id(pointers[segment, INDICES], edge, width) == source:
                    fails = True
                    break
        failed[index] = fails


@kernel
def _claim(
    pending: np.ndarray,
    sources: np.ndarray,
    destinations: np.ndarray,
    table: np.ndarray,
    failed: np.ndarray,
) -> None:
    """Let candidates that are in the table fail, and add the others to it.

    ``table`` is an open-addressing set of pairs, -1 where it is empty; its size is a power of 2.
    """
    mask = len(table) - 1
    for index in range(len(pending)):
        if failed[index]:
            continue
        pair = pending[index]
        source, destination = sources[pair], destinations[pair]
        slot = (source * 0x9E3779B1 + destination * 0x85EBCA77) & mask
        while table[slot] >= 0 and (
            sources[table[slot]] != source or destinations[table[slot]] != destination
        ):
            slot = (slot + 1) & mask
        if table[slot] >= 0:
            failed[index] = True
        else:
            table[slot] = pair


def _failed(
    pending: np.ndarray,
    sources: np.ndarray,
    destinations: np.ndarray,
    graph: Rows,
    num_rows: int,
    width: int,
    avoid_existing: bool,
    exclude_self_loops: bool,
) -> np.ndarray:
    found = np.empty((0, 3), dtype=np.int64)
    if avoid_existing:
        found = find_edges(torch.from_numpy(destinations[pending]), graph, num_rows)
    failed = np.empty(len(pending), dtype=np.bool_)
    parallel.run(
        _test,
        len(pending),
        GRAIN,
        pending,
        sources,
        destinations,
        found,
        graph[1],
        width,
        avoid_existing,
        exclude_self_loops,
        failed,
    )
    return failed


@negative_edges_op.cpu
def _negative_edges(
    graph: TieredGraph, num: int, replace: bool, exclude_self_loops: bool, max_tries: int, key: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tiers, pointers, position, num_rows, num_cols, idtype = graph
    argument = rows_argument(tiers, pointers, position)
    sources, destinations = np.empty((2, num), dtype=np.int64)
    table = np.full(0 if replace else 1 << (2 * num).bit_length(), -1)
    pending = np.arange(num)
    for attempt in range(max_tries):
        if len(pending) == 0:
            break
        parallel.run(
            _draw_edges,
            len(pending),
            GRAIN,
            pending,
            attempt,
            num_cols,
            num_rows,
            key,
            sources,
            destinations,
        )
        failed = _failed(
            pending,
            sources,
            destinations,
            argument,
            num_rows,
            idtype.itemsize,
            True,
            exclude_self_loops,
        )
        if not replace:
            _claim(pending, sources, destinations, table, failed)
        pending = pending[failed]
    taken = np.ones(num, dtype=np.bool_)
    taken[pending] = False
    return (
        torch.from_numpy(sources[taken]).to(idtype),
        torch.from_numpy(destinations[taken]).to(idtype),
    )


@negative_destinations_op.cpu
def _negative_destinations(
    sources: torch.Tensor,
    numbers: torch.Tensor,
    graph: TieredGraph,
    k: int,
    avoid_existing: bool,
    exclude_self_loops: bool,
    max_tries: int,
    key: int,
) -> torch.Tensor:
    tiers, pointers, position, num_rows, num_cols, idtype = graph
    outside = (sources < 0) | (sources >= num_cols)
    raise_at_bad_id(
        outside.nonzero()[:1, 0].tolist(), sources, num_cols, "sample negative destinations"
    )
    argument = rows_argument(tiers, pointers, position)
    source_of = sources.long().repeat_interleave(k).numpy()
    blocks = (numbers[:, None] * k + torch.arange(k)).reshape(-1).numpy()
    destinations = np.empty(len(source_of), dtype=np.int64)
    pending = np.arange(len(source_of))
    for attempt in range(max_tries):
        if len(pending) == 0:
            break
        parallel.run(
            _draw_destinations,
            len(pending),
            GRAIN,
            pending,
            attempt,
            num_rows,
            key,
            source_of,
            blocks,
            destinations,
        )
        failed = _failed(
            pending,
            source_of,
            destinations,
            argument,
            num_rows,
            idtype.itemsize,
            avoid_existing,
            exclude_self_loops,
        )
        pending = pending[failed]
    destinations[pending] = -1
    return torch.from_numpy(destinations).to(idtype).reshape(len(sources), k)

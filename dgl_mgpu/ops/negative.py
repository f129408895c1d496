"""Negative sampling; see ``kernels/negative.cu``.

A candidate pair is an edge if its source is among the in-edges of its destination, which are in
no order: all of them are read.  A mini-batch's candidates are spread over all rows, so they read
a few dozen ids each; the hundreds of thousands of a hub are read only by what falls on it.

The CPU makes one try of all pairs that have none yet, and then the next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import cpu
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import check_ids, check_integer, raise_at_bad_id, raise_at_id_outside
from dgl_mgpu.ops.cpu import Rows, kernel, load_id, prefetch, rows_argument
from dgl_mgpu.ops.device import Kernel, blocks_within, c_type, position_pointer, position_type
from dgl_mgpu.ops.edges import DEGREE, FIRST_EDGE, GRAIN, SEGMENT, find_edges
from dgl_mgpu.ops.library import Operator, Size
from dgl_mgpu.ops.philox import (
    NEGATIVE_DESTINATION_STREAM,
    NEGATIVE_EDGE_STREAM,
    SampleKey,
    below,
    philox,
)
from dgl_mgpu.ops.view import INDICES, GraphView, TieredGraph, tiered_graph
from dgl_mgpu.ops.walk import occurrences
from dgl_mgpu.ops.workspace import workspace


class Rules(NamedTuple):
    """What makes a candidate fail, and how many each pair has."""

    avoid_existing: bool
    exclude_self_loops: bool
    max_tries: int


@Operator
def negative_edges_op(
    graph: TieredGraph, num: Size, replace: bool, exclude_self_loops: bool, max_tries: int, key: int
) -> tuple[Tensor, Tensor]:
    total = torch.library.get_ctx().new_dynamic_size()
    ends = [graph.tiers.new_empty(total, dtype=graph.idtype) for _ in range(2)]
    return ends[0], ends[1]


@Operator
def negative_destinations_op(
    sources: Tensor, numbers: Tensor, graph: TieredGraph, k: Size, rules: Rules, key: int
) -> Tensor:
    return sources.new_empty((sources.shape[0], k), dtype=graph.idtype)


class NegativeEdges(NamedTuple):
    """Pairs of nodes that are no edges.

    Attributes
    ----------
    sources, destinations : Tensor, the graph's idtype, shape (m,)
    """

    sources: Tensor
    destinations: Tensor


def _check_tries(view: GraphView, max_tries: int, exclude_self_loops: bool, action: str) -> int:
    max_tries = check_integer(max_tries, "max_tries", 1, action)
    if max_tries > NEGATIVE_EDGE_STREAM:
        raise InvalidInputError(
            action, f"max_tries is {max_tries}", f"pass at most {NEGATIVE_EDGE_STREAM}"
        )
    if exclude_self_loops and view.num_rows != view.num_cols:
        raise InvalidInputError(
            action,
            f"exclude_self_loops is set, but edges lead from {view.num_cols} nodes to"
            f" {view.num_rows} others",
            "pass exclude_self_loops=False where sources and destinations are different types",
        )
    return max_tries if view.num_rows > 0 and view.num_cols > 0 else 0


def negative_edges(
    view: GraphView,
    num: int,
    key: SampleKey,
    *,
    replace: bool = False,
    exclude_self_loops: bool = True,
    max_tries: int = 10,
) -> NegativeEdges:
    """Draw pairs of nodes that are no edges, each such pair with the same probability.

    What ``dgl.sampling.global_uniform_negative_sampling`` does.

    Parameters
    ----------
    view : GraphView
        The topology of the edge type that is avoided.
    num : int
        Pairs to draw at most.
    key : SampleKey
        Names the experiment.
    replace : bool
        Whether a pair may be drawn more than once.
    exclude_self_loops : bool
        Whether to avoid pairs of a node and itself, too.
    max_tries : int
        Candidates for each pair.  In a graph that lacks few edges all of them may fail, and in
        a complete one they do: then there are fewer than ``num`` pairs.

    Returns
    -------
    NegativeEdges
        Of ``m <= num`` pairs.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong type or value, or self-loops are to be excluded where there
        cannot be any because sources and destinations are not the same nodes.

    Notes
    -----
    Candidate ``t`` of pair ``i`` is block 0 of the Philox stream ``NEGATIVE_EDGE_STREAM + t`` of
    ``i``: the first draw gives the source, the second the destination.  With replacement a pair
    is its first candidate that is no edge.  Without, all pairs that have none yet try candidate
    ``t`` together; one that an earlier try has taken fails, and of equal ones the first stays.
    """
    action = f"sample {num} negative edges"
    num = check_integer(num, "num", 0, action)
    max_tries = _check_tries(view, max_tries, exclude_self_loops, action)
    return NegativeEdges(
        *torch.ops.dgl_mgpu.negative_edges(
            *tiered_graph(view), num, replace, exclude_self_loops, max_tries, key.fold()
        )
    )


def negative_destinations(
    view: GraphView,
    sources: Tensor,
    k: int,
    key: SampleKey,
    *,
    avoid_existing: bool = True,
    exclude_self_loops: bool = True,
    max_tries: int = 10,
) -> Tensor:
    """Draw for each source destinations to which it has no edge, with replacement.

    What ``dgl.dataloading.negative_sampler.PerSourceUniform`` does for the sources of a batch
    of edges, but that draws from all nodes, which ``avoid_existing=False`` does here.

    Parameters
    ----------
    view : GraphView
        The topology of the edge type that is avoided.
    sources : Tensor, int32 or int64, shape (n,)
        Source nodes, such as those of the edges to predict.  The j-th mention of a node in a
        call has draws of its own.
    k : int
        Destinations for each.
    key : SampleKey
        Names the experiment.
    avoid_existing, exclude_self_loops : bool
        What makes a candidate fail: an edge to it; its being the source itself.
    max_tries : int
        Candidates for each destination.

    Returns
    -------
    Tensor, the graph's idtype, shape (n, k)
        Destination nodes; -1 where all candidates failed, which where a source lacks a share
        ``s`` of all destinations happens with probability ``(1 - s) ** max_tries``.

    Raises
    ------
    InvalidInputError
        As :func:`negative_edges`.
    IdOutOfRangeError
        If a source is not a node; it names the first one.

    Notes
    -----
    Candidate ``t`` for place ``p`` of mention ``j`` of a source is the first draw of block
    ``j * k + p`` of the node's Philox stream ``NEGATIVE_DESTINATION_STREAM + t``.
    """
    action = f"sample {k} negative destinations a source"
    sources = check_ids(sources, action, view.tiers.device)
    k = check_integer(k, "k", 0, action)
    max_tries = _check_tries(view, max_tries, exclude_self_loops, action)
    return torch.ops.dgl_mgpu.negative_destinations(
        sources, occurrences(sources), *tiered_graph(view), k, avoid_existing, exclude_self_loops,
        max_tries, key.fold(),
    )  # fmt: skip


#: Candidates whose destination's in-edges are asked for ahead.
_AHEAD = 16


@kernel
def _draw_edges(
    begin: int, end: int, pending: np.ndarray, attempt: int, num_cols: int, num_rows: int, key: int,
    sources: np.ndarray, destinations: np.ndarray,
) -> None:  # fmt: skip
    """Draw both ends of the pairs ``pending[begin:end]``."""
    for index in range(begin, end):
        pair = pending[index]
        first, second = philox(pair, 0, NEGATIVE_EDGE_STREAM + attempt, key)
        sources[pair] = below(first, num_cols)
        destinations[pair] = below(second, num_rows)


@kernel
def _draw_destinations(
    begin: int, end: int, pending: np.ndarray, attempt: int, num_rows: int, key: int,
    sources: np.ndarray, blocks: np.ndarray, destinations: np.ndarray,
) -> None:  # fmt: skip
    """Draw the destinations of the pairs ``pending[begin:end]``."""
    for index in range(begin, end):
        pair = pending[index]
        stream = NEGATIVE_DESTINATION_STREAM + attempt
        first, _ = philox(sources[pair], blocks[pair], stream, key)
        destinations[pair] = below(first, num_rows)


@kernel
def _test(
    begin: int, end: int, pending: np.ndarray, sources: np.ndarray, destinations: np.ndarray,
    ranges: np.ndarray, pointers: np.ndarray, width: int, avoid_existing: bool,
    exclude_self_loops: bool, failed: np.ndarray,
) -> None:  # fmt: skip
    """Whether each of the candidates ``pending[begin:end]`` must not be taken.

    ``ranges`` says where the in-edges of each candidate's destination are.
    """
    for index in range(begin, end):
        if avoid_existing and index + _AHEAD < end:
            segment, edge = ranges[index + _AHEAD, SEGMENT], ranges[index + _AHEAD, FIRST_EDGE]
            prefetch(pointers[segment, INDICES] + edge * width)
        source = sources[pending[index]]
        fails = exclude_self_loops and source == destinations[pending[index]]
        if avoid_existing and not fails:
            segment, first = ranges[index, SEGMENT], ranges[index, FIRST_EDGE]
            for edge in range(first, first + ranges[index, DEGREE]):
                if load_id(pointers[segment, INDICES], edge, width) == source:
                    fails = True
                    break
        failed[index] = fails


@kernel
def _claim(
    pending: np.ndarray, sources: np.ndarray, destinations: np.ndarray, table: np.ndarray,
    failed: np.ndarray,
) -> None:  # fmt: skip
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
    rules: Rules,
) -> np.ndarray:
    ranges = np.empty((0, 3), dtype=np.int64)
    if rules.avoid_existing:
        ranges = find_edges(torch.from_numpy(destinations[pending]), graph, num_rows)
    failed = np.empty(len(pending), dtype=np.bool_)
    cpu.run(
        _test, len(pending), GRAIN, pending, sources, destinations, ranges, graph[1], width,
        rules.avoid_existing, rules.exclude_self_loops, failed,
    )  # fmt: skip
    return failed


@negative_edges_op.cpu
def _negative_edges_cpu(
    graph: TieredGraph, num: int, replace: bool, exclude_self_loops: bool, max_tries: int, key: int
) -> tuple[Tensor, Tensor]:
    num_rows, num_cols, idtype = graph[3:]
    rows, rules = rows_argument(*graph[:3]), Rules(True, exclude_self_loops, max_tries)
    sources, destinations = np.empty((2, num), dtype=np.int64)
    table = np.full(0 if replace else 1 << (2 * num).bit_length(), -1)
    pending = np.arange(num)
    for attempt in range(max_tries):
        if len(pending) == 0:
            break
        cpu.run(
            _draw_edges, len(pending), GRAIN, pending, attempt, num_cols, num_rows, key, sources,
            destinations,
        )  # fmt: skip
        failed = _failed(pending, sources, destinations, rows, num_rows, idtype.itemsize, rules)
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
def _negative_destinations_cpu(
    sources: Tensor, numbers: Tensor, graph: TieredGraph, k: int, rules: Rules, key: int
) -> Tensor:
    num_rows, num_cols, idtype = graph[3:]
    raise_at_id_outside(sources, num_cols, "sample negative destinations")
    rows = rows_argument(*graph[:3])
    source_of = sources.long().repeat_interleave(k).numpy()
    blocks = (numbers[:, None] * k + torch.arange(k)).reshape(-1).numpy()
    destinations = np.empty(len(source_of), dtype=np.int64)
    pending = np.arange(len(source_of))
    for attempt in range(rules.max_tries):
        if len(pending) == 0:
            break
        cpu.run(
            _draw_destinations, len(pending), GRAIN, pending, attempt, num_rows, key, source_of,
            blocks, destinations,
        )  # fmt: skip
        failed = _failed(pending, source_of, destinations, rows, num_rows, idtype.itemsize, rules)
        pending = pending[failed]
    destinations[pending] = -1
    return torch.from_numpy(destinations).to(idtype).reshape(len(sources), k)


_THREADS = 256
_WARPS = _THREADS // 32


@negative_edges_op.cuda
def _negative_edges_cuda(
    graph: TieredGraph, num: int, replace: bool, exclude_self_loops: bool, max_tries: int, key: int
) -> tuple[Tensor, Tensor]:
    tiers, pointers, position, num_rows, num_cols, idtype = graph
    device = tiers.device
    gpu.raise_faults(device, wait=False)
    kernel = Kernel(
        "negative.cu",
        f"dgl_mgpu::negative_edges<{c_type(idtype)}, {position_type(position)}>",
        cooperative=True,
    )
    space = workspace(device)
    blocks = blocks_within(kernel, _THREADS, -(-num // _WARPS), device)
    drawn = torch.empty((2, num), dtype=idtype, device=device)
    slots = torch.empty(num, dtype=torch.int64, device=device)
    # Not one piece: what an operator returns must not share memory.
    sources, destinations = (torch.empty(num, dtype=idtype, device=device) for _ in range(2))
    table_slots = 0 if replace else 1 << (2 * num).bit_length()
    with space.lock:
        kernel(
            blocks, _THREADS, num, tiers, len(tiers), pointers, position_pointer(position),
            num_rows, num_cols, exclude_self_loops, max_tries, key, drawn[0], drawn[1], slots,
            None if replace else space.buffer("table", table_slots, torch.int64), table_slots - 1,
            space.control(blocks), sources, destinations, space.report, device=device,
        )  # fmt: skip
        (total,) = space.read_report(1)
    return sources[:total], destinations[:total]


@negative_destinations_op.cuda
def _negative_destinations_cuda(
    sources: Tensor, numbers: Tensor, graph: TieredGraph, k: int, rules: Rules, key: int
) -> Tensor:
    tiers, pointers, position, num_rows, num_cols, idtype = graph
    device, count = sources.device, sources.numel()
    gpu.raise_faults(device, wait=False)
    destinations = torch.empty((count, k), dtype=idtype, device=device)
    bad = torch.full((1,), -1, dtype=torch.int64, device=device)
    kernel = Kernel(
        "negative.cu",
        f"dgl_mgpu::negative_destinations<{c_type(sources.dtype)}, {c_type(idtype)}, "
        f"{position_type(position)}>",
    )
    items = count * k
    kernel(
        blocks_within(kernel, _THREADS, -(-items // _WARPS), device) if items else 0, _THREADS,
        sources, count, numbers, k, tiers, len(tiers), pointers, position_pointer(position),
        num_rows, num_cols, *rules, key, destinations, bad, device=device,
    )  # fmt: skip
    report = gpu.driver.host_buffer(1).copy_(bad, non_blocking=True)
    gpu.driver.synchronize(device)
    raise_at_bad_id(report.tolist(), sources, num_cols, "sample negative destinations")
    return destinations

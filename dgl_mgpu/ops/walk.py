"""Random walks and PinSAGE's neighbour selection; see ``kernels/walk.cu``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import cpu
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import (
    check_ids,
    check_integer,
    check_tensor,
    raise_at_bad_id,
    raise_at_id_outside,
)
from dgl_mgpu.ops.cpu import (
    Rows,
    kernel,
    load_id,
    load_int64,
    position_of,
    prefetch,
    rows_argument,
    segment_of,
)
from dgl_mgpu.ops.device import Kernel, blocks_within, c_type
from dgl_mgpu.ops.edges import edge_id, row_bounds, stored_ids
from dgl_mgpu.ops.library import Operator, Sizes, Written
from dgl_mgpu.ops.philox import WALK_STREAM, SampleKey, below, philox
from dgl_mgpu.ops.view import INDICES, GraphView
from dgl_mgpu.ops.workspace import NodePrefix, Workspace, beginning, workspace


class TieredPath(NamedTuple):
    """What operators take of a metapath: the arguments of each step's view.

    Before step ``t`` of a walk it ends with a probability of ``stops[t] * 2**-53``.
    """

    tiers: Sequence[Tensor]
    pointers: Sequence[Tensor]
    positions: Sequence[Tensor]
    num_rows: Sizes
    idtype: torch.dtype
    stops: Sequence[int]


@Operator
def random_walk_op(
    starts: Tensor, walks: Tensor, path: TieredPath, key: int, edges: Written | None = None
) -> Tensor:
    return starts.new_empty((starts.shape[0], len(path.stops) + 1), dtype=torch.int64)


@Operator
def pinsage_neighbors_op(
    seeds: Tensor, path: TieredPath, num_walks: int, num_neighbors: int, key: int
) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.library.get_ctx().new_dynamic_size()
    return (
        seeds.new_empty(seeds.shape[0] + 1, dtype=torch.int64),
        seeds.new_empty(total, dtype=path.idtype),
        seeds.new_empty(total, dtype=torch.int64),
    )


class VisitedNeighbors(NamedTuple):
    """For each seed the nodes its walks visited most.

    Attributes
    ----------
    indptr : Tensor, int64, shape (n + 1,)
        Seed ``i`` has the neighbors ``indptr[i]`` to ``indptr[i + 1]``.
    neighbors : Tensor, the graph's idtype, shape (E,)
        Visited nodes, the most visited first.
    counts : Tensor, int64, shape (E,)
        Number of visits to each.
    """

    indptr: Tensor
    neighbors: Tensor
    counts: Tensor


def _as_metapath(
    views: GraphView | Sequence[GraphView], action: str, length: int | None = None
) -> list[GraphView]:
    """The views of a walk of ``length`` steps, or of any, checked to follow each other."""
    path = [views] if isinstance(views, GraphView) else list(views)
    if not path:
        raise InvalidInputError(action, "the metapath is empty", "pass at least one view")
    begins_again = length is None or length > len(path)
    for view, following in pairwise(path + path[:1] if begins_again else path):
        ends = view.num_cols, view.idtype, view.tiers.device
        begins = following.num_rows, following.idtype, following.tiers.device
        if ends != begins:
            raise InvalidInputError(
                action,
                "a step ends at one of {} nodes of {} on '{}', but the next begins at one of {}"
                " nodes of {} on '{}'".format(*ends, *begins),
                "pass views each of which ends where the next one begins, and the last where the"
                " first does",
            )
    return path


def tiered_path(path: list[GraphView], stop_probabilities: list[float]) -> TieredPath:
    """A metapath as operators take it."""
    return TieredPath(
        [view.tiers for view in path],
        [view.pointers for view in path],
        [view.position for view in path],
        [view.num_rows for view in path],
        path[0].idtype,
        # To be compared with the top 53 bits of a draw.
        [math.ceil(probability * 2**53) for probability in stop_probabilities],
    )


def _check_probability(value: float, name: str, action: str) -> float:
    if not 0.0 <= value <= 1.0:
        raise InvalidInputError(action, f"{name} is {value!r}", "pass a probability in [0, 1]")
    return float(value)


def occurrences(ids: Tensor) -> Tensor:
    """Number of equal ids before each id."""
    ordered, order = torch.sort(ids, stable=True)
    place = torch.arange(ids.numel(), device=ids.device)
    begins = torch.ones_like(place, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    run_start = torch.cummax(torch.where(begins, place, 0), dim=0).values if len(ids) else place
    occurrence = torch.empty_like(place)
    occurrence[order] = place - run_start
    return occurrence


def random_walk(
    views: GraphView | Sequence[GraphView],
    starts: Tensor,
    length: int,
    key: SampleKey,
    *,
    restart_prob: float | Sequence[float] = 0.0,
    edges: Tensor | None = None,
) -> Tensor:
    """Walk from each start, each step along a uniformly chosen edge.

    A step goes from a row of a view to one of the columns stored there.  A view is CSC, rows
    are destinations: to walk *along* edges, as ``dgl.sampling.random_walk`` does, pass the
    view of the reversed graph (the CSR of the graph).

    Parameters
    ----------
    views : GraphView or sequence of GraphView
        Topology; of a sequence (a metapath), step ``t`` uses ``views[t % len(views)]``.  Each
        view ends where the next begins, and the last where the first does if the walk gets there.
    starts : Tensor, int32 or int64, shape (n,)
        Start nodes.  The j-th walk from the same node in a call uses the node's j-th stream.
    length : int
        Number of steps.
    key : SampleKey
        Names the experiment.
    restart_prob : float or sequence of ``length`` floats
        Probability to end the walk before each step.
    edges : Tensor, int64, shape (n, length), optional
        Gets the id of the edge that each step takes; -1 after the end of a walk.

    Returns
    -------
    Tensor, int64, shape (n, length + 1)
        The nodes visited, the start first; -1 after the end of a walk, which comes early at a
        node without edges.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype, shape or value, or views do not follow each other.
    IdOutOfRangeError
        If a start is not a node; it names the first one.

    Notes
    -----
    Step ``t`` of a start's walk ``j`` has block ``j`` of the node's Philox stream
    ``WALK_STREAM + t``: the walk ends if the top 53 bits of the second draw are below
    ``ceil(restart_prob * 2**53)``; else it takes edge number high half of first draw * degree.
    """
    action = f"walk {length} steps"
    length = check_integer(length, "length", 0, action)
    path = _as_metapath(views, action, length)
    starts = check_ids(starts, action, path[0].tiers.device)
    if edges is not None:
        shape = (starts.numel(), length)
        check_tensor(edges, "edges", action, torch.int64, shape, starts.device, contiguous=True)
    stops = (
        [restart_prob] * length
        if isinstance(restart_prob, (int, float))
        else [float(probability) for probability in restart_prob]
    )
    if len(stops) != length:
        raise InvalidInputError(
            action,
            f"there are {len(stops)} restart probabilities",
            "pass one float, or one for each step",
        )
    stops = [_check_probability(stop, "restart_prob", action) for stop in stops]
    return torch.ops.dgl_mgpu.random_walk(
        starts, occurrences(starts), *tiered_path(path, stops), key.fold(), edges
    )


def pinsage_neighbors(
    views: GraphView | Sequence[GraphView],
    seeds: Tensor,
    *,
    num_traversals: int,
    termination_prob: float,
    num_random_walks: int,
    num_neighbors: int,
    key: SampleKey,
) -> VisitedNeighbors:
    """Select for each seed the nodes that short random walks from it visit most.

    Semantics of DGL's ``RandomWalkNeighborSampler`` and, with the two views of a bipartite
    graph, ``PinSAGESampler``; a walk may visit, and a seed select, the seed itself.  XGNN's
    setting (section 6.1) is ``num_traversals=3, num_random_walks=4, num_neighbors=5``.

    Parameters
    ----------
    views : GraphView or sequence of GraphView
        The metapath of one traversal, see :func:`random_walk`; it ends at the type of node at
        which it begins.
    seeds : Tensor, int32 or int64, shape (n,)
        Nodes to select neighbors for; repeats are allowed and get equal neighbors.
    num_traversals : int
        Times that a walk goes through the metapath; visits count at the end of each.
    termination_prob : float
        Probability to end a walk after each traversal.
    num_random_walks : int
        Walks from each seed.
    num_neighbors : int
        Nodes to select at most.
    key : SampleKey
        Names the experiment.

    Returns
    -------
    VisitedNeighbors
        By decreasing number of visits; of equally visited ones those visited first (counting
        walk by walk) come first.  DGL prefers higher ids, which is a bias if ids mean anything.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError
        As :func:`random_walk`.
    """
    action = "select PinSAGE neighbors"
    path = check_traversals(
        views, action, num_traversals, termination_prob, num_random_walks, num_neighbors
    )
    seeds = check_ids(seeds, action, path.tiers[0].device)
    return VisitedNeighbors(
        *torch.ops.dgl_mgpu.pinsage_neighbors(
            seeds, *path, num_random_walks, num_neighbors, key.fold()
        )
    )


def check_traversals(
    views: GraphView | Sequence[GraphView],
    action: str,
    num_traversals: int,
    termination_prob: float,
    num_random_walks: int,
    num_neighbors: int,
) -> TieredPath:
    """The metapath of PinSAGE's walks; raises InvalidInputError if an argument is wrong."""
    path = _as_metapath(views, action)
    check_integer(num_traversals, "num_traversals", 1, action)
    check_integer(num_random_walks, "num_random_walks", 1, action)
    check_integer(num_neighbors, "num_neighbors", 0, action)
    _check_probability(termination_prob, "termination_prob", action)
    traversal = [termination_prob, *[0.0] * (len(path) - 1)]
    return tiered_path(path, [0.0, *(traversal * num_traversals)[1:]])


#: Steps of walks that are worth waking a thread for, and seeds whose visits are.
_GRAIN, _SEED_GRAIN = 4096, 256
#: Walks that take each step together, so that their misses overlap.
_TOGETHER = 32


@kernel
def _step(
    begin: int, end: int, step: int, walks: np.ndarray, graph: Rows, width: int, stop: int,
    key: int, traces: np.ndarray, taken: np.ndarray,
) -> None:  # fmt: skip
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
    begin: int, end: int, traces: np.ndarray, num_walks: int, stride: int, neighbors: np.ndarray,
    counts: np.ndarray,
) -> None:  # fmt: skip
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
def _random_walk_cpu(
    starts: Tensor, walks: Tensor, path: TieredPath, key: int, edges: Tensor | None
) -> Tensor:
    tiers, pointers, positions, num_rows, idtype, stops = path
    raise_at_id_outside(starts, num_rows[0], "walk")
    traces = torch.empty((starts.numel(), len(stops) + 1), dtype=torch.int64)
    traces[:, 0] = starts
    taken = np.empty((0, 0), dtype=np.int64) if edges is None else edges.numpy()
    graphs = [rows_argument(*view) for view in zip(tiers, pointers, positions, strict=True)]
    numbers, nodes = walks.numpy(), traces.numpy()

    def walk(begin: int, end: int) -> None:
        for step, stop in enumerate(stops):
            graph = graphs[step % len(graphs)]
            _step(begin, end, step, numbers, graph, idtype.itemsize, stop, key, nodes, taken)

    cpu.run(walk, len(traces), -(-_GRAIN // max(1, len(stops))))
    return traces


@pinsage_neighbors_op.cpu
def _pinsage_neighbors_cpu(
    seeds: Tensor, path: TieredPath, num_walks: int, num_neighbors: int, key: int
) -> tuple[Tensor, Tensor, Tensor]:
    raise_at_id_outside(seeds, path.num_rows[0], "walk")
    traces = _random_walk_cpu(
        seeds.repeat_interleave(num_walks),
        torch.arange(num_walks).repeat(seeds.numel()),
        *path,
        key,
    )
    neighbors = torch.empty((seeds.numel(), num_neighbors), dtype=torch.int64)
    counts = torch.empty_like(neighbors)
    cpu.run(
        _select, len(neighbors), _SEED_GRAIN, traces.numpy(), num_walks, len(path.tiers),
        neighbors.numpy(), counts.numpy(),
    )  # fmt: skip
    selected = counts > 0
    indptr = torch.zeros(seeds.numel() + 1, dtype=torch.int64)
    torch.cumsum(selected.sum(dim=1), dim=0, out=indptr[1:])
    return indptr, neighbors[selected].to(path.idtype), counts[selected]


_THREADS, _SELECTORS = 128, 512


class WalkLauncher:
    """Launches walks along one metapath on a device."""

    def __init__(self, device: torch.device, path: TieredPath) -> None:
        tiers, pointers, positions, num_rows, idtype, stops = path
        words = list(stops)
        for view_tiers, view_pointers, position in zip(tiers, pointers, positions, strict=True):
            words += [
                view_tiers.data_ptr(),
                len(view_tiers),
                view_pointers.data_ptr(),
                position.data_ptr(),
                position.element_size(),
            ]
        host_table = gpu.driver.host_buffer(len(words)).copy_(torch.tensor(words))
        self._table = host_table.to(device, non_blocking=True)
        self.steps, self.views = len(stops), len(tiers)
        self.device, self.num_rows, self.idtype = device, num_rows[0], idtype

    def trace(
        self,
        starts: NodePrefix,
        numbers: Tensor | None,
        walks_per_start: int,
        key: int,
        edges: Tensor | None,
        bad: Tensor,
    ) -> Tensor:
        """Launch ``walks_per_start`` walks from each start."""
        shape = starts.most * walks_per_start, self.steps + 1
        traces = torch.empty(shape, dtype=torch.int64, device=self.device)
        types = f"{c_type(starts.nodes.dtype)}, {c_type(self.idtype)}"
        kernel = Kernel("walk.cu", f"dgl_mgpu::walk<{types}>")
        wanted = -(-len(traces) // _THREADS)
        blocks = blocks_within(kernel, _THREADS, wanted, self.device) if wanted else 0
        kernel(
            blocks, _THREADS, *starts, numbers, walks_per_start, self._table, self.steps,
            self._table[self.steps :], self.views, self.num_rows, key, traces, edges, bad,
            device=self.device,
        )  # fmt: skip
        return traces

    def visited_neighbors(
        self,
        space: Workspace,
        seeds: NodePrefix,
        num_walks: int,
        num_neighbors: int,
        key: int,
        bad: Tensor,
        end: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Launch walks from seeds and the selection of the nodes that they visit most.

        ``end``, int64, shape (1,) or more, gets how many nodes are selected.  Returns ``indptr``,
        neighbors and counts as the operator does, in buffers for the largest possible ones.
        """
        _, count, exact = seeds
        traces = self.trace(seeds, None, num_walks, key, None, bad)
        visits = num_walks * (self.steps // self.views)
        size = count * min(num_neighbors, visits)

        def new(count: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(count, dtype=dtype, device=self.device)

        visited = new(count + 1, torch.int64), new(size, self.idtype), new(size, torch.int64)
        name = f"dgl_mgpu::select_visited<{c_type(self.idtype)}>"
        kernel = Kernel("walk.cu", name, cooperative=True)
        wanted = -(-count * visits // _SELECTORS)
        blocks = blocks_within(kernel, _SELECTORS, wanted, self.device)
        kernel(
            blocks, _SELECTORS, traces, count, exact, num_walks, self.steps + 1, self.views,
            num_neighbors, new(count * visits, torch.int32), *visited, space.control(blocks), end,
            device=self.device,
        )  # fmt: skip
        return visited


@random_walk_op.cuda
def _random_walk_cuda(
    starts: Tensor, walks: Tensor, path: TieredPath, key: int, edges: Tensor | None
) -> Tensor:
    device = starts.device
    gpu.raise_faults(device, wait=False)
    bad = torch.full((1,), -1, dtype=torch.int64, device=device)
    launcher = WalkLauncher(device, path)
    traces = launcher.trace(NodePrefix(starts, len(starts)), walks, 1, key, edges, bad)
    report = gpu.driver.host_buffer(1).copy_(bad, non_blocking=True)
    gpu.driver.synchronize(device)
    raise_at_bad_id(report.tolist(), starts, path.num_rows[0], "walk")
    return traces


@pinsage_neighbors_op.cuda
def _pinsage_neighbors_cuda(
    seeds: Tensor, path: TieredPath, num_walks: int, num_neighbors: int, key: int
) -> tuple[Tensor, Tensor, Tensor]:
    device = seeds.device
    gpu.raise_faults(device, wait=False)
    report = torch.full((2,), -1, dtype=torch.int64, device=device)
    launcher, prefix = WalkLauncher(device, path), NodePrefix(seeds, len(seeds))
    space = workspace(device)
    with space.lock:
        indptr, neighbors, counts = launcher.visited_neighbors(
            space, prefix, num_walks, num_neighbors, key, report, report[1:]
        )
    host_report = gpu.driver.host_buffer(2).copy_(report, non_blocking=True)
    gpu.driver.synchronize(device)
    bad, total = host_report.tolist()
    raise_at_bad_id([bad], seeds, path.num_rows[0], "walk")
    return indptr, beginning(neighbors, total), beginning(counts, total)

"""Best placements found without the solver: a plain cost model, an exhaustive search, a bound.

The machines here have links that share nothing, the tables are read in requests of 4096 bytes,
of which GPU memories and links deliver their full bandwidth and the host 0.95 of it.

``exhaustive``
    One table.  The hottest rows up to a boundary on a grid are on GPUs, in as many parts as
    there are GPUs; each part lies on any non-empty set of GPUs; each GPU reads each part from
    any copy in reach, else (or if that is faster) from the host; the other rows are in host
    memory.  Every combination within the budgets is looked at, parts being interchangeable.
    Time that a GPU's memory spends on reads of *other* GPUs is left out, which can only make
    the best found better.

``lower_bound``
    Any number of tables, tiers, parts and patterns: a linear programme over the share of each
    stretch of rows that lies on each set of GPUs, solved by SciPy.  Every placement is a point
    of it, so that nothing beats its optimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import networkx as nx
import numba
import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from dgl_mgpu.machine import HostGroup, Topology
from dgl_mgpu.placement import HOST, Plan, TableSpec

HOST_EFFICIENCY = 0.95
REQUEST = 4096


def connected_graphs(most: int) -> Iterator[nx.Graph]:
    """Every connected graph of up to so many nodes, one of each shape."""
    for graph in nx.graph_atlas_g():
        if 1 <= len(graph) <= most and nx.is_connected(graph):
            yield graph


def machine(graph: nx.Graph, weights: str, memory: int) -> Topology:
    """GPUs linked like a graph: all links 50 GB/s, or 25 and 50, or also hosts shared by two."""
    n = len(graph)
    links = np.diag(np.full(n, 900.0))
    rng = np.random.default_rng(graph.number_of_edges())
    for one, other in graph.edges:
        width = 50.0 if weights == "equal" else float(rng.choice([25.0, 50.0]))
        links[one, other] = links[other, one] = width
    groups = ()
    if weights == "shared host":
        groups = tuple(
            HostGroup(tuple(range(first, min(first + 2, n))), 16.0) for first in range(0, n, 2)
        )
    return Topology(f"graph of {n}", links, np.full(n, memory), np.full(n, 12.0), 10**15, groups)


def curve_table(
    name: str, rows: int, row_bytes: int, skew: float, reads: float, points: int = 13
) -> TableSpec:
    """A table whose accesses fall off as a power of the position, kept at a few points."""
    positions = np.unique(np.geomspace(1, rows, points).astype(np.int64))
    positions = np.concatenate([[0], positions])
    share = (positions / rows) ** skew
    return TableSpec(
        name, "features", positions, positions * float(row_bytes), reads * share,
        float(row_bytes), REQUEST,
    )  # fmt: skip


# --- the cost model, once more and plainly ---------------------------------------------------


def plan_seconds(topology: Topology, specs: Sequence[TableSpec], plan: Plan) -> list[float]:
    """Time of each GPU under a plan, from its tiers and the curves alone."""
    n = topology.num_gpus
    local, host, disk = np.zeros(n), np.zeros(n), 0.0
    link = np.zeros((n, n))
    for spec in specs:
        for tier in plan.tables[spec.name].tiers:
            count = np.interp([tier.start, tier.stop], spec.positions, spec.accesses)
            moved = (count[1] - count[0]) * spec.access_bytes / 1e9
            for gpu in range(n):
                if tier.memory == "host":
                    host[gpu] += moved
                elif tier.memory == "disk":
                    host[gpu] += moved
                    disk += moved
                else:
                    for part, holder in enumerate(tier.source[gpu]):
                        rows = len(range(tier.start + part, tier.stop, tier.parts))
                        share = moved * rows / (tier.stop - tier.start)
                        if holder == HOST:
                            host[gpu] += share
                        else:
                            local[holder] += share
                            if holder != gpu:
                                assert topology.link_bandwidth[gpu, holder] > 0
                                assert holder in tier.copies[part]
                                link[gpu, holder] += share
    seconds = []
    for gpu in range(n):
        busy = [local[gpu] / topology.link_bandwidth[gpu, gpu]]
        busy += [link[gpu, j] / topology.link_bandwidth[gpu, j] for j in topology.neighbors(gpu)]
        width = topology.link_bandwidth - np.diag(np.diag(topology.link_bandwidth))
        if width[gpu].sum() > topology.ports()[gpu]:  # a port narrower than its links
            busy.append(link[gpu].sum() / topology.ports()[gpu])
            busy.append(link[:, gpu].sum() / topology.ports()[gpu])
        ways = [host[gpu] / topology.host_bandwidth[gpu]]
        for group in topology.host_groups:
            if gpu in group.gpus:
                ways.append(host[list(group.gpus)].sum() / group.bandwidth)
        total = max(busy) + max(ways) / HOST_EFFICIENCY
        seconds.append(total + (disk / topology.disk_bandwidth if disk else 0.0))
    return seconds


# --- a bound for everything -------------------------------------------------------------------


def lower_bound(topology: Topology, specs: Sequence[TableSpec], budget: float) -> float:
    """Seconds of the slowest GPU that no placement can beat."""
    n = topology.num_gpus
    sets = [frozenset(c) for size in range(n + 1) for c in combinations(range(n), size)]
    names: dict[tuple, int] = {}
    number = lambda *key: names.setdefault(key, len(names))  # noqa: E731
    equal: list[tuple[dict[int, float], float]] = []
    below: list[tuple[dict[int, float], float]] = []
    memory: list[dict[int, float]] = [{} for _ in range(n)]
    local: list[dict[int, float]] = [{} for _ in range(n)]
    link: dict[tuple[int, int], dict[int, float]] = {}
    host: list[dict[int, float]] = [{} for _ in range(n)]
    scale = sum(float(spec.accesses[-1]) * spec.access_bytes for spec in specs) / 1e9
    for t, spec in enumerate(specs):
        nbytes, accesses = np.diff(spec.nbytes), np.diff(spec.accesses) * spec.access_bytes / 1e9
        for s in range(len(nbytes)):
            equal.append(({number("x", t, s, S): 1.0 for S in sets}, 1.0))
            for S in sets:
                for gpu in S:
                    memory[gpu][number("x", t, s, S)] = nbytes[s] / budget
        for S in sets:
            for gpu in range(n):
                # What a GPU reads of the rows on S comes from the copies it reaches, or the host.
                row = {number("x", t, s, S): -accesses[s] / scale for s in range(len(nbytes))}
                for holder in S:
                    if topology.link_bandwidth[gpu, holder] > 0:
                        flow = number("f", t, S, gpu, holder)
                        row[flow] = 1.0
                        local[holder][flow] = 1.0
                        if holder != gpu:
                            link.setdefault((gpu, holder), {})[flow] = 1.0
                row[number("f", t, S, gpu, HOST)] = 1.0
                host[gpu][number("f", t, S, gpu, HOST)] = 1.0
                equal.append((row, 0.0))
    below += [(row, 1.0) for row in memory]
    for gpu in range(n):
        busy, way = number("busy", gpu), number("way", gpu)
        rates = [(local[gpu], topology.link_bandwidth[gpu, gpu], busy)]
        for peer in topology.neighbors(gpu):
            rates.append((link.get((gpu, peer), {}), topology.link_bandwidth[gpu, peer], busy))
        rates.append((host[gpu], topology.host_bandwidth[gpu] * HOST_EFFICIENCY, way))
        for group in topology.host_groups:
            if gpu in group.gpus:
                shared = {k: v for member in group.gpus for k, v in host[member].items()}
                rates.append((shared, group.bandwidth * HOST_EFFICIENCY, way))
        below += [({**{k: v / rate for k, v in row.items()}, var: -1.0}, 0.0)
                  for row, rate, var in rates]  # fmt: skip
        below.append(({busy: 1.0, way: 1.0, number("slowest"): -1.0}, 0.0))
    cost = np.zeros(len(names))
    cost[names["slowest",]] = 1.0
    found = linprog(cost, *_sparse(below, len(names)), *_sparse(equal, len(names)), method="highs")
    assert found.success, found.message
    return found.fun * scale


def _sparse(rows, width):
    entries = [(i, j, v) for i, (row, _) in enumerate(rows) for j, v in row.items()]
    i, j, v = zip(*entries, strict=True)
    return coo_array((v, (i, j)), shape=(len(rows), width)).tocsr(), [rhs for _, rhs in rows]


# --- every placement ----------------------------------------------------------------------------


def exhaustive(topology: Topology, spec: TableSpec, budget: float, grid: np.ndarray) -> float:
    """Seconds of the slowest GPU under the best placement of the discrete space above."""
    edges = np.interp(grid, spec.positions, spec.nbytes)
    hot = np.interp(grid, spec.positions, spec.accesses) * spec.access_bytes / 1e9
    total = float(spec.accesses[-1]) * spec.access_bytes / 1e9
    return _search(
        topology.link_bandwidth,
        topology.host_bandwidth * HOST_EFFICIENCY,
        budget,
        edges,
        hot,
        total,
    )


@numba.njit(cache=False)
def _search(link, host, budget, edges, hot, total):
    n = len(link)
    best = (total / host).max()  # everything in host memory
    chosen = np.ones(n, np.int64)  # ascending: parts are interchangeable
    while True:
        stored = np.zeros(n)
        for part in range(n):
            for g in range(n):
                if chosen[part] >> g & 1:
                    stored[g] += 1
        for b in range(len(edges)):
            if edges[b] / n * stored.max() > budget * (1 + 1e-9):
                break
            each, rest = hot[b] / n, total - hot[b]
            slowest = 0.0
            for g in range(n):
                slowest = max(slowest, _reader(link, host, chosen, g, each, rest, best))
                if slowest >= best:
                    break
            best = min(best, slowest)
        # The next multiset of sets.
        part = n - 1
        while part >= 0 and chosen[part] == (1 << n) - 1:
            part -= 1
        if part < 0:
            return best
        chosen[part:] = chosen[part] + 1


@numba.njit(cache=False)
def _reader(link, host, chosen, g, each, rest, best):
    """Least time of GPU g over every choice of where it reads each part; at least ``best`` when
    no choice beats that."""
    n = len(link)
    least = np.inf
    choice = np.zeros(n, np.int64)  # n: the host
    load = np.zeros(n + 1)
    part = 0
    choice[:] = -1
    # Depth first over the parts, cutting off what is too slow already.
    while part >= 0:
        if choice[part] >= 0:
            load[choice[part]] -= each
        moved = False
        for source in range(choice[part] + 1, n + 1):
            usable = source == n or (chosen[part] >> source & 1 and link[g, source] > 0)
            if usable:
                choice[part] = source
                load[source] += each
                moved = True
                break
        if not moved:
            choice[part] = -1
            part -= 1
            continue
        busy = 0.0
        for j in range(n):
            if load[j] > 0:
                busy = max(busy, load[j] / link[g, j])
        time = busy + (load[n] + rest) / host[g]
        if time >= min(least, best):
            continue
        if part == n - 1:
            least = time
        else:
            part += 1
            choice[part] = -1
    return least
